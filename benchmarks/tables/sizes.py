"""Do the gaps of `small` (42M parameters) predict those of `medium` (110M)? For docs/results.

    python -m benchmarks.tables.sizes --register    # before the runs: `benchmarks/order_110m.csv`
    python -m benchmarks.tables.sizes               # after them: docs/results/medium/sizes, as PNG and SVG

The order is predicted and scored by `seqarch.scale`. `benchmarks/predictions.csv` has an interval for each gap.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.tables.predictions import WRITTEN
from benchmarks.tables.results import REFERENCE, RESULTS, SMALL
from seqarch.report.panels import IDENTITY, Picture, own_style, write
from seqarch.report.styles import styles
from seqarch.scale.decisions import Rungs, accuracies
from seqarch.scale.registered import register, scored
from seqarch.scale.summary import decision_rows
from seqarch.tables import read_csv

ORDER = Path(__file__).parents[1] / "order_110m.csv"
MEDIUM = 131072000
"""Tokens of the runs with 110M parameters."""
AT_SMALL = {
    **{name: name for name in (REFERENCE, "transformer", "top1_chunk", "mamba2", "rwkv7", "delta_net", "based")},
    "window_256": "window_128",
}
"""The models of `medium`, each with its name at `small`. There a window of 128 has the same share of the sequence."""
LOSSES = {"gap": "gap", "in_domain": "in-domain loss"}
Table = list[list[str]]


def rungs(loss: str) -> Rungs:
    """The gaps or the in-domain losses of the models at both sizes, by seed; the gap of the reference is zero."""
    found: Rungs = {}
    for size, folder, tokens in (("42M", "fourteen", SMALL), ("110M", "medium", MEDIUM)):
        path = RESULTS / folder / ("pairs.csv" if loss == "gap" else "losses.csv")
        rows = read_csv(path) if path.is_file() else []
        models = {small if size == "42M" else model: model for model, small in AT_SMALL.items()}
        losses: dict[str, list[float]] = {REFERENCE: [0.0]} if loss == "gap" and rows else {}
        for row in rows:
            if row["model"] in models and int(row["tokens"]) == tokens:
                losses.setdefault(models[row["model"]], []).append(float(row[loss]))
        if losses:
            found[size] = losses
    return found


def expected() -> dict[str, tuple[float, float]]:
    """The interval that was predicted for the gap of each model at 110M parameters."""
    rows = [row for row in read_csv(WRITTEN) if row["quantity"] == "gap_110m"]
    return {row["model"]: (float(row["low"]), float(row["high"])) for row in rows}


def gaps_of_110m() -> Table:
    """The gaps at both sizes, the best at 42M first, and whether the predicted intervals hold."""
    small, medium = rungs("gap").values()
    table = [["model", "gap at 42M", "predicted at 110M", "gap at 110M", "holds"]]
    for model in sorted(medium.keys() - {REFERENCE}, key=lambda model: np.mean(small[model])):
        low, high = expected()[model]
        (gap,) = medium[model]
        holds = "yes" if low <= gap <= high else "no"
        table.append(
            [f"`{model}`", f"{np.mean(small[model]):+.3f}", f"{low:+.2f} to {high:+.2f}", f"{gap:+.3f}", holds]
        )
    return table


def decisions_of_110m() -> Table:
    """How the order at 42M predicts the order at 110M, of gaps and of in-domain losses, and the registered pairs."""
    table: Table = []
    for loss, name in LOSSES.items():
        head, row = decision_rows(accuracies(rungs(loss)))
        if not table:
            table.append(["order of", *head[2:], "registered pairs that hold"])
        tested = [each.holds for each in scored(ORDER, loss, rungs(loss)) if each.later]
        table.append([name, *row[2:], f"{sum(tested)} of {len(tested)}"])
    return table


def figure() -> Picture:
    """The gap at 110M over the gap at 42M, with the predicted interval; hollow if it does not hold."""
    small, medium = rungs("gap").values()
    looks = styles({model: model for model in medium})
    with own_style():
        picture = Picture(figsize=(5.4, 4.2), layout="constrained")
        axes = picture.subplots()
        ends = [min(np.mean(each) for each in small.values()), max(np.mean(each) for each in small.values())]
        axes.plot(ends, ends, **IDENTITY)
        for model, (gap,) in medium.items():
            at, color = np.mean(small[model]), looks[model].colour
            low, high = expected().get(model, (gap, gap))
            axes.plot([at, at], [low, high], color=color, linewidth=5, alpha=0.3, solid_capstyle="butt")
            axes.plot(small[model], [gap] * len(small[model]), "|", color=color, markersize=7)
            face = color if low <= gap <= high else "white"
            axes.plot(at, gap, "o", color=color, markerfacecolor=face, markersize=6, markeredgewidth=1.5)
            axes.annotate(model, (at, gap), xytext=(6, 4), textcoords="offset points", fontsize=8)
        axes.set_xlabel("gap at 42M parameters, 340M tokens (nats per token)")
        axes.set_ylabel("gap at 110M parameters, 131M tokens")
    return picture


def main() -> None:
    if sys.argv[1:] == ["--register"]:
        for loss in LOSSES:
            register(ORDER, loss, rungs(loss))
    else:
        write(figure(), RESULTS / "medium/sizes")


if __name__ == "__main__":
    main()
