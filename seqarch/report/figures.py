"""The figures of a report, drawn from run folders without any global state of matplotlib.

Colours are those of Okabe and Ito, "Color Universal Design" (2008, https://jfly.uni-koeln.de/color/), without their
yellow, which is too faint on white; layers are coloured with viridis. Each run has its own marker too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from seqarch.report.gap import EARLY, distance_curve
from seqarch.report.roles import OOD
from seqarch.report.runs import IN_DOMAIN, MEAN, Curve, Group

COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vpX<>Ph*d8"
FRAME = 0.25
"""The axes of the scatter begin at this fraction of training, where the points begin to lie close together."""
WIDTH = 9.0
"""Inches. A README shows a figure about 850 pixels wide, where 9 points then are 12 pixels."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "lines.linewidth": 1.4,
    "lines.markersize": 4.2,
    "legend.frameon": False,
    "text.parse_math": False,  # a run may be called a$b
    "svg.fonttype": "path",
    "svg.hashsalt": "seqarch",
}


@dataclass(frozen=True)
class Look:
    """How a run is drawn: runs beyond the colours come round again, hollow and dashed."""

    colour: str
    marker: str
    hollow: bool

    def line(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of `Axes.plot`."""
        style = {
            "color": self.colour,
            "marker": self.marker,
            "markerfacecolor": "white" if self.hollow else self.colour,
            "markeredgecolor": self.colour if self.hollow else "white",
            "markeredgewidth": 1.0 if self.hollow else 0.3,
            "linestyle": (0, (4, 1.5)) if self.hollow else "-",
        }
        return {**style, **changes}


def looks(groups: Sequence[Group], reference: Group) -> dict[str, Look]:
    """Black circles for the reference, then one colour and marker a run."""
    names = [reference.name, *(group.name for group in groups if group is not reference)]
    return {
        name: Look(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], i >= len(COLOURS))
        for i, name in enumerate(names)
    }


def scatter(groups: Sequence[Group], reference: Group) -> Figure:
    """In-domain loss against that of each compared domain and their mean, a panel each, with the identity line."""
    domains = list(groups[0].evaluations[0].with_mean())
    look = looks(groups, reference)
    figure, panels = _panels(len(domains))
    for axes, domain in zip(panels, domains, strict=True):
        late_x, late_y = [], []
        for group in groups:
            for points in group.evaluations:
                y = points.with_mean()[domain]
                late = points.tokens >= FRAME * points.tokens.max()
                late_x.append(points.in_domain[late])
                late_y.append(y[late])
                style = look[group.name].line(markevery=_every(len(y)), linewidth=0.9)
                axes.plot(points.in_domain, y, **style)
                axes.plot(points.in_domain[-1:], y[-1:], **look[group.name].line(markersize=7.5, zorder=3))
        _frame(axes, np.concatenate(late_x), np.concatenate(late_y))
        axes.set_title(_title(domain, domains))
    figure.supxlabel(f"{reference.role.axis} (nats a token): training runs to the right →", fontsize=9)
    figure.supylabel(f"{reference.role.loss} (nats a token)", fontsize=9)
    identity = (Line2D([], [], **IDENTITY), "identity")
    _legend(figure, groups, look, extra=[identity])
    return figure


def distances(groups: Sequence[Group], reference: Group) -> Figure | None:
    """A domain's loss less the reference's at the same in-domain loss: the curves of which the gap is the mean."""
    others = [group for group in groups if group is not reference]
    look = looks(groups, reference)
    domains = list(reference.evaluations[0].with_mean())
    drawn = [
        (group, *distance_curve(points, reference.evaluations)) for group in others for points in group.evaluations
    ]
    drawn = [(group, x, distance) for group, x, distance in drawn if len(x)]
    if not drawn:
        return None
    figure, panels = _panels(len(domains))
    for axes, domain in zip(panels, domains, strict=True):
        axes.axhline(0, color=look[reference.name].colour, linewidth=1.4)
        for group, x, distance in drawn:
            thin = {"linewidth": 0.9, "alpha": 0.75} if len(group.runs) > 1 else {}
            axes.plot(x, distance[domain], **look[group.name].line(markevery=_every(len(x)), **thin))
        axes.set_title(_title(domain, domains))
        axes.margins(x=0.03, y=0.08)
        axes.yaxis.set_major_formatter("{x:+g}")
    panels[0].invert_xaxis()
    figure.supxlabel(f"{reference.role.axis} (nats a token): training runs to the right →", fontsize=9)
    figure.supylabel(f"{reference.role.loss} above reference (nats a token)", fontsize=9)
    shown = [group for group in others if any(group is one for one, _, _ in drawn)]
    _legend(figure, [reference, *shown], look, note={reference.name: "reference"})
    return figure


def losses(groups: Sequence[Group], reference: Group) -> Figure:
    """Training and in-domain losses and those of the compared domains over the tokens seen."""
    look = looks(groups, reference)
    role, run = reference.role, reference.runs[0]
    tags = {"loss/train": "training", IN_DOMAIN: "in-domain hold-out" if role is OOD else role.inside}
    tags |= {role.tag(name): f"{role.short}: {name}" for name in run.domains}
    if role is OOD and run.domains == run.evaluated != run.domains[:1]:
        tags["loss/ood"] = "OOD: mean of domains"
    tags = {tag: title for tag, title in tags.items() if any(tag in run.curves for g in groups for run in g.runs)}
    scale, unit = _token_unit(max(run.tokens for group in groups for run in group.runs))
    figure, panels = _panels(len(tags))
    for axes, (tag, title) in zip(panels, tags.items(), strict=True):
        seen = []
        for group in groups:
            for curve in (run.curves[tag] for run in group.runs if tag in run.curves):
                smooth = _thin(curve)
                if not len(smooth.value):
                    continue
                seen.append(smooth)
                style = look[group.name].line(markevery=_every(len(smooth.value), 15))
                axes.plot(smooth.tokens / scale, smooth.value, **style)
        _clip(axes, seen)
        axes.set_title(title)
        axes.set_xlim(left=0)
    figure.supxlabel(f"tokens seen ({unit})", fontsize=9)
    figure.supylabel("loss (nats a token)", fontsize=9)
    _legend(figure, groups, look)
    return figure


def entropies(groups: Sequence[Group], *, implied: bool = False) -> Figure | None:
    """Entropy of each layer over the tokens seen, a panel for each run that logged it (its first seed).

    Of attention, or of the implied weights of recurrent mixers.
    """
    first = [group.runs[0] for group in groups]
    layers = [(run, run.implied_entropy_layers if implied else run.entropy_layers) for run in first]
    layers = [(run, curves) for run, curves in layers if curves]
    if not layers:
        return None
    depth = 1 + max(layer for _, curves in layers for layer in curves)
    scale, unit = _token_unit(max(run.tokens for run, _ in layers))
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.93, depth))
    figure, panels = _panels(len(layers), sharey=True)
    for axes, (run, curves) in zip(panels, layers, strict=True):
        for layer, curve in curves.items():
            smooth = _thin(curve)
            axes.plot(smooth.tokens / scale, smooth.value, color=colours[layer], linewidth=1.3)
        axes.set_title(_wrap(run.name, int(10 * axes.get_position().width * figure.get_figwidth())))
        axes.set_xlim(left=0)
    norm = BoundaryNorm(np.arange(depth + 1) - 0.5, depth)
    bar = figure.colorbar(ScalarMappable(norm, ListedColormap(colours)), ax=panels, aspect=30, pad=0.02)
    bar.set_ticks([int(tick) for tick in MaxNLocator(12, integer=True).tick_values(0, depth - 1) if 0 <= tick < depth])
    bar.ax.tick_params(length=0)
    bar.set_label("layer, from the input (0) to the output")
    figure.supxlabel(f"tokens seen ({unit})", fontsize=9)
    figure.supylabel(f"{'implied' if implied else 'attention'} entropy (nats)", fontsize=9)
    return figure


IDENTITY = {"color": "#777777", "linestyle": (0, (2, 2)), "linewidth": 1.1}


def _panels(count: int, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure of README width with `count` panels in rows of at most three."""
    columns = {1: 1, 2: 2, 4: 2}.get(count, 3)
    rows = -(-count // columns)
    width = WIDTH if columns > 1 else 0.72 * WIDTH
    figure = Figure(figsize=(width, 2.9 * rows + 0.7 + 0.9 * (columns == 1)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.remove()
    for axes in panels[:count]:
        axes.tick_params(labelbottom=True, length=3)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    return figure, panels[:count]


def _frame(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    """Limits around the late points, in-domain loss falling to the right, and as much of the identity line as fits.

    A third of the identity line is kept in view where that costs at most 60 % more height than the data take.
    """
    left, right = _padded(x)[::-1]
    bottom, top = _padded(y)
    third = (left - right) / 3
    wanted = min(bottom, left - third), max(top, right + third)
    if wanted[1] - wanted[0] <= 1.6 * (top - bottom):
        bottom, top = wanted
    axes.plot([left, right], [left, right], zorder=1, **IDENTITY)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    if left < bottom or right > top:
        below = left < bottom
        away = f"identity line {bottom - left if below else right - top:.2g} nats {'below' if below else 'above'}"
        edge = y < bottom + 0.15 * (top - bottom) if below else y > top - 0.15 * (top - bottom)
        in_left_half = x > (left + right) / 2
        on_left = (edge & in_left_half).sum() <= (edge & ~in_left_half).sum()  # the corner with fewer points
        axes.text(
            0.02 if on_left else 0.98,
            0.03 if below else 0.97,
            away,
            ha="left" if on_left else "right",
            va="bottom" if below else "top",
            transform=axes.transAxes,
            color="#777777",
            fontsize=8,
        )


def _padded(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    pad = 0.05 * (high - low) or 0.05
    return low - pad, high + pad


def _clip(axes: Axes, curves: Sequence[Curve]) -> None:
    """Puts the first tenth of training, where losses fall steeply, outside the axis if it would squeeze the rest."""
    late = [curve.value[curve.tokens >= EARLY * curve.tokens.max()] for curve in curves]
    values = np.concatenate([part[np.isfinite(part)] for part in late]) if late else np.empty(0)
    if len(values):
        axes.set_ylim(*_padded(values))


def _thin(curve: Curve, points: int = 60) -> Curve:
    """The curve averaged over at most `points` equal stretches of rows; values that are not finite are left out."""
    kept = np.isfinite(curve.value)
    columns = (curve.step[kept], curve.tokens[kept], curve.value[kept])
    edges = np.unique(np.linspace(0, int(kept.sum()), points + 1).astype(int))
    return Curve(*(np.array([column[a:b].mean() for a, b in pairwise(edges)]) for column in columns))


def _every(count: int, markers: int = 25) -> int:
    return max(1, round(count / markers))


def _title(domain: str, domains: Sequence[str]) -> str:
    return "mean of domains" if domain == MEAN and len(domains) > 1 else domain


def _token_unit(tokens: float) -> tuple[float, str]:
    units = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"))
    return next(((size, name) for size, name in units if tokens >= size), (1.0, "tokens"))


def _wrap(text: str, length: int) -> str:
    """Breaks a long name into lines, at any character: run names have no spaces."""
    return "\n".join(text[i : i + length] for i in range(0, len(text), length))


def _legend(
    figure: Figure,
    groups: Sequence[Group],
    look: dict[str, Look],
    *,
    extra: Sequence[tuple[Line2D, str]] = (),
    note: dict[str, str] | None = None,
) -> None:
    """A legend above the panels, where it covers no data, in as many columns as the longest name leaves room for."""
    notes = note or {}
    entries = [
        (Line2D([], [], **look[group.name].line(markersize=6)), _label(group, notes.get(group.name)))
        for group in groups
    ]
    entries.extend(extra)
    longest = max(len(label) for _, label in entries)
    columns = max(1, min(len(entries), int(figure.get_figwidth() / (0.085 * longest + 0.7))))
    legend = figure.legend(
        [line for line, _ in entries], ["x"] * len(entries), loc="outside upper left", ncols=columns, handlelength=2.6
    )
    for text, (_, label) in zip(legend.get_texts(), entries, strict=True):
        text.set_text(label)  # set afterwards: the legend would drop a name that starts with an underscore


def _label(group: Group, note: str | None) -> str:
    remarks = [note] if note else []
    if len(group.runs) > 1:
        remarks.append(f"{len(group.runs)} seeds")
    return group.name + (f" ({', '.join(remarks)})" if remarks else "")


def save(draw: Callable[[], Figure | None], stem: Path) -> list[Path]:
    """Draws in the report's style and writes `stem.png` and `stem.svg`; nothing where there is nothing to draw."""
    with matplotlib.rc_context(STYLE):
        figure = draw()
        if figure is None:
            return []
        written = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
        figure.savefig(written[0], dpi=200)
        figure.savefig(written[1], metadata={"Date": None})
    return written
