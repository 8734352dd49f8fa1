"""The style of each run: colour, marker and line, the same in all figures of a report.

Colours are those of Okabe and Ito, "Color Universal Design" (2008, https://jfly.uni-koeln.de/color/), without their
yellow, which is too faint on white. The reference is black. Up to `FEW` runs have a colour each; of more, those of one
family have shades of one colour. Each also has its own marker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seqarch.report.runs import Group

COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "osD^vpX<>Ph*d8"
FEW = len(COLOURS)
"""As many runs as there are colours."""
FAMILIES = {
    "Attention": "attention",
    **dict.fromkeys(("Top1Element", "Top1Chunk"), "top1"),
    **dict.fromkeys(("RWKV5", "RWKV6", "RWKV7", "RWKV7Shell"), "rwkv"),
    **dict.fromkeys(("Mamba1", "Mamba2"), "mamba"),
    **dict.fromkeys(("DeltaNet", "GatedDeltaNet"), "delta"),
    **dict.fromkeys(("Based", "TaylorLinearAttention", "GatedConvolution"), "based"),
}
"""Families of mixers by class, for runs whose record has no families; any other class is a family of its own."""
SHADES = (0.0, 0.35, -0.45)
"""Shares of white (of black where negative) mixed into the colours of a family's first, second and third run."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


@dataclass(frozen=True)
class Style:
    """The style of a run. `dash` is an index into `DASHES`; markers that come round again are hollow."""

    colour: str
    marker: str
    hollow: bool
    dash: int = 0

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


def family(group: Group) -> str:
    """The family of a run's mixers; a hybrid has the families of all its mixers."""
    facts = group.runs[0].facts
    recorded = facts.get("families") or {}
    kinds = (facts.get("mixers") or {}).items()
    return " + ".join(sorted({str(recorded.get(name) or FAMILIES.get(kind, kind)) for name, kind in kinds}))


def styles(groups: Sequence[Group], reference: Group) -> dict[str, Style]:
    """Black circles for the reference; for the others a colour each or, of many, by family, in order of appearance."""
    others = [group for group in groups if group is not reference]
    markers = [(MARKERS[i % len(MARKERS)], i >= len(MARKERS)) for i in range(len(groups))]
    found = {reference.name: Style(COLOURS[0], *markers[0])}
    families = list(dict.fromkeys(map(family, others)))
    single = len(groups) <= FEW or len(families) < 3
    members: Counter[str] = Counter()
    for i, group in enumerate(others):
        kind = str(i % (FEW - 1)) if single else family(group)
        colour = COLOURS[1 + (i if single else families.index(kind)) % (FEW - 1)]
        turn = members[kind] % len(SHADES)
        members[kind] += 1
        found[group.name] = Style(_shade(colour, SHADES[turn]), *markers[i + 1], dash=turn)
    return found


def _shade(colour: str, share: float) -> str:
    """A colour mixed with a share of white, or of black where it is negative."""
    from matplotlib.colors import to_hex, to_rgb  # a comparison without figures needs no matplotlib

    end = 1.0 if share > 0 else 0.0
    red, green, blue = (part + abs(share) * (end - part) for part in to_rgb(colour))
    return to_hex((red, green, blue))
