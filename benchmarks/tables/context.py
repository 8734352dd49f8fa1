"""The table of docs/cluster.md on sequences that several GPUs share, from rows of `benchmarks/context_steps.py`."""

from __future__ import annotations

from benchmarks.tables.speed import read


def context_differs(of: str, precision: str) -> str:
    """The largest relative difference of the `loss` or gradient `norm` between all GPUs and one, in three steps."""
    return f"{max(float(row[f'{of}_differs']) for row in read('context') if row['precision'] == precision):.1e}"
