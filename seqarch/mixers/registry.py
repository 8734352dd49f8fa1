"""Finds mixers: every installed package that declares an entry point of the group `seqarch.mixers` provides one.

Listing reads package metadata and imports nothing; `load_mixer` imports one module; `import_mixers` imports all. The
command line calls it before it parses a recipe, so that a recipe may name a class without its module.
"""

import dataclasses

from seqarch.mixers.base import Mixer
from seqarch.mixers.positions import PositionEncoding
from seqarch.plugins import MIXERS, entries, import_all, load, load_all, name_and_version


@dataclasses.dataclass(frozen=True)
class MixerEntry:
    """A mixer as its package declares it: `target` is "module:Class"."""

    name: str
    target: str
    package: str
    version: str


def mixer_entries() -> list[MixerEntry]:
    """All declared mixers by name."""
    return [MixerEntry(name, point.value, *name_and_version(point.dist)) for name, point in entries(MIXERS).items()]


def load_mixer(name: str) -> type[Mixer]:
    """Import the mixer class of that name.

    Raises:
        UserError: the name is unknown, or its class cannot be imported, is not a `Mixer`, is abstract, or has another
            name.
    """
    return load(MIXERS, name, Mixer)


def import_mixers() -> dict[str, type[Mixer]]:
    """Import every declared mixer; one that `load_mixer` refuses is left out with a `PluginWarning` that says why."""
    return import_all(MIXERS, Mixer)


def import_parts() -> None:
    """Import every declared mixer and position encoding, so that a recipe may name its bare class."""
    import_mixers()
    import_all("seqarch.positions", PositionEncoding)


def broken_parts() -> dict[str, str]:
    """The declared mixers and position encodings that `import_parts` leaves out, with the reason."""
    return load_all("seqarch.positions", PositionEncoding)[1] | load_all(MIXERS, Mixer)[1]
