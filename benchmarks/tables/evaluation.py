"""The tables of results of `seqarch eval`."""

from __future__ import annotations

from pathlib import Path

from seqarch.tables import read_csv

RESULTS = Path(__file__).parents[2] / "docs/results"
Table = list[list[str]]


def capabilities(*names: str) -> Table:
    """Some metrics, or all, of `all_tasks.csv`: a Transformer++ of 110M parameters after 32.8M tokens."""
    table = [["metric", "value [95 % interval]", "chance", "samples"]]
    for row in read_csv(RESULTS / "all_tasks.csv"):
        if not names or row["metric"] in names:
            digits = 1 if row["metric"].endswith("/log_likelihood") else 3
            value, low, high = (f"{float(row[key]):.{digits}f}" for key in ("value", "low", "high"))
            chance = f"{float(row['chance']):.2f}" if row["chance"] else "-"
            table.append([f"`{row['metric']}`", f"{value} [{low}, {high}]", chance, row["samples"]])
    return table
