"""Scores `benchmarks/long_predictions.csv`, which was written before the runs, from the report of these runs.

docs/results/long has that report. `benchmarks/long_models.sh` makes the runs. A quantity is the last `in_domain` loss,
the raw mean of the `gap` at the last budget, or a metric of `seqarch eval`. `minus` names a model whose value is taken
off.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.results import RESULTS
from seqarch.tables import read_csv

WRITTEN = Path(__file__).parents[1] / "long_predictions.csv"


def long_predictions() -> list[list[str]]:
    """Each prediction with what was measured, and whether it holds."""
    values = _values(RESULTS / "long")
    table = [["quantity", "model", "predicted", "measured", "holds"]]
    for row in read_csv(WRITTEN):
        value = values.get((row["quantity"], row["model"]))
        if value is not None and row["minus"]:
            value -= values[row["quantity"], row["minus"]]
        quantity = row["quantity"] + (f" minus that of `{row['minus']}`" if row["minus"] else "")
        low, high = float(row["low"]), float(row["high"])
        found = ["not run", "-"] if value is None else [f"{value:+.3f}", "yes" if low <= value <= high else "no"]
        table.append([quantity, f"`{row['model']}`", f"{low:+.2f} to {high:+.2f}", *found])
    return table


def _values(report: Path) -> dict[tuple[str, str], float]:
    """The values by quantity and model; of gaps at several budgets the last one."""
    found = {("in_domain", row["run"]): float(row["in_domain_loss"]) for row in read_csv(report / "models.csv")}
    for row in read_csv(report / "finished.csv"):
        if row["domain"] == "mean, raw":
            found["gap", row["run"]] = float(row["gap"])
    return found | {(row["metric"], row["run"]): float(row["value"]) for row in read_csv(report / "capabilities.csv")}
