"""Writes `gaps.csv` from the `losses.csv` next to it, for runs without records in the repository.

    python benchmarks/seed_gaps.py docs/results/budgets transformer_pp-learning_rate=0.0033

The second argument is the reference at its second-best rate, whose gap is the floor. Parts of the tokens have no gaps
by domain there, only their mean, and documents are not part of the intervals.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from seqarch.report.gap import FinishedModels, Seeds, common_seeds
from seqarch.report.runs import Evaluations
from seqarch.report.tables import finished
from seqarch.tables import read_csv, write_csv

REFERENCE, PARTS, FIRST = "transformer_pp", ("recallable", "other"), 9
"""The reference, the parts of the tokens, and the number of columns before the domains."""


def models(rows: list[dict[str, str]], columns: tuple[str, ...]) -> dict[str, Seeds]:
    """The finished models by name and seed, with the losses in some columns."""
    by_run: dict[tuple[str, int], list[dict[str, str]]] = {}
    for row in rows:
        by_run.setdefault((row["model"], int(row["seed"])), []).append(row)
    found: dict[str, Any] = {}
    for (name, seed), own in by_run.items():
        losses = {column: np.array([float(row[column]) for row in own]) for column in columns}
        inside, tokens = ([float(row[key]) for row in own] for key in ("in_domain", "tokens"))
        found.setdefault(name, {})[seed] = Evaluations(np.array(tokens, dtype=int), np.array(inside), losses)
    return found


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, neighbour = Path(sys.argv[1]), sys.argv[2]
    rows = read_csv(folder / "losses.csv")
    by_name = models(rows, tuple(list(rows[0])[FIRST:]))
    reference = by_name.pop(REFERENCE)
    candidates = {name: each for name, each in by_name.items() if common_seeds(each, reference)}
    parts = {part: models(rows, (part,)) for part in PARTS}
    saved = {int(row["tokens"]): float(row["copying"]) for row in rows if row["model"] == REFERENCE and row["copying"]}
    split = {part: (each, each[REFERENCE]) for part, each in parts.items()}
    gaps = FinishedModels(candidates, reference, split, {}, saved, neighbour).gaps()
    header, table = finished(SimpleNamespace(finished=gaps, unfinished={}, reference=SimpleNamespace(name=REFERENCE)))  # type: ignore[arg-type]
    write_csv(folder / "gaps.csv", header, [[f"{x:.6f}" if isinstance(x, float) else x for x in row] for row in table])


if __name__ == "__main__":
    main()
