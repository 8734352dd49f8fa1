"""Figures of what `seqarch eval` found: passkeys by length and depth, and losses by position."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from seqarch.report.findings import Findings
from seqarch.report.panels import ReportFigure, legend, panels, wrap
from seqarch.runs import tags
from seqarch.tables import readable

BANDS = 5
"""Bands of depth in the heat map."""


def passkey(found: Findings) -> Figure | None:
    """Heat map of passkeys found, length by depth, a panel per model; of metrics `.../contains` with a depth."""
    maps: dict[str, dict[int, np.ndarray]] = {}
    for tag, measured in found.capabilities.items():
        for name, one in measured.items():
            length = one.facts["settings"].get("length")
            if tag.endswith("/contains") and length and one.depth is not None:
                band = np.minimum((one.depth * BANDS).astype(int), BANDS - 1)
                shares = [one.samples[band == each].mean() if (band == each).any() else np.nan for each in range(BANDS)]
                maps.setdefault(name, {})[length] = np.array(shares)
    if not maps:
        return None
    lengths = sorted({length for each in maps.values() for length in each})
    figure, shown = panels(len(maps), sharey=True)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#cccccc")
    image = None
    for axes, (name, columns) in zip(shown, maps.items(), strict=True):
        table = np.array([columns.get(length, np.full(BANDS, np.nan)) for length in lengths]).T
        image = axes.imshow(table, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for (row, column), share in np.ndenumerate(table):
            if np.isfinite(share):
                colour = "black" if share > 0.6 else "white"
                axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(lengths)), [readable(length) for length in lengths])
        axes.set_yticks(range(BANDS), [f"{(each + 0.5) / BANDS:.1f}" for each in range(BANDS)])
        axes.set_title(wrap(name, 28))
    assert image is not None
    figure.colorbar(image, ax=shown, aspect=30, pad=0.02, label="share found")
    figure.supxlabel("tokens in the prompt", fontsize=9)
    figure.supylabel("depth of the passkey", fontsize=9)
    return figure


PASSKEY = ReportFigure(
    "passkey",
    passkey,
    "Passkey retrieval by length and depth",
    "The share of passkeys that a model repeats, by the length of the prompt and by the place of the passkey in it: 0 "
    "is the beginning. A grey field has no sample.",
)


def positions(found: Findings) -> Figure | None:
    """Loss over the position in the document, a panel per domain and a line per model."""
    ranges = {tag: place for tag in found.capabilities if (place := tags.position_range(tag))}
    if not ranges:
        return None
    domains = list(dict.fromkeys(domain for domain, _, _ in ranges.values()))
    figure, shown = panels(len(domains))
    drawn = set()
    for axes, domain in zip(shown, domains, strict=True):
        for group in found.groups:
            points = [
                (np.sqrt(max(start, 1) * stop), found.capabilities[tag][group.name].value)
                for tag, (where, start, stop) in ranges.items()
                if where == domain and group.name in found.capabilities[tag]
            ]
            if points:
                x, values = zip(*sorted(points, key=lambda point: point[0]), strict=True)
                style = found.styles[group.name].line()
                axes.plot(x, [each.value for each in values], **style)
                ends = [(each.low, each.high) for each in values if each.low is not None]
                if len(ends) == len(x):
                    axes.vlines(x, *zip(*ends, strict=True), color=style["color"], linewidth=0.9)
                drawn.add(group.name)
        axes.set_xscale("log")
        axes.set_title(domain)
    figure.supxlabel("position in the document (tokens)", fontsize=9)
    figure.supylabel("loss (nats per token)", fontsize=9)
    legend(figure, [group for group in found.groups if group.name in drawn], found.styles)
    return figure


POSITIONS = ReportFigure(
    "loss_by_position",
    positions,
    "Loss by position in long documents",
    "The mean loss of the tokens between two positions, with its 95 % interval over the documents. A model that uses "
    "its whole context has a falling curve.",
)
