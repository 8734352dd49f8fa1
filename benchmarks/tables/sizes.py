"""Do the gaps of `small` (42M parameters) predict those of `medium` (110M)? For docs/results.

    python -m benchmarks.tables.sizes --register    # before the runs: `benchmarks/order_110m.csv`
    python -m benchmarks.tables.sizes               # after them: docs/results/medium/sizes, as PNG, SVG and CSV

The order is predicted and scored by `seqarch.scale`. `benchmarks/predictions.csv` has an interval for each gap.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.tables.predictions import WRITTEN, score
from benchmarks.tables.results import REFERENCE, RESULTS, SMALL
from seqarch.report.panels import IDENTITY, Picture, own_style, write
from seqarch.report.styles import styles
from seqarch.scale.decisions import Rungs, accuracies, register, scored
from seqarch.scale.summary import decision_rows
from seqarch.tables import read_csv, readable, write_csv

ORDER = Path(__file__).parents[1] / "order_110m.csv"
BUDGETS = (65536000, 131072000, 262144000, 524288000)
"""Tokens of the finished models with 110M parameters."""
PREDICTED = BUDGETS[-1]
"""The budget of `sizes.csv` and of the predictions in the figure."""
AT_SMALL = {
    **{name: name for name in (REFERENCE, "transformer", "top1_chunk", "mamba2", "rwkv7", "delta_net", "based")},
    "window_256": "window_128",
}
"""The models of `medium`, each with its name at `small`. There a window of 128 has the same share of the sequence."""
BELOW = ("rwkv7", "delta_net")
"""Models whose names stand below their bars in the figure."""
LOSSES = {"gap": "gap", "in_domain": "in-domain loss"}
DECISION = ("right pairs", "95 % interval")
COLUMNS = ("model", "rung", "parameters", "tokens", "seed", "gap", "in_domain")
Table = list[list[str]]


def points(tokens_of_110m: int = PREDICTED) -> list[tuple[str, str, str, int, str, float, float]]:
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


def rungs(loss: str, tokens_of_110m: int = PREDICTED) -> Rungs:
    """The gaps or the in-domain losses of the models at both sizes, by seed."""
    found: Rungs = {}
    for model, size, *_, gap, in_domain in points(tokens_of_110m):
        found.setdefault(size, {}).setdefault(model, []).append(gap if loss == "gap" else in_domain)
    return found


def expected(tokens: int = PREDICTED) -> dict[str, tuple[float, float]]:
    """The interval that was predicted for the gap of each model at 110M parameters."""
    rows = [row for row in read_csv(WRITTEN) if (row["quantity"], row["tokens"]) == ("gap_110m", str(tokens))]
    return {row["model"]: (float(row["low"]), float(row["high"])) for row in rows}


def gaps_of_110m() -> Table:
    """The gaps at both sizes, the best at 42M first, and how many of the predicted intervals hold; `-`: not run."""
    small = rungs("gap")["42M"]
    later = {tokens: rungs("gap", tokens)["110M"] for tokens in BUDGETS}
    budgets = [readable(tokens) for tokens in BUDGETS]
    table = [["model", "42M, 340M tokens", *(f"110M, {each}" for each in budgets), "predictions that hold"]]
    for model in sorted(expected(), key=lambda each: np.mean(small[each])):
        if not any(model in gaps for gaps in later.values()):
            continue
        gaps = [f"{gaps[model][0]:+.3f}" if model in gaps else "-" for gaps in later.values()]
        scores = [score(row) for row in read_csv(WRITTEN) if (row["quantity"], row["model"]) == ("gap_110m", model)]
        run = len(scores) - scores.count("not run yet")
        held = f"{scores.count('yes')} of {run}" if run else "-"
        table.append([f"`{model}`", f"{np.mean(small[model]):+.3f}", *gaps, held])
    return table


def decisions_of_110m() -> Table:
    """How the order at 42M predicts the order at 110M after each budget, for gaps and in-domain losses."""
    table = [["tokens at 110M", *(f"{name}: {part}" for name in LOSSES.values() for part in DECISION)]]
    for tokens in BUDGETS:
        found = (decision_rows(accuracies(rungs(loss, tokens)))[1] for loss in LOSSES)
        table.append([readable(tokens), *(cell for row in found for cell in row[2:4])])
    return table


def order_of_110m(loss: str, tokens: int = PREDICTED) -> str:
    """How many of the registered pairs of models have the predicted order at 110M."""
    tested = [each.holds for each in scored(ORDER, loss, rungs(loss, tokens)) if each.later]
    return f"{sum(tested)} of {len(tested)}"


def copying_at_110m(tokens: str) -> str:
    """What the reference of 110M parameters saves by copying, nats per token."""
    rows = [row for row in read_csv(RESULTS / "medium/losses.csv") if row["model"] == REFERENCE]
    (saved,) = (row["copying"] for row in rows if readable(int(row["tokens"])) == tokens)
    return f"{float(saved):.3f}"


def figure() -> Picture:
    """The gaps at 110M over the gap at 42M. The points grow with the tokens; the bars were predicted for 524M."""
    small = {model: float(np.mean(gaps)) for model, gaps in rungs("gap")["42M"].items()}
    looks = styles({model: model for model in small})
    with own_style():
        picture = Picture(figsize=(5.4, 4.2), layout="constrained")
        axes = picture.subplots()
        ends = [min(small.values()), max(small.values())]
        axes.plot(ends, ends, **IDENTITY)
        for model, (low, high) in expected().items():
            at = small[model]
            axes.plot([at, at], [low, high], color=looks[model].colour, linewidth=5, alpha=0.3, solid_capstyle="butt")
            at_end, down = (low, -12) if model in BELOW else (high, 4)
            place = {"xytext": (0, down), "textcoords": "offset points", "ha": "center"}
            axes.annotate(model, (at, at_end), fontsize=8, **place)
        for size, tokens in enumerate(BUDGETS):
            for model, gaps in rungs("gap", tokens)["110M"].items():
                face = looks[model].colour if tokens == BUDGETS[-1] else "white"
                point = {"markersize": 3 + 1.5 * size, "markerfacecolor": face, "zorder": 4 - size}
                axes.plot(small[model], gaps[0], "o", color=looks[model].colour, **point)
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
