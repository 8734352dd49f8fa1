"""The figures of a report, drawn from run folders without any global state of matplotlib.

Of more than `FEW` runs, the mean of the domains gets a large panel, and legends are in the order of the gaps. Layers
are coloured with viridis.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
from seqarch.report.looks import FEW, looks
from seqarch.report.panels import IDENTITY, every, frame, legend, overview, padded, signed, title, token_unit, wrap
from seqarch.report.panels import panels as few_panels
from seqarch.report.roles import OOD
from seqarch.report.runs import IN_DOMAIN, Group
from seqarch.report.tables import Comparison, ranked
from seqarch.runs import tags
from seqarch.runs.curves import Curve

FRAME = 0.25
"""The axes of the scatter begin at this fraction of training, where the points begin to lie close together."""
LATE_FRAME = 0.5
"""The same for many runs, whose curves need the room."""


def scatter(groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison] = ()) -> Figure:
    """In-domain loss against that of each compared domain and their mean, a panel each, with the identity line."""
    many = len(groups) > FEW
    domains = list(groups[0].evaluations[0].with_mean())
    look = looks(groups, reference)
    figure, panels = overview(len(domains), len(groups)) if many else few_panels(len(domains))
    identity: list[tuple[Line2D, str]] = []
    for axes, domain in zip(panels, domains, strict=True):
        late_x, late_y = [], []
        for group in groups:
            for points in group.evaluations:
                y = points.with_mean()[domain]
                late = points.tokens >= (LATE_FRAME if many else FRAME) * points.tokens.max()
                late_x.append(points.in_domain[late])
                late_y.append(y[late])
                style = look[group.name].line(markevery=every(len(y)), linewidth=0.9)
                if many:
                    style |= _many(group, reference, axes is panels[-1])
                axes.plot(points.in_domain, y, **style)
                axes.plot(points.in_domain[-1:], y[-1:], **look[group.name].line(markersize=7.5, zorder=3))
        if frame(axes, np.concatenate(late_x), np.concatenate(late_y), spare=0.1 if many else 0.6):
            identity = [(Line2D([], [], **IDENTITY), "identity")]
        axes.set_title(title(domain, domains))
    figure.supxlabel(f"{reference.role.axis} (nats a token): training runs to the right →", fontsize=9)
    figure.supylabel(f"{reference.role.loss} (nats a token)", fontsize=9)
    shown = ranked(groups, reference, comparisons)[::-1] if many else groups
    legend(figure, shown, look, extra=identity, beside=panels[-1] if many else None)
    return figure


def distances(groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison] = ()) -> Figure | None:
    """A domain's loss less the reference's at the same in-domain loss: the curves of which the gap is the mean."""
    many = len(groups) > FEW
    others = [group for group in groups if group is not reference]
    look = looks(groups, reference)
    domains = list(reference.evaluations[0].with_mean())
    drawn = [
        (group, *distance_curve(points, reference.evaluations)) for group in others for points in group.evaluations
    ]
    drawn = [(group, x, distance) for group, x, distance in drawn if len(x)]
    if not drawn:
        return None
    figure, panels = overview(len(domains), len(groups)) if many else few_panels(len(domains))
    for axes, domain in zip(panels, domains, strict=True):
        axes.axhline(0, color=look[reference.name].colour, linewidth=1.4)
        for group, x, distance in drawn:
            style = look[group.name].line(markevery=every(len(x)))
            if many:
                style |= _many(group, reference, axes is panels[-1])
            elif len(group.runs) > 1:
                style |= {"linewidth": 0.9, "alpha": 0.75}
            axes.plot(x, distance[domain], **style)
        axes.set_title(title(domain, domains))
        axes.margins(x=0.03, y=0.08)
        axes.yaxis.set_major_formatter(signed)
    for axes in panels[:1] + panels[-1:] * many:  # the small ones share their axis
        axes.invert_xaxis()
    figure.supxlabel(f"{reference.role.axis} (nats a token): training runs to the right →", fontsize=9)
    figure.supylabel(f"{reference.role.loss} above reference (nats a token)", fontsize=9)
    shown = [reference, *(group for group in others if any(group is one for one, _, _ in drawn))]
    if many:
        shown = ranked(shown, reference, comparisons)[::-1]
    legend(figure, shown, look, note={reference.name: "reference"}, beside=panels[-1] if many else None)
    return figure


def losses(groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison] = ()) -> Figure:
    """Training and in-domain losses and those of the compared domains over the tokens seen."""
    many = len(groups) > FEW
    look = looks(groups, reference)
    role, run = reference.role, reference.runs[0]
    shown = {tags.TRAIN_LOSS: "training", IN_DOMAIN: "in-domain hold-out" if role is OOD else role.inside}
    shown |= {role.tag(name): f"{role.short}: {name}" for name in run.domains}
    if role is OOD and run.domains == run.evaluated != run.domains[:1]:
        shown[tags.loss(role.name)] = "OOD: mean of domains"
    shown = {tag: name for tag, name in shown.items() if any(tag in run.curves for g in groups for run in g.runs)}
    scale, unit = token_unit(max(run.tokens for group in groups for run in group.runs))
    figure, panels = few_panels(len(shown))
    for axes, (tag, name) in zip(panels, shown.items(), strict=True):
        seen = []
        for group in groups:
            for curve in (run.curves[tag] for run in group.runs if tag in run.curves):
                smooth = _thin(curve)
                if not len(smooth.value):
                    continue
                seen.append(smooth)
                style = look[group.name].line(markevery=every(len(smooth.value), 15))
                if many:
                    style |= _many(group, reference, large=False)
                axes.plot(smooth.tokens / scale, smooth.value, **style)
        _clip(axes, seen, FRAME if many else EARLY)
        axes.set_title(name)
        axes.set_xlim(left=0)
    figure.supxlabel(f"tokens seen ({unit})", fontsize=9)
    figure.supylabel("loss (nats a token)", fontsize=9)
    legend(figure, ranked(groups, reference, comparisons) if many else groups, look)
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
    scale, unit = token_unit(max(run.tokens for run, _ in layers))
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.93, depth))
    figure, panels = few_panels(len(layers), sharey=True, columns=4 if len(layers) > 9 else None)
    for axes, (run, curves) in zip(panels, layers, strict=True):
        for layer, curve in curves.items():
            smooth = _thin(curve)
            axes.plot(smooth.tokens / scale, smooth.value, color=colours[layer], linewidth=1.3)
        axes.set_title(wrap(run.name, int(10 * axes.get_position().width * figure.get_figwidth())))
        axes.set_xlim(left=0)
    norm = BoundaryNorm(np.arange(depth + 1) - 0.5, depth)
    bar = figure.colorbar(ScalarMappable(norm, ListedColormap(colours)), ax=panels, aspect=30, pad=0.02)
    bar.set_ticks([int(tick) for tick in MaxNLocator(12, integer=True).tick_values(0, depth - 1) if 0 <= tick < depth])
    bar.ax.tick_params(length=0)
    bar.set_label("layer, from the input (0) to the output")
    figure.supxlabel(f"tokens seen ({unit})", fontsize=9)
    figure.supylabel(f"{'implied' if implied else 'attention'} entropy (nats)", fontsize=9)
    return figure


def _many(group: Group, reference: Group, large: bool) -> dict[str, Any]:
    """Changes to a line among many: few markers, thinner in small panels and for each of several seeds."""
    width = (1.4 if large else 1.0) * (0.75 if len(group.runs) > 1 else 1)
    if group is reference:
        return {"linewidth": 1.8 * width, "markevery": 0.3, "markersize": 5 if large else 3.5, "zorder": 2.5}
    return {"linewidth": width, "markevery": 0.3, "markersize": 5 if large else 3.5}


def _clip(axes: Axes, curves: Sequence[Curve], early: float) -> None:
    """Puts the first `early` of training, where losses fall steeply, outside the axis if it would squeeze the rest."""
    late = [curve.value[curve.tokens >= early * curve.tokens.max()] for curve in curves]
    values = np.concatenate([part[np.isfinite(part)] for part in late]) if late else np.empty(0)
    if len(values):
        axes.set_ylim(*padded(values))


def _thin(curve: Curve, points: int = 60) -> Curve:
    """The curve averaged over at most `points` equal stretches of rows; values that are not finite are left out."""
    kept = np.isfinite(curve.value)
    columns = (curve.step[kept], curve.tokens[kept], curve.value[kept])
    edges = np.unique(np.linspace(0, int(kept.sum()), points + 1).astype(int))
    return Curve(*(np.array([column[a:b].mean() for a, b in pairwise(edges)]) for column in columns))
