"""Decision accuracies, for docs/scale.md and docs/results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.results import LONG, PAPER, REFERENCE, RESULTS, SMALL
from seqarch.scale.decisions import Rungs, accuracies, rungs_of
from seqarch.scale.losses import read_losses
from seqarch.scale.summary import decision_rows
from seqarch.tables import read_csv, readable

PUBLIC = Path(__file__).parents[1] / "physicslm4_linear.csv"
TRANSFER = Path(__file__).parents[1] / "transfer.csv"
Table = list[list[str]]


def public_decisions(size: str) -> str:
    """How many pairs the public losses of a size order as those of 8B, with the interval of their share."""
    rows = decision_rows(accuracies(rungs_of(read_losses(PUBLIC))))
    return next(f"{right}, {interval}" for early, _, right, interval, *_ in rows if early == size)


def rates_of_110m() -> Table:
    """In-domain loss by learning rate of Transformer++ at 42M and at 110M parameters, with and without the rule."""
    rows: dict[tuple[str, str], dict[float, str]] = {}
    for row in read_csv(TRANSFER.with_name("transfer_h200.csv")):
        rows.setdefault((row["model"], row["base_width"]), {})[float(row["learning_rate"])] = row["in_domain"]
    rates = sorted({rate for losses in rows.values() for rate in losses})
    table = [["", *(f"{rate:g}" for rate in rates)]]
    for (model, base), losses in sorted(rows.items(), reverse=True):
        name = f"`{model}`, `base_width` {base}" if base else f"`{model}`"
        best = min(losses, key=lambda rate: float(losses[rate]))
        cells = [f"{float(losses[rate]):.3f}" if rate in losses else "-" for rate in rates]
        table.append(
            [name, *(f"**{cell}**" if rate == best else cell for rate, cell in zip(rates, cells, strict=True))]
        )
    return table


def later_decisions() -> str:
    """How many pairs of models the gaps at 340M tokens order as those at 1.02B, with zero for the reference."""
    rows = read_csv(RESULTS / "fourteen/pairs.csv")
    rungs: Rungs = {}
    for tokens in (SMALL, LONG):
        found = rungs[f"{readable(tokens)} tokens"] = {REFERENCE: [0.0]}
        for row in rows:
            if row["model"] in PAPER and abs(int(row["tokens"]) - tokens) < 1e-3 * tokens:
                found.setdefault(row["model"], []).append(float(row["gap"]))
    (_, _, right, interval, *_) = decision_rows(accuracies(rungs))[1]
    return f"{right}; {interval}"
