"""The figure of the gaps: every run a row, the best on top."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from seqarch.report.looks import looks
from seqarch.report.panels import WIDTH, first, label, padded, signed, title, wrap
from seqarch.report.runs import Group
from seqarch.report.tables import Comparison, ranked

ROW = 0.27
TWO_LINES = 0.34
"""Inches of a row, and where names take two lines."""
COLUMNS = 4


def gaps(groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison]) -> Figure | None:
    """Gap and 95 % interval of each run, sorted by the gap of the mean, a panel for the mean and for each domain."""
    if not any(one.gaps for one in comparisons):
        return None
    look = looks(groups, reference)
    rows = ranked(groups, reference, comparisons)
    by_name = {one.group.name: one for one in comparisons}
    domains = [gap.domain for gap in next(one.gaps for one in comparisons if one.gaps)]
    domains = domains[-1:] + domains[:-1]
    names = [wrap(label(group), 34) for group in rows]
    figure, panels = _panels(len(domains), names)
    for axes, domain in zip(panels, domains, strict=True):
        axes.axvline(0, color=look[reference.name].colour, linewidth=1.2, zorder=1)
        for row, group in enumerate(rows):
            comparison = by_name.get(group.name)
            found = {gap.domain: gap for gap in comparison.gaps} if comparison else {}
            style = look[group.name].line(markersize=6.5 if axes is panels[0] else 5, linestyle="-", linewidth=2)
            if comparison is None:
                axes.plot([0], [row], **style)
            elif domain in found:
                gap = found[domain]
                axes.plot([gap.low, gap.high], [row, row], **{**style, "marker": None}, solid_capstyle="butt")
                axes.plot([gap.value], [row], **style)
            elif axes is panels[0]:
                axes.text(0, row, " no gap: too little overlap", va="center", color="#777777", fontsize=8)
        axes.set_title(title(domain, domains))
    ends = [end for one in comparisons for gap in one.gaps for end in (0.0, gap.low, gap.high)]
    for axes in panels:
        axes.set_xlim(*padded(np.array(ends)))
    panels[0].set_yticks(range(len(rows)), names)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)
    panels[0].get_yticklabels()[rows.index(reference)].set_fontweight("bold")
    _arrange(figure, panels[0])
    role = reference.role
    words = f"{role.loss} above {reference.name} at the same {role.equal} (nats a token): left is better"
    figure.supxlabel(words, fontsize=9)
    return figure


def _panels(count: int, names: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Panels beside each other with one axis for all; the first, if all stand in one row, is wider than the others."""
    columns = min(count, COLUMNS)
    row = TWO_LINES if any("\n" in name for name in names) else ROW
    lines = -(-count // columns)
    widths = [1.0 + 0.7 * (lines == 1), *[1.0] * (columns - 1)]
    size = (WIDTH, lines * (row * (len(names) + 1) + 0.65) + 0.25)
    figure = Figure(figsize=size)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True, gridspec_kw={"width_ratios": widths})
    shown = first(grid, count)
    for i, axes in enumerate(shown):
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5 if i == 0 and lines == 1 else 4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(signed)
    return figure, shown


def _arrange(figure: Figure, first: Axes) -> None:
    """Margins by the names of the rows; the constrained layout would place such panels a hair apart now and then."""
    figure.draw_without_rendering()
    names = max(text.get_window_extent().width for text in first.get_yticklabels()) / figure.dpi
    height = figure.get_figheight()
    spec = first.get_gridspec()
    rows = spec.nrows if spec else 1
    inner = height - 0.85 - 0.6 * (rows - 1)
    figure.subplots_adjust(
        *(0.12 / WIDTH + names / WIDTH, 0.55 / height, 1 - 0.12 / WIDTH, 1 - 0.3 / height),
        wspace=0.1,
        hspace=0.6 / (inner / rows),
    )
