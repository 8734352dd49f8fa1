"""The figures of a report, each with its caption, drawn without any global state of matplotlib.

With more than `FEW` models, the mean of the domains gets a large panel, and legends are in the order of the gaps.
Layers are coloured with viridis. To add a figure, write a function that draws it and an entry below it, and list the
entry in `FIGURES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
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

from seqarch.report.capability_figures import PASSKEY, POSITIONS
from seqarch.report.findings import Findings
from seqarch.report.gap import EARLY, distance_curve
from seqarch.report.panels import (
    IDENTITY,
    ReportFigure,
    fit_rows,
    frame,
    label,
    legend,
    marker_step,
    overview,
    padded,
    panels,
    row_panels,
    signed,
    title,
    token_unit,
    wrap,
)
from seqarch.report.roles import OOD, Role
from seqarch.report.runs import IN_DOMAIN, Group
from seqarch.runs import tags
from seqarch.runs.curves import Curve
from seqarch.tables import readable

FRAME = 0.25
"""The axes of the scatter begin at this fraction of training, where the points begin to lie close together."""
LATE_FRAME = 0.5
"""The same for many runs, whose curves need the room."""
DODGE = 1.02
"""Ratio between the places of two models in a figure over tokens."""


def scatter(found: Findings) -> Figure:
    """In-domain loss against the loss of each compared domain and their mean, a panel each, with the identity line."""
    figure, shown = _domain_panels(found)
    late = LATE_FRAME if found.many else FRAME
    identity: list[tuple[Line2D, str]] = []
    for axes, domain in zip(shown, found.domains, strict=True):
        late_x, late_y = [], []
        for group in found.groups:
            for points in group.evaluations:
                y = points.with_mean()[domain]
                kept = points.tokens >= late * points.tokens.max()
                late_x.append(points.in_domain[kept])
                late_y.append(y[kept])
                style = _line(found, group, len(y), large=axes is shown[-1], linewidth=0.9)
                axes.plot(points.in_domain, y, **style)
                axes.plot(points.in_domain[-1:], y[-1:], **found.styles[group.name].line(markersize=7.5, zorder=3))
        if frame(axes, np.concatenate(late_x), np.concatenate(late_y), spare=0.1 if found.many else 0.6):
            identity = [(Line2D([], [], **IDENTITY), "identity")]
        axes.set_title(title(domain, found.domains))
    _label_domains(figure, found.role, found.role.loss)
    entries = found.ranked[::-1] if found.many else found.groups
    legend(figure, entries, found.styles, extra=identity, beside=shown[-1] if found.many else None)
    return figure


SCATTER = ReportFigure(
    "scatter",
    scatter,
    "{axis} against {loss}",
    "Points are evaluations, the last one large. Both losses fall while a model trains, so a run moves to the right "
    "and down. Compare runs at the same horizontal position, where they have the same {equal}: the lower curve has the "
    "lower {loss}. Dotted: both losses are equal. The axes begin where the first quarter of training ends; with more "
    "than seven models, where the first half ends. scatter.csv has every point.",
)


def gaps(found: Findings) -> Figure | None:
    """Gap and 95 % interval of each model, sorted by the gap of the mean, a panel for the mean and for each domain."""
    every_gap = [gap for one in found.comparisons.values() for gap in one.gaps]
    if not every_gap:
        return None
    domains = [*found.domains[-1:], *found.domains[:-1]]
    figure, shown = row_panels(len(domains), [wrap(label(group), 34) for group in found.ranked])
    limits = padded(np.array([end for gap in every_gap for end in (0.0, gap.low, gap.high)]))
    for axes, domain in zip(shown, domains, strict=True):
        axes.axvline(0, color=found.styles[found.reference.name].colour, linewidth=1.2, zorder=1)
        for row, group in enumerate(found.ranked):
            _gap(axes, found, group, domain, row, large=axes is shown[0])
        axes.set_title(title(domain, domains))
        axes.set_xlim(*limits)
    shown[0].get_yticklabels()[found.ranked.index(found.reference)].set_fontweight("bold")
    fit_rows(figure, shown)
    role = found.role
    words = f"{role.loss} above {found.reference.name} at the same {role.equal} (nats per token): left is better"
    figure.supxlabel(words, fontsize=9)
    return figure


def _gap(axes: Axes, found: Findings, group: Group, domain: str, row: int, large: bool) -> None:
    """A model's dot and interval in its row."""
    style = found.styles[group.name].line(markersize=6.5 if large else 5, linestyle="-", linewidth=2)
    if group is found.reference:
        axes.plot([0], [row], **style)
        return
    gap = next((gap for gap in found.comparisons[group.name].gaps if gap.domain == domain), None)
    if gap is not None:
        axes.plot([gap.low, gap.high], [row, row], **{**style, "marker": None}, solid_capstyle="butt")
        axes.plot([gap.value], [row], **style)
    elif large:
        axes.text(0, row, " no gap: too little overlap", va="center", color="#777777", fontsize=8)


GAPS = ReportFigure(
    "gap",
    gaps,
    "The gaps",
    "A model's mean distance to the reference at the same {equal}, with its 95 % interval; the best model on top. "
    "Right of zero, a model's {loss} is higher than the reference's at the same {equal}.",
)


def distances(found: Findings) -> Figure | None:
    """A domain's loss less the reference's at the same in-domain loss: the curves of which the gap is the mean."""
    drawn = [
        (group, *distance_curve(points, found.reference.evaluations))
        for group in found.others
        for points in group.evaluations
    ]
    drawn = [(group, x, distance) for group, x, distance in drawn if len(x)]
    if not drawn:
        return None
    figure, shown = _domain_panels(found)
    for axes, domain in zip(shown, found.domains, strict=True):
        axes.axhline(0, color=found.styles[found.reference.name].colour, linewidth=1.4)
        for group, x, distance in drawn:
            style = _line(found, group, len(x), large=axes is shown[-1])
            if not found.many and len(group.runs) > 1:
                style |= {"linewidth": 0.9, "alpha": 0.75}
            axes.plot(x, distance[domain], **style)
        axes.set_title(title(domain, found.domains))
        axes.margins(x=0.03, y=0.08)
        axes.yaxis.set_major_formatter(signed)
    shown[0].invert_xaxis()  # all share it, but for a large panel
    if found.many and len(shown) > 1:
        shown[-1].invert_xaxis()
    _label_domains(figure, found.role, f"{found.role.loss} above reference")
    entries = [group for group in found.groups if group is found.reference or any(group is one for one, _, _ in drawn)]
    if found.many:
        entries = [group for group in found.ranked[::-1] if group in entries]
    else:
        entries.sort(key=lambda group: group is not found.reference)
    beside = shown[-1] if found.many else None
    legend(figure, entries, found.styles, note={found.reference.name: "reference"}, beside=beside)
    return figure


DISTANCES = ReportFigure(
    "distance",
    distances,
    "Distance to the reference at the same {equal}",
    "The vertical distance between the curves of the first figure. Above zero, a run's {loss} is higher than the "
    "reference's at that {equal}. The gap in the table is the mean of these distances.",
)


def budgets(found: Findings) -> Figure | None:
    """The gap between finished models over the tokens that they were trained with, with 95 % intervals."""
    if not found.finished:
        return None
    figure, (axes,) = panels(1)
    axes.axhline(0, color=found.styles[found.reference.name].colour, linewidth=1.4)
    for number, (name, gap) in enumerate(found.finished.items()):
        apart = DODGE ** (number - (len(found.finished) - 1) / 2)  # so that no interval hides another
        tokens, means = [each.tokens * apart for each in gap.budgets], [each.mean for each in gap.budgets]
        style = found.styles[name].line()
        hollow = {"markerfacecolor": "white", "markeredgecolor": style["color"], "markeredgewidth": 1.0}
        axes.plot(tokens, means, **style if gap.settled else style | hollow)
        widths = [each.half_width if np.isfinite(each.half_width) else 0 for each in gap.budgets]
        axes.errorbar(tokens, means, widths, fmt="none", ecolor=style["color"], elinewidth=0.9, capsize=2, zorder=1)
    marks = sorted({each.tokens for gap in found.finished.values() for each in gap.budgets})
    axes.set_xscale("log")
    axes.set_xticks(marks, [readable(each) for each in marks])
    axes.set_xticks([], minor=True)
    axes.margins(x=0.06, y=0.1)
    axes.yaxis.set_major_formatter(signed)
    figure.supxlabel("tokens that the finished models were trained with", fontsize=9)
    figure.supylabel(f"{found.role.loss} above {found.reference.name}\n(nats per token)", fontsize=9)
    entries = [group for group in found.ranked[::-1] if group.name in found.finished or group is found.reference]
    legend(figure, entries, found.styles, note={found.reference.name: "reference"})
    return figure


BUDGETS = ReportFigure(
    "budgets",
    budgets,
    "The gap as training grows",
    "The gap between finished models at the same {equal}, weighted over the domains, with its 95 % interval. A curve "
    "that is not yet flat is not settled (hollow markers): longer training would give another gap. finished.csv has "
    "the numbers.",
)


def losses(found: Findings) -> Figure:
    """Training and in-domain losses and those of the compared domains over the tokens seen.

    A loss that no run logged twice has no course and gets no panel, unless that goes for all of them.
    """
    runs = [run for group in found.groups for run in group.runs]
    names = _loss_names(found)
    smooth = {tag: [_thin(run.curves[tag]) if tag in run.curves else None for run in runs] for tag in names}
    longest = {tag: max((len(curve.value) for curve in curves if curve), default=0) for tag, curves in smooth.items()}
    names = {tag: name for tag, name in names.items() if longest[tag] >= min(2, max(longest.values()))}
    scale, unit = token_unit(max(run.tokens for run in runs))
    figure, shown = panels(len(names))
    owners = [group for group in found.groups for _ in group.runs]
    for axes, (tag, name) in zip(shown, names.items(), strict=True):
        seen = [(group, curve) for group, curve in zip(owners, smooth[tag], strict=True) if curve and len(curve.value)]
        for group, curve in seen:
            axes.plot(curve.tokens / scale, curve.value, **_line(found, group, len(curve.value), markers=15))
        _clip(axes, [curve for _, curve in seen], FRAME if found.many else EARLY)
        axes.set_title(name)
        axes.set_xlim(left=0)
    figure.supxlabel(f"tokens seen ({unit})", fontsize=9)
    figure.supylabel("loss (nats per token)", fontsize=9)
    legend(figure, found.ranked if found.many else found.groups, found.styles)
    return figure


def _loss_names(found: Findings) -> dict[str, str]:
    """The titles of the panels of `losses` by tag."""
    role, run = found.role, found.reference.runs[0]
    names = {tags.TRAIN_LOSS: "training", IN_DOMAIN: "in-domain hold-out" if role is OOD else role.inside}
    names |= {role.tag(domain): f"{role.short}: {domain}" for domain in run.domains}
    if role is OOD and run.domains == run.evaluated != run.domains[:1]:
        names[tags.loss(role.name)] = "OOD: mean of domains"
    return names


LOSSES = ReportFigure(
    "losses",
    losses,
    "Loss while training",
    "Training loss is averaged over stretches of steps. The steep first tenth of training (the first quarter with more "
    "than seven models) lies outside the axes where it would squeeze the rest.",
)


def entropies(found: Findings, *, implied: bool = False) -> Figure | None:
    """Entropy of each layer over the tokens seen, a panel for each run that logged it (its first seed).

    It is the entropy of attention or, with `implied`, of the implied weights of recurrent mixers.
    """
    first = [group.runs[0] for group in found.groups]
    layers = [(run, run.implied_entropy_layers if implied else run.entropy_layers) for run in first]
    layers = [(run, curves) for run, curves in layers if curves]
    if not layers:
        return None
    depth = 1 + max(layer for _, curves in layers for layer in curves)
    scale, unit = token_unit(max(run.tokens for run, _ in layers))
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.93, depth))
    figure, shown = panels(len(layers), sharey=True, columns=4 if len(layers) > 9 else None)
    for axes, (run, curves) in zip(shown, layers, strict=True):
        for layer, curve in curves.items():
            smooth = _thin(curve)
            axes.plot(smooth.tokens / scale, smooth.value, color=colours[layer], linewidth=1.3)
        axes.set_title(wrap(run.name, int(10 * axes.get_position().width * figure.get_figwidth())))
        axes.set_xlim(left=0)
    norm = BoundaryNorm(np.arange(depth + 1) - 0.5, depth)
    bar = figure.colorbar(ScalarMappable(norm, ListedColormap(colours)), ax=shown, aspect=30, pad=0.02)
    bar.set_ticks([int(tick) for tick in MaxNLocator(12, integer=True).tick_values(0, depth - 1) if 0 <= tick < depth])
    bar.ax.tick_params(length=0)
    bar.set_label("layer, from the input (0) to the output")
    figure.supxlabel(f"tokens seen ({unit})", fontsize=9)
    figure.supylabel(f"{'implied' if implied else 'attention'} entropy (nats)", fontsize=9)
    return figure


ENTROPY = ReportFigure(
    "entropy",
    entropies,
    "Attention entropy by layer",
    "Mean over heads and over the queries of a fixed probe batch, a line per layer, of the first seed. Low entropy: "
    "attention picks few keys. High entropy: it averages over many. A window or a selected chunk leaves fewer keys to "
    "average over, so compare levels only within one kind of mixer.",
)
IMPLIED_ENTROPY = ReportFigure(
    "implied_entropy",
    partial(entropies, implied=True),
    "Implied entropy by layer",
    "The entropy of the weights that the unrolled recurrence of a recurrent mixer gives to each earlier token's value, "
    "normalised by absolute value. It is another quantity than attention entropy: compare its course, and levels only "
    "among recurrent mixers.",
)


def recall(found: Findings) -> Figure | None:
    """The nats that reading text again saves, over the tokens seen; a panel per distance, none without such columns."""
    owners = [(group, run) for group in found.groups for run in group.runs]
    distances = tags.repeat_gains({tag for _, run in owners for tag in run.curves})
    if not distances:
        return None
    scale, unit = token_unit(max(run.tokens for _, run in owners))
    figure, shown = panels(len(distances))
    for axes, (distance, tag) in zip(shown, distances.items(), strict=True):
        for group, run in owners:
            if tag in run.curves:
                curve = run.curves[tag]
                axes.plot(curve.tokens / scale, curve.value, **_line(found, group, len(curve.value), markers=15))
        axes.axhline(0, zorder=1, **IDENTITY)
        axes.set_title(f"{distance:,} tokens apart")
        axes.set_xlim(left=0)
    figure.supxlabel(f"tokens seen ({unit})", fontsize=9)
    figure.supylabel("nats saved per token", fontsize=9)
    legend(figure, found.ranked if found.many else found.groups, found.styles)
    return figure


RECALL = ReportFigure(
    "recall",
    recall,
    "What a second reading saves",
    "The loss on held-out text that the model has not read, less the loss on the same text after it has read it some "
    "distance before (callback `RecallProbe`). At 0 the model remembers nothing. A model that looks up earlier tokens "
    "saves nats at every distance; a small state saves fewer at long distances.",
)
FIGURES = (SCATTER, BUDGETS, GAPS, DISTANCES, LOSSES, RECALL, PASSKEY, POSITIONS, ENTROPY, IMPLIED_ENTROPY)
"""The figures in the order of the page."""


def _domain_panels(found: Findings) -> tuple[Figure, list[Axes]]:
    """A panel per domain, the last of which is large for many models."""
    return overview(len(found.domains), len(found.groups)) if found.many else panels(len(found.domains))


def _label_domains(figure: Figure, role: Role, above: str) -> None:
    figure.supxlabel(f"{role.axis} (nats per token): training runs to the right →", fontsize=9)
    figure.supylabel(f"{above} (nats per token)", fontsize=9)


def _line(
    found: Findings, group: Group, points: int, *, large: bool = False, markers: int = 25, **changes: Any
) -> dict[str, Any]:
    """The style of a line of some points; among many, few markers, and thinner where small or one of several seeds."""
    style = found.styles[group.name].line(markevery=marker_step(points, markers), **changes)
    if not found.many:
        return style
    width = (1.4 if large else 1.0) * (0.75 if len(group.runs) > 1 else 1)
    style |= {"linewidth": width, "markersize": 5 if large else 3.5}
    if points > 1:  # of a single point matplotlib would leave out the marker
        style["markevery"] = 0.3
    if group is found.reference:
        style |= {"linewidth": 1.8 * width, "zorder": 2.5}
    return style


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
