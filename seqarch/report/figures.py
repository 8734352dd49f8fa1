"""The figures of a report, each with its caption, drawn without any global state of matplotlib.

With more than `FEW` models, the mean of the domains gets a large panel, and legends are in the order of the gaps.
Layers are coloured with viridis. To add a figure, write a function that draws it under its title and its caption, and
list it in `FIGURES`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.ticker import MaxNLocator

from seqarch.report import panels as draw
from seqarch.report.capability_figures import CAPABILITIES
from seqarch.report.draft import EARLY, distance_curve
from seqarch.report.findings import Findings, ModelGaps
from seqarch.report.panels import Picture, report_figure
from seqarch.report.roles import OOD
from seqarch.report.runs import IN_DOMAIN, Group, Run
from seqarch.runs import tags
from seqarch.runs.curves import Curve
from seqarch.tables import readable

FRAME = 0.25
"""The axes of the scatter begin at this fraction of training, where the points begin to lie close together."""
LATE_FRAME = 0.5
"""The same fraction for many runs, whose curves need more room."""
TRUNK = 0.35
"""How opaque the course of a run is that has finished models of several lengths."""
DODGE = 1.02
"""Ratio between the places of two models in a figure over tokens."""


@report_figure(
    "{axis} against {loss}",
    "Each point is an evaluation. A finished model, whose learning rate has fallen to zero, or else the last point is "
    "large; a run's course between several finished models is faint. Both losses fall while a model trains, so a run "
    "moves to the right and down. At the same horizontal position runs have the same {equal}: the lower curve has the "
    "lower {loss}. On the dashed line both losses are equal. The axes show the course after "
    "the first quarter of training (with more than seven models, after the first half) and each run's longest finished "
    "model. scatter.csv has every evaluation.",
)
def scatter(findings: Findings) -> Picture | None:
    """In-domain loss against the loss of each compared domain and their mean, a panel each, with the identity line.

    None where the only compared domain is the training domain.
    """
    if findings.reference.runs[0].narrow:
        return None
    figure, shown = _domain_panels(findings)
    late = LATE_FRAME if findings.many else FRAME
    ends = [run.finished_models() or run.evaluations.at(np.array([-1])) for _, run in findings.runs]
    for axes, domain in zip(shown, findings.domains, strict=True):
        kept, large = [], []
        for (group, run), models in zip(findings.runs, ends, strict=True):
            points = run.evaluations
            x, y = points.in_domain, points.with_mean()[domain]
            notes = _notes(findings, run, points.step, y, draw.title(domain, findings.domains))
            style = _line(findings, group, len(y), large=axes is shown[-1], linewidth=0.9)
            figure.plot(axes, group.name, x, y, notes, **style, alpha=TRUNK if len(models.tokens) > 1 else 1)
            large.append(np.stack([models.in_domain, models.with_mean()[domain]], axis=1))
            kept += [np.stack([x, y], axis=1)[points.tokens >= late * points.tokens.max()], large[-1][-1:]]
        draw.frame(axes, *np.concatenate(kept).T, spare=0.1 if findings.many else 0.6)
        for (group, _), models in zip(findings.runs, large, strict=True):
            inside = [point for point in models if axes.viewLim.contains(*point)]
            style = findings.styles[group.name].line(markersize=7.5, zorder=3, linestyle="none")
            axes.plot(*np.transpose(inside), **style, clip_on=False)  # whole at the edge too
    _label_domains(findings, figure, shown, findings.role.loss)
    return figure


@report_figure(
    "The gaps",
    "Each dot is a model's distance to the reference at the same {equal}: between finished models or, hollow, the "
    "draft of runs without them. The mean between finished models has its 95 % interval. The best model is on top. "
    "Right of zero, a model's {loss} is higher than the reference's at the same {equal}.",
)
def gap(findings: Findings) -> Picture | None:
    """Gap of each model, sorted by the gap of the mean, a panel for the mean (with interval) and for each domain."""
    every = [one for one in findings.comparisons.values() if one.by_domain]
    if not every:
        return None
    domains = [*findings.domains[-1:], *findings.domains[:-1]]
    figure, shown = draw.row_panels(len(domains), [draw.wrap(draw.label(group), 34) for group in findings.ranked])
    ends = [end for one in every for end in (*one.by_domain.values(), *_ends(one))]
    limits = draw.padded(np.array([0.0, *ends]))
    for axes, domain in zip(shown, domains, strict=True):
        axes.axvline(0, color=findings.styles[findings.reference.name].colour, linewidth=1.2, zorder=1)
        for row, group in enumerate(findings.ranked):
            _gap(figure, axes, findings, group, domain, row, large=axes is shown[0])
        axes.set_xlim(*limits)
    draw.name_panels(figure, shown, [draw.title(domain, domains) for domain in domains])
    at = findings.ranked.index(findings.reference)
    for name in (text for axes in shown for text in axes.get_yticklabels()[at : at + 1]):  # none inside of a line
        name.set_fontweight("bold")
    role = findings.role
    words = f"{role.loss} above {findings.reference.name} at the same {role.equal} (nats per token): left is better"
    figure.supxlabel(draw.wrap(words, 110))
    return figure


def _ends(one: ModelGaps) -> list[float]:
    """The ends of the interval of the mean, where there is one."""
    if one.finished is None or not np.isfinite(one.finished.headline.raw.half_width):
        return []
    return [one.finished.headline.raw.low, one.finished.headline.raw.high]


def _gap(figure: Picture, axes: Axes, findings: Findings, group: Group, domain: str, row: int, large: bool) -> None:
    """A model's dot and interval in its row."""
    look = findings.styles[group.name]
    shape: dict[str, Any] = {"markersize": 7.5 if large else 6, "linestyle": "-", "linewidth": 1.7}
    if group is findings.reference:
        axes.plot([0], [row], **look.line(**shape))
        return
    one = findings.comparisons[group.name]
    style = replace(look, hollow=one.finished is None).line(**shape)
    if (value := one.by_domain.get(domain)) is not None:
        interval = _ends(one) if domain == findings.domains[-1] else []
        axes.plot(interval, [row] * len(interval), **{**style, "marker": None}, solid_capstyle="butt")
        notes = f"{group.name}\ngap, {domain}: {value:+.4f}{', a draft' if one.finished is None else ''}"
        figure.plot(axes, group.name, [value], [row], [notes], **style)
    elif large:
        why: dict[str, Any] = {"va": "center", "color": "#666666", "fontsize": 8, "bbox": draw.BLANK}
        axes.text(0.02, row, "no gap: too little overlap", transform=axes.get_yaxis_transform(), **why)


@report_figure(
    "Distance to the reference at the same {equal}",
    "Each curve is the vertical distance between a run and the reference in the first figure. Above zero, a run's "
    "{loss} is higher than the reference's at that {equal}.",
)
def distance(findings: Findings) -> Picture | None:
    """A domain's loss minus the reference's at the same in-domain loss."""
    others = [(group, run) for group, run in findings.runs if group is not findings.reference]
    drawn = [(group, run, *distance_curve(run.evaluations, findings.reference.evaluations)) for group, run in others]
    drawn = [each for each in drawn if len(each[2])]
    if not drawn:
        return None
    figure, shown = _domain_panels(findings)
    for axes, domain in zip(shown, findings.domains, strict=True):
        for group, run, x, distance in drawn:
            style = _line(findings, group, len(x), large=axes is shown[-1])
            if not findings.many and len(group.runs) > 1:
                style |= {"linewidth": 0.9, "alpha": 0.75}
            steps = dict(zip(run.evaluations.in_domain, run.evaluations.step, strict=True))
            notes = _notes(findings, run, [steps.get(each) for each in x], distance[domain], "above the reference", "+")
            figure.plot(axes, group.name, x, distance[domain], notes, **style)
        _zero_line(findings, figure, axes)
        axes.margins(x=0.03, y=0.08)
    shown[0].invert_xaxis()  # all share it, but for a large panel
    if findings.many and len(shown) > 1:
        shown[-1].invert_xaxis()
    _label_domains(findings, figure, shown, f"{findings.role.loss} above reference", note="reference")
    return figure


def _zero_line(findings: Findings, figure: Picture, axes: Axes) -> None:
    """The reference in a panel of distances to it."""
    axes.axhline(0, color=findings.styles[findings.reference.name].colour, linewidth=1.4, zorder=1)
    x = np.concatenate([line.x for line in figure.plotted if line.axes is axes])
    figure.plotted.append(draw.Plotted(axes, findings.reference.name, np.array([x.min(), x.max()]), np.zeros(2), ()))
    axes.yaxis.set_major_formatter(draw.signed)


@report_figure(
    "The gap as training grows",
    "Each point is the gap between finished models at the same {equal}, the mean of the domains, with its 95 % "
    "interval. Hollow markers show a gap that is not settled: its curve is not yet flat, and longer training would "
    "give another gap. finished.csv has the numbers.",
)
def budgets(findings: Findings) -> Picture | None:
    """The gap between finished models over the tokens that they were trained with, with 95 % intervals."""
    if not findings.finished:
        return None
    figure, (axes,) = draw.panels(1)
    figure.set_figheight(3.9)
    for number, (name, gap) in enumerate(findings.finished.items()):
        apart = DODGE ** (number - (len(findings.finished) - 1) / 2)  # so that no interval hides another
        tokens, means = [each.tokens * apart for each in gap.budgets], [each.raw.value for each in gap.budgets]
        style = replace(findings.styles[name], hollow=not gap.settled).line()
        widths = [each.raw.half_width if np.isfinite(each.raw.half_width) else 0 for each in gap.budgets]
        inside = findings.role.inside
        notes = [
            f"{name}\n{readable(each.tokens)} tokens, {inside} {each.in_domain:.4f}\ngap {each.raw.value:+.4f}"
            for each in gap.budgets
        ]
        figure.plot(axes, name, tokens, means, notes, **style)
        axes.errorbar(tokens, means, widths, fmt="none", ecolor=style["color"], elinewidth=0.9, capsize=2, zorder=1)
    _zero_line(findings, figure, axes)
    draw.log_axis(axes, sorted({each.tokens for gap in findings.finished.values() for each in gap.budgets}))
    axes.margins(x=0.06, y=0.1)
    figure.supxlabel("tokens that the finished models were trained with")
    axes.set_ylabel(draw.wrap(f"{findings.role.loss} above {findings.reference.name}", 40) + "\n(nats per token)")
    draw.name_lines(figure, findings, order=findings.ranked[::-1], note="reference")
    return figure


@report_figure(
    "Loss while training",
    "The training loss is averaged over stretches of steps. The axes leave out the steep first tenth of training if it "
    "would squeeze the rest; with more than seven models, the first quarter.",
)
def losses(findings: Findings) -> Picture:
    """Training losses, in-domain losses and losses on the compared domains, over the tokens seen.

    A loss that no run logged twice has no panel, unless this holds for all losses.
    """
    names = _loss_names(findings)
    lengths = {tag: max(len(_curve(run, tag).value) for _, run in findings.runs) for tag in names}
    names = {tag: name for tag, name in names.items() if lengths[tag] >= min(2, max(lengths.values()))}
    figure, shown = _over_tokens(findings, names)
    for axes, tag in zip(shown, names, strict=True):
        _clip(axes, [_curve(run, tag) for _, run in findings.runs], FRAME if findings.many else EARLY)
    figure.supylabel("loss (nats per token)")
    draw.name_lines(figure, findings, order=findings.ranked if findings.many else ())
    return figure


def _loss_names(findings: Findings) -> dict[str, str]:
    """The titles of the panels of `losses` by tag."""
    role, run = findings.role, findings.reference.runs[0]
    names = {tags.TRAIN_LOSS: "training", IN_DOMAIN: "in-domain hold-out" if role is OOD else role.inside}
    if run.narrow:
        return names
    names |= {role.tag(domain): f"{role.short}: {domain}" for domain in run.domains}
    if role is OOD and run.domains == run.evaluated != run.domains[:1]:
        names[tags.loss(role.name)] = "OOD: mean of domains"
    return names


def _entropies(findings: Findings, *, implied: bool) -> Picture | None:
    """Entropy of each layer over the tokens seen, a panel for each run that logged it (its first seed).

    It is the entropy of attention or, with `implied`, of the implied weights of recurrent mixers.
    """
    first = [group.runs[0] for group in findings.groups]
    layers = [(run, curves) for run in first if (curves := run.entropy_layers(implied=implied))]
    if not layers:
        return None
    depth = 1 + max(layer for _, curves in layers for layer in curves)
    scale, unit = draw.token_unit(max(run.tokens for run, _ in layers))
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.93, depth))
    figure, shown = draw.panels(len(layers), sharey=True, columns=4 if len(layers) > 9 else None)
    for axes, (run, curves) in zip(shown, layers, strict=True):
        for layer, logged in curves.items():
            curve = _thin(logged)
            notes = _notes(findings, run, curve.step, curve.value, f"layer {layer}:")
            style = {"color": colours[layer], "linewidth": 1.3, "marker": "." if len(curve.value) == 1 else None}
            figure.plot(axes, "", curve.tokens / scale, curve.value, notes, **style)
    draw.name_panels(figure, shown, [run.name for run, _ in layers])
    shown[0].set_xlim(left=0)  # all share it, so that it comes after the longest run
    norm = BoundaryNorm(np.arange(depth + 1) - 0.5, depth)
    bar = figure.colorbar(ScalarMappable(norm, ListedColormap(colours)), ax=shown, aspect=30, pad=0.02)
    bar.set_ticks([int(tick) for tick in MaxNLocator(12, integer=True).tick_values(0, depth - 1) if 0 <= tick < depth])
    bar.ax.tick_params(length=0)
    bar.set_label("layer, from the input (0) to the output")
    figure.supxlabel(f"tokens seen{unit}")
    figure.supylabel(f"{'implied' if implied else 'attention'} entropy (nats)")
    return figure


@report_figure(
    "Attention entropy by layer",
    "Each line is a layer of the first seed: the mean over heads and over the queries of a fixed probe batch. At low "
    "entropy attention picks few keys. At high entropy it averages over many. A window or a selected chunk leaves "
    "fewer keys to average over, so compare levels only within one kind of mixer.",
)
def entropy(findings: Findings) -> Picture | None:
    """Entropy of attention."""
    return _entropies(findings, implied=False)


@report_figure(
    "Implied entropy by layer",
    "The unrolled recurrence of a recurrent mixer gives a weight to each earlier token's value. The lines show the "
    "entropy of these weights, normalised by absolute value. This quantity is not attention entropy: compare its "
    "course, and compare levels only among recurrent mixers.",
)
def implied_entropy(findings: Findings) -> Picture | None:
    """Entropy of the implied weights of recurrent mixers."""
    return _entropies(findings, implied=True)


@report_figure(
    "Loss saved by a second reading",
    "The model reads a held-out text twice, some distance apart (callback `RecallProbe`). The lines show the loss of "
    "this text after another one less its loss after itself. At 0 the model remembers nothing. A model that looks up "
    "earlier tokens saves nats at every distance; a small state saves fewer at long distances.",
)
def recall(findings: Findings) -> Picture | None:
    """The nats that reading text again saves, over the tokens seen; a panel per distance, none without such columns."""
    distances = tags.repeat_gains({tag for _, run in findings.runs for tag in run.curves})
    if not distances:
        return None
    figure, shown = _over_tokens(findings, {tag: f"{distance:,} tokens apart" for distance, tag in distances.items()})
    for axes in shown:
        axes.axhline(0, zorder=1, **draw.IDENTITY)
    figure.supylabel("nats saved per token")
    draw.name_lines(figure, findings, order=findings.ranked if findings.many else ())
    return figure


OF_LOSSES = (scatter, budgets, gap, distance, losses, recall)
"""The figures of losses by domain."""
FIGURES = (*OF_LOSSES, *CAPABILITIES, entropy, implied_entropy)
"""The figures in the order of the page."""


def _domain_panels(findings: Findings) -> tuple[Picture, list[Axes]]:
    """A panel per domain. With many models the last panel is large."""
    count = len(findings.domains)
    return draw.overview(count, findings.groups) if findings.many else draw.panels(count)


def _label_domains(findings: Findings, figure: Picture, shown: Sequence[Axes], above: str, note: str = "") -> None:
    """Titles, axes and names of a figure with a panel per domain."""
    draw.name_panels(figure, shown, [draw.title(domain, findings.domains) for domain in findings.domains])
    figure.supxlabel(f"{findings.role.axis} (nats per token): training runs to the right →")
    figure.supylabel(f"{above}\n(nats per token)")
    if findings.many:
        draw.name_lines(figure, findings, order=findings.ranked[::-1], note=note, right_of=shown[-1])
    else:
        draw.name_lines(figure, findings, note=note)


def _over_tokens(findings: Findings, names: Mapping[str, str]) -> tuple[Picture, list[Axes]]:
    """A panel over the tokens seen for each column of `curves.csv` with its title."""
    scale, unit = draw.token_unit(max(run.tokens for _, run in findings.runs))
    figure, shown = draw.panels(len(names))
    for axes, (tag, name) in zip(shown, names.items(), strict=True):
        for group, run in findings.runs:
            curve = _curve(run, tag)
            if len(curve.value):
                style = _line(findings, group, len(curve.value), markers=15)
                notes = _notes(findings, run, curve.step, curve.value, name)
                figure.plot(axes, group.name, curve.tokens / scale, curve.value, notes, **style)
    draw.name_panels(figure, shown, names.values())
    shown[0].set_xlim(left=0)
    figure.supxlabel(f"tokens seen{unit}")
    return figure, shown


def _notes(
    findings: Findings, run: Run, steps: Sequence[Any] | np.ndarray, values: np.ndarray, what: str, sign: str = ""
) -> list[str]:
    """The text of each point of a run: run, seed, step, the losses of that evaluation, and the value that is shown."""
    role, losses = findings.role, ()
    if not findings.no_losses:
        points = run.evaluations
        losses = zip(points.step, points.in_domain, points.with_mean()[findings.domains[-1]], strict=True)
    told = {step: f"\n{role.inside} {inside:.4f}, {role.short} {loss:.4f}" for step, inside, loss in losses}
    who = f"{run.name}, seed {run.seed}"
    return [
        who + (f", step {step:.0f}{told.get(step, '')}" if step is not None else "") + f"\n{what} {value:{sign}.4f}"
        for step, value in zip(steps, values, strict=True)
    ]


def _line(
    findings: Findings, group: Group, points: int, *, large: bool = False, markers: int = 25, **changes: Any
) -> dict[str, Any]:
    """The style of a line: few markers with many models; thinner in small panels and with several seeds."""
    style = findings.styles[group.name].line(markevery=max(1, round(points / markers)), **changes)
    if not findings.many:
        return style
    width = (1.4 if large else 1.0) * (0.75 if len(group.runs) > 1 else 1)
    style |= {"linewidth": width, "markersize": 5 if large else 3.5}
    if points > 1:  # of a single point matplotlib would leave out the marker
        style["markevery"] = 0.3
    if group is findings.reference:
        style |= {"linewidth": 1.8 * width, "zorder": 2.5}
    return style


def _clip(axes: Axes, curves: Sequence[Curve], early: float) -> None:
    """Puts the first `early` of training, where losses fall steeply, outside the axis if it would squeeze the rest."""
    late = [each.value[each.tokens >= early * each.tokens.max()] for each in curves if len(each.value)]
    axes.set_ylim(*draw.padded(np.concatenate(late)))


def _curve(run: Run, tag: str) -> Curve:
    return _thin(run.curves[tag]) if tag in run.curves else Curve(*[np.empty(0)] * 3)


def _thin(curve: Curve, points: int = 60) -> Curve:
    """The curve averaged over at most `points` equal stretches of rows; values that are not finite are left out."""
    kept = np.isfinite(curve.value)
    edges = np.unique(np.linspace(0, int(kept.sum()), points + 1).astype(int))
    columns = (column[kept] for column in (curve.step, curve.tokens, curve.value))
    return Curve(*(np.array([column[a:b].mean() for a, b in pairwise(edges)]) for column in columns))
