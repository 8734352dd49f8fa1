"""The style of each model: colour, marker and dashes, the same in all figures.

`styles.csv` holds the models of this library. Related ones have related colours. Other models, such as those of
plug-ins, take a look by a digest of their name, so that it stays from figure to figure. Most colours are those of Okabe
and Ito, "Color Universal Design" (2008, https://jfly.uni-koeln.de/color/).
"""

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqarch.report.runs import Group
from seqarch.tables import read_csv

FEW = 7
"""The most models of a report whose panels all have one size."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


@dataclass(frozen=True)
class Style:
    """The style of a model. `dash` is an index into `DASHES`."""

    colour: str
    marker: str
    dash: int = 0
    hollow: bool = False

    def line(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        style = {
            "color": self.colour,
            "marker": self.marker,
            "markerfacecolor": "white" if self.hollow else self.colour,
            "markeredgecolor": self.colour if self.hollow else "white",
            "markeredgewidth": 1.0 if self.hollow else 0.3,
            "linestyle": DASHES[self.dash],
        }
        return {**style, **changes}


LOOKS = {
    row["name"]: Style(row["colour"], row["marker"], int(row["dash"]))
    for row in read_csv(Path(__file__).with_name("styles.csv"))
}
"""By the class of the mixer or the name of the recipe."""
ALIASES = {"transformer_pp": "Attention"}
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b3294", "#8a8a1f")
MARKERS = "sD^vpXP<>h*d8o"


def styles(kinds: Mapping[str, str]) -> dict[str, Style]:
    """The styles of models by name, from the class of each model's mixer.

    A name of `LOOKS` has its look. A class gives its look to the first of the models that have it. The others differ
    from all that are drawn with them.
    """
    table = {_plain(key): look for key, look in LOOKS.items()}
    table |= {_plain(name): LOOKS[key] for name, key in ALIASES.items()}
    chosen: dict[str, Style] = {}
    for name, key in [*zip(kinds, kinds, strict=True), *kinds.items()]:
        look = table.get(_plain(key))
        if look is not None and name not in chosen and look not in chosen.values():
            chosen[name] = look
    keys = {name: _plain(kind) for name, kind in kinds.items()}
    digests = {name: zlib.crc32((_plain(name) if key in table else key).encode()) for name, key in keys.items()}
    for name in sorted(kinds.keys() - chosen.keys(), key=lambda name: (digests[name], name)):
        chosen[name] = _free(digests[name], list(chosen.values()))
    return {name: chosen[name] for name in kinds}


def kind(group: Group) -> str:
    """The class of a model's mixer, or the classes of a hybrid's."""
    return " + ".join(sorted(set((group.runs[0].facts.get("mixers") or {}).values())))


def _free(digest: int, taken: list[Style]) -> Style:
    """The look that a digest points to, or the next one whose colour and marker are rarest among those taken."""
    colours = Counter(look.colour for look in taken)
    markers = Counter((look.marker, look.hollow) for look in taken)
    shapes = [(marker, hollow) for hollow in (False, True) for marker in _from(MARKERS, digest // len(COLOURS))]
    colour = min(_from(COLOURS, digest), key=lambda each: colours[each])
    marker, hollow = min(shapes, key=lambda each: markers[each])
    return Style(colour, marker, min(colours[colour], len(DASHES) - 1), hollow)


def _from(ring: Any, place: int) -> list[str]:
    place %= len(ring)
    return [*ring[place:], *ring[:place]]


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
