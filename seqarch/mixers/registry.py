"""Finds mixers: every installed package that declares an entry point of the group `seqarch.mixers` provides one.

Listing reads package metadata and imports nothing; `load_mixer` imports one module; `import_mixers` imports all, which
the command line does before it parses a recipe, so that a recipe may name a class without its module.
"""

import dataclasses
import warnings
from importlib.metadata import EntryPoint, entry_points

from seqarch.errors import UserError, unknown
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
    """Import the mixer class of that name. Raises `UserError` for an unknown name or a class that is no `Mixer`."""
    points = _points()
    if name not in points:
        raise unknown("mixer", name, points)
    entry = _entry(points[name])
    mixer = points[name].load()
    if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
        raise UserError(f"mixer '{name}' of {entry.package} is {entry.target}, which is no seqarch.mixers.Mixer")
    return mixer


def import_mixers() -> dict[str, type[Mixer]]:
    """Import every declared mixer. One that cannot be imported is left out with a warning that names its package."""
    loaded: dict[str, type[Mixer]] = {}
    for entry in mixer_entries():
        try:
            loaded[entry.name] = load_mixer(entry.name)
        except Exception as error:  # a broken plug-in must not take every other mixer with it
            warnings.warn(f"mixer '{entry.name}' of package {entry.package} is left out: {error}", stacklevel=2)
    return loaded


def _points() -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = points.setdefault(point.name, point)
        if other.value != point.value:
            packages = " and ".join(sorted({_entry(other).package, _entry(point).package}))
            raise UserError(f"mixer '{point.name}' is declared twice, by {packages}: uninstall one of them")
    return dict(sorted(points.items()))


def _entry(point: EntryPoint) -> MixerEntry:
    package, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
    return MixerEntry(point.name, point.value, package, version)
