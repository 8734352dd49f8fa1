"""The table of docs/cluster.md on sequences that several GPUs share, from rows of `benchmarks/context_steps.py`."""

from __future__ import annotations

from benchmarks.tables.speed import Table, read


def context_differences(card: str) -> Table:
    """The largest relative difference of losses and gradient norms between all GPUs and one, in three steps."""
    table = [["mixer", "GPUs per sequence", "tokens", "precision", "losses differ by", "gradient norms differ by"]]
    for row in read("context", card):
        differ = (f"{float(row[name]):.1e}" for name in ("loss_differs", "norm_differs"))
        table.append([row["case"], row["context"], f"{int(row['length']):,}", row["precision"], *differ])
    return table
