"""Finds mixers: every installed package that declares an entry point of the group `seqarch.mixers` provides one.

Listing reads package metadata and imports nothing; `load_mixer` imports one module; `import_mixers` imports all, which
the command line does before it parses a recipe, so that a recipe may name a class without its module.
"""

import dataclasses
import warnings
from importlib.metadata import EntryPoint, entry_points

from seqarch.errors import PluginWarning, UserError, unknown
from seqarch.mixers.base import Mixer

GROUP = "seqarch.mixers"


@dataclasses.dataclass(frozen=True)
class MixerEntry:
    """A mixer as its package declares it: `target` is "module:Class"."""

    name: str
    target: str
    package: str
    version: str


def mixer_entries() -> list[MixerEntry]:
    """All declared mixers by name. Raises `UserError` where two packages declare one name."""
    return [_entry(point) for point in _points().values()]


def load_mixer(name: str) -> type[Mixer]:
    """Import the mixer class of that name.

    Raises:
        UserError: the name is unknown, or what it stands for cannot be imported, is no `Mixer`, or has another name.
    """
    points = _points()
    if name not in points:
        raise unknown("mixer", name, points)
    return _load(points[name])


def _load(point: EntryPoint) -> type[Mixer]:
    name, entry = point.name, _entry(point)
    which = f"mixer '{name}' of package {entry.package} ({entry.target})"
    try:
        mixer = point.load()
    except Exception as error:  # whatever a plug-in's module raises is its author's, and the name of it helps them
        raise UserError(f"{which} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise UserError(f"{which} is no subclass of seqarch.mixers.Mixer")
    if mixer.__name__ != name:  # a recipe names the class
        raise UserError(f"{which} is declared under another name than its class: declare it as {mixer.__name__}")
    return mixer


def import_mixers() -> dict[str, type[Mixer]]:
    """Import every declared mixer; one that `load_mixer` refuses is left out with a `PluginWarning` that says why."""
    loaded, refused = _load_all()
    for reason in refused.values():
        warnings.warn(f"left out: {reason}", PluginWarning, stacklevel=2)
    return loaded


def broken_mixers() -> dict[str, str]:
    """The declared mixers that `import_mixers` leaves out, with the reason."""
    return _load_all()[1]


def _load_all() -> tuple[dict[str, type[Mixer]], dict[str, str]]:
    loaded: dict[str, type[Mixer]] = {}
    refused: dict[str, str] = {}
    for name, point in _points().items():
        try:
            loaded[name] = _load(point)
        except UserError as error:  # a broken plug-in must not take every other mixer with it
            refused[name] = str(error)
    return loaded, refused


def _points() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = points.setdefault(point.name, point)
        if other is point:  # reading the metadata of packages is slow
            continue
        here, there = _entry(point), _entry(other)
        if (here.package, here.target) != (there.package, there.target):
            packages = " and ".join(sorted(f"{entry.package} ({entry.target})" for entry in (here, there)))
            raise UserError(f"mixer '{point.name}' is declared twice, by {packages}: uninstall one of them")
    return dict(sorted(points.items()))


def _entry(point: EntryPoint) -> MixerEntry:
    package, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
    return MixerEntry(point.name, point.value, package, version)
