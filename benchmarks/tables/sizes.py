"""Do the gaps of `small` (42M parameters) predict those of `medium` (110M)? For docs/results.

    python -m benchmarks.tables.sizes --register    # before the runs: `benchmarks/order_110m.csv`
    python -m benchmarks.tables.sizes               # after them: docs/results/medium/sizes, as PNG, SVG and CSV

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
from seqarch.tables import read_csv, readable, write_csv

ORDER = Path(__file__).parents[1] / "order_110m.csv"
SHARED, PREDICTED = 65536000, 131072000
"""Tokens of the finished models with 110M parameters: those that five have, and those that the predictions are for."""
AT_SMALL = {
    **{name: name for name in (REFERENCE, "transformer", "top1_chunk", "mamba2", "rwkv7", "delta_net", "based")},
    "window_256": "window_128",
}
"""The models of `medium`, each with its name at `small`. There a window of 128 has the same share of the sequence."""
BELOW = ("transformer", "rwkv7", "delta_net")
"""Models whose names stand below their bars in the figure."""
LOSSES = {"gap": "gap", "in_domain": "in-domain loss"}
COLUMNS = ("model", "rung", "parameters", "tokens", "seed", "gap", "in_domain")
Table = list[list[str]]


def points(tokens_of_110m: int = SHARED) -> list[tuple[str, str, str, int, str, float, float]]:
    """The finished models of both sizes that have a gap, with `COLUMNS`. The gap of the reference is zero."""
    found = []
    for size, folder, tokens in (("42M", "fourteen", SMALL), ("110M", "medium", tokens_of_110m)):
        names = {small if size == "42M" else model: model for model, small in AT_SMALL.items()}
        parameters = {row["model"]: row["parameters"] for row in read_csv(RESULTS / folder / "states.csv")}
        pairs = read_csv(RESULTS / folder / "pairs.csv")
        gaps = {(row["model"], row["seed"]): float(row["gap"]) for row in pairs if int(row["tokens"]) == tokens}
        for row in read_csv(RESULTS / folder / "losses.csv"):
            model, seed = row["model"], row["seed"]
            gap = 0.0 if model == REFERENCE else gaps.get((model, seed))
            if model in names and int(row["tokens"]) == tokens and gap is not None:
                found.append((names[model], size, parameters[model], tokens, seed, gap, float(row["in_domain"])))
    return found


def rungs(loss: str, tokens_of_110m: int = SHARED) -> Rungs:
    """The gaps or the in-domain losses of the models at both sizes, by seed."""
    found: Rungs = {}
    for model, size, *_, gap, in_domain in points(tokens_of_110m):
        found.setdefault(size, {}).setdefault(model, []).append(gap if loss == "gap" else in_domain)
    return found


def expected() -> dict[str, tuple[float, float]]:
    """The interval that was predicted for the gap of each model at 110M parameters."""
    rows = [row for row in read_csv(WRITTEN) if row["quantity"] == "gap_110m"]
    return {row["model"]: (float(row["low"]), float(row["high"])) for row in rows}


def gaps_of_110m() -> Table:
    """The gaps at both sizes, the best at 42M first, and whether the predicted intervals hold."""
    small, shared = rungs("gap").values()
    later = rungs("gap", PREDICTED)["110M"]
    table = [["model", "42M, 340M tokens", "110M, 65.5M tokens", "predicted", "110M, 131M tokens", "holds"]]
    for model, (low, high) in sorted(expected().items(), key=lambda each: np.mean(small[each[0]])):
        gaps = [f"{each[model][0]:+.3f}" if model in each else "not run" for each in (shared, later)]
        holds = ("yes" if low <= later[model][0] <= high else "no") if model in later else "-"
        interval = f"{low:+.2f} to {high:+.2f}"
        table.append([f"`{model}`", f"{np.mean(small[model]):+.3f}", gaps[0], interval, gaps[1], holds])
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


def gap_at_110m(model: str, tokens: str) -> str:
    """The gap of a model with 110M parameters."""
    return _of_110m("pairs", model, tokens, "gap", "+")


def copying_at_110m(tokens: str) -> str:
    """What the reference of 110M parameters saves by copying, nats per token."""
    return _of_110m("losses", REFERENCE, tokens, "copying", "")


def _of_110m(table: str, model: str, tokens: str, column: str, sign: str) -> str:
    rows = read_csv(RESULTS / f"medium/{table}.csv")
    (found,) = (row[column] for row in rows if (row["model"], readable(int(row["tokens"]))) == (model, tokens))
    return f"{float(found):{sign}.3f}"


def figure() -> Picture:
    """The gaps at 110M over the gap at 42M: hollow after 65.5M tokens, filled after 131M, for which the bars are."""
    small, shared = rungs("gap").values()
    later = rungs("gap", PREDICTED)["110M"]
    looks = styles({model: model for model in small})
    with own_style():
        picture = Picture(figsize=(5.4, 4.2), layout="constrained")
        axes = picture.subplots()
        means = {model: float(np.mean(gaps)) for model, gaps in small.items()}
        ends = [min(means.values()), max(means.values())]
        axes.plot(ends, ends, **IDENTITY)
        for model, at in means.items():
            color = looks[model].colour
            low, high = expected().get(model, (0.0, 0.0))
            axes.plot([at, at], [low, high], color=color, linewidth=5, alpha=0.3, solid_capstyle="butt")
            for gaps, face in ((shared, "white"), (later, color)):
                if model in gaps:
                    axes.plot(at, gaps[model][0], "o", color=color, markerfacecolor=face, markeredgewidth=1.5)
            if model != REFERENCE:  # which is the point at zero
                at_end, down = (low, -12) if model in BELOW else (high, 4)
                place = {"xytext": (0, down), "textcoords": "offset points", "ha": "center"}
                axes.annotate(model, (at, at_end), fontsize=8, **place)
        axes.set_xlabel("gap at 42M parameters, 340M tokens (nats per token)")
        axes.set_ylabel("gap at 110M parameters")
        axes.margins(x=0.12, y=0.1)
    return picture


def main() -> None:
    if sys.argv[1:] == ["--register"]:
        for loss in LOSSES:
            register(ORDER, loss, rungs(loss))
    else:
        write(figure(), RESULTS / "medium/sizes")
        write_csv(RESULTS / "medium/sizes.csv", COLUMNS, points())


if __name__ == "__main__":
    main()
