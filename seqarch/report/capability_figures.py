"""Figures of what `seqarch eval` found: passkeys by length and depth, losses by position, recall against state size."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from seqarch.report import panels as draw
from seqarch.report.capabilities import Measured, paired_difference
from seqarch.report.findings import Findings
from seqarch.report.panels import Picture, report_figure
from seqarch.runs import tags

BANDS = 5
"""Bands of depth in the heat map."""
RECALLING = ("recall", "passkey", "retrieval")
"""Groups of tasks that need memory of the context."""
PANELS = 6
"""The most metrics in the figure of recall against state size."""


@report_figure(
    "Passkey retrieval by length and depth",
    "Each field shows the share of passkeys that a model repeats, by the length of the prompt and by the depth of the "
    "passkey in the prompt: 0 is the beginning. The number in brackets is the paired difference to the reference in "
    "percentage points. It is shown if its 95 % interval excludes zero. A grey field has no sample.",
)
def passkey(findings: Findings) -> Picture | None:
    """Heat map of passkeys found, length by depth, a panel per model; of metrics `.../contains` with a depth."""
    maps: dict[tuple[str, str], dict[int, Measured]] = {}
    for tag, measured in findings.capabilities.items():
        for name, one in measured.items():
            length = one.facts["settings"].get("length")
            if tag.endswith("/contains") and isinstance(length, int) and one.depth is not None:
                hidden = tag.partition("/")[0].removesuffix(f"_{length}").removeprefix("passkey")  # "", "_essays"
                maps.setdefault((name, hidden), {})[length] = one
    if not maps:
        return None
    lengths = sorted({length for each in maps.values() for length in each})
    figure, shown = draw.panels(len(maps), sharey=True)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#cccccc")
    for axes, ((name, hidden), columns) in zip(shown, maps.items(), strict=True):
        base = maps.get((findings.reference.name, hidden), {})
        table = np.full((BANDS, len(lengths)), np.nan)
        for column, length in enumerate(lengths):
            for row, band in enumerate(_bands(columns.get(length))):
                if band is not None:
                    table[row, column] = band.mean()
                    other = _bands(base.get(length))[row] if name != findings.reference.name else None
                    colour = "black" if table[row, column] > 0.6 else "white"
                    axes.text(column, row, _share(band, other), ha="center", va="center", fontsize=8, color=colour)
        axes.imshow(table, cmap=colours, vmin=0, vmax=1, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(BANDS), [f"{(each + 0.5) / BANDS:.1f}" for each in range(BANDS)])
    draw.name_panels(figure, shown, [", ".join(filter(None, (name, *hidden.split("_")))) for name, hidden in maps])
    figure.colorbar(shown[0].images[0], ax=shown, aspect=30, pad=0.02, label="share of passkeys found")
    figure.supxlabel("tokens in the prompt")
    figure.supylabel("depth of the passkey")
    return figure


def _bands(one: Measured | None) -> list[np.ndarray | None]:
    """The samples of each band of depth, `None` for a band without samples."""
    if one is None or one.depth is None:
        return [None] * BANDS
    band = np.clip(np.nan_to_num(one.depth) * BANDS, 0, BANDS - 1).astype(int)
    return [one.samples[band == each] if (band == each).any() else None for each in range(BANDS)]


def _share(band: np.ndarray, other: np.ndarray | None) -> str:
    """The share found; below it the difference to the reference where its 95 % interval excludes zero."""
    if other is None or len(other) != len(band):
        return f"{band.mean():.0%}"
    by, low, high = paired_difference(band, other)
    return f"{band.mean():.0%}" + ("" if low <= 0 <= high else f"\n({by:+.0%})")


@report_figure(
    "Loss by position in long documents",
    "The curves show the mean loss of the tokens between two positions, with its 95 % interval over the documents. A "
    "model that uses its whole context has a falling curve. The lower row shows the difference to the reference on "
    "the same documents.",
)
def loss_by_position(findings: Findings) -> Picture | None:
    """Loss over the position in the document, and its paired difference to the reference; a column per domain."""
    every = findings.capabilities.items()
    measured = {tag: models for tag, models in every if not any(one.of_loss for one in models.values())}
    places = {tag: place for tag in measured if (place := tags.position_range(tag))}
    if not places:
        return None
    domains = list(dict.fromkeys(domain for domain, _, _ in places.values()))[:4]
    compared = any(one.difference for tag in places for one in measured[tag].values())
    figure, shown = draw.panels(len(domains) * (1 + compared), columns=len(domains))
    for column, domain in enumerate(domains):
        ranges = [(start, stop, tag) for tag, (where, start, stop) in places.items() if where == domain]
        for group in findings.groups:
            each_place = ((a, b, measured[tag].get(group.name)) for a, b, tag in sorted(ranges))
            known = [(a, b, one) for a, b, one in each_place if one is not None]
            values = [(a, b, one.value.value, one.value.low, one.value.high) for a, b, one in known]
            _by_position(figure, shown[column], findings, group.name, values)
            if compared:
                paired = [(a, b, *one.difference) for a, b, one in known if one.difference is not None]
                _by_position(figure, shown[column + len(domains)], findings, group.name, paired)
    draw.name_panels(figure, shown[: len(domains)], domains)
    draw.log_axis(shown[0], sorted({stop for _, _, stop in places.values()}))
    if compared:
        for axes in shown[len(domains) :]:
            axes.axhline(0, zorder=1, **draw.IDENTITY)
            axes.yaxis.set_major_formatter(draw.signed)
        shown[len(domains)].set_ylabel(f"difference to\n{draw.wrap(findings.reference.name, 24)}")
    shown[0].set_ylabel("loss")
    figure.supxlabel("position in the document (tokens)")
    figure.supylabel("nats per token")
    draw.name_lines(figure, findings)
    return figure


def _by_position(figure: Picture, axes: Axes, findings: Findings, name: str, values: list[tuple]) -> None:
    """A model's values with their intervals: `(start, stop, value, low, high)` each."""
    if values:
        style = findings.styles[name].line()
        x = [np.sqrt(max(start, stop / 4) * stop) for start, stop, *_ in values]
        notes = [f"{name}\npositions {a:,} to {b:,}: {value:.4f}" for a, b, value, _, _ in values]
        figure.plot(axes, name, x, [value for _, _, value, _, _ in values], notes, **style)
        for at, (*_, low, high) in zip(x, values, strict=True):
            if low is not None:
                axes.vlines(at, low, high, color=style["color"], linewidth=0.9)


@report_figure(
    "Recall against the size of the state",
    "Each point shows how well a model finds things again in its context, with the 95 % interval. The horizontal axis "
    "is the number of values that the model carries from token to token at the training length. A key/value cache "
    "grows with the length; other states do not.",
)
def recall_by_state(findings: Findings) -> Picture | None:
    """Metrics that need memory against the elements of decoding state, a panel per metric, a point per model."""
    sizes: dict[str, Any] = {group.name: group.runs[0].facts.get("state_elements") for group in findings.groups}
    chosen = {
        tag: [(name, sizes[name], one.value) for name, one in measured.items() if sizes[name]]
        for tag, measured in findings.capabilities.items()
        if next(iter(measured.values())).facts.get("group") in RECALLING and tag.endswith(("/contains", "/gain"))
    }
    chosen = {tag: points for tag, points in chosen.items() if len(points) > 1}
    if not chosen:
        return None
    figure, shown = draw.panels(min(len(chosen), PANELS))
    for axes, (tag, points) in zip(shown, chosen.items(), strict=False):
        for name, size, value in points:
            style = findings.styles[name].line(linestyle="none", markersize=7)
            notes = [f"{name}\n{size:,} elements of state\n{tag} {value.value:.4f}"]
            figure.plot(axes, name, [size], [value.value], notes, **style)
            if value.low is not None and value.high is not None:
                axes.vlines(size, value.low, value.high, color=style["color"], linewidth=0.9)
        axes.margins(x=0.15)
    draw.name_panels(figure, shown, list(chosen)[:PANELS])
    draw.log_axis(shown[0])
    figure.supxlabel("state of all layers at the training length (elements)")
    figure.supylabel("value of the metric")
    draw.name_lines(figure, findings)
    return figure


CAPABILITIES = (recall_by_state, passkey, loss_by_position)
