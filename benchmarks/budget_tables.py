"""The tables of docs/results/budgets from run folders with branches.

    python benchmarks/budget_tables.py runs/budgets docs/results/budgets --reference transformer_pp/rate_2.25e-03

OUT/ladder.csv      in-domain and OOD loss of every rate at the smallest budget
OUT/finished.csv    the losses of every finished model
OUT/gaps.csv        the gap of each model to the reference at each budget that both finished (`seqarch.report.finished`)
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.report.finished import finished_models, pair_floors, pair_gaps
from seqarch.report.runs import Evaluations, load_run
from seqarch.runs.files import atomic


def read(out: Path) -> dict[str, Evaluations]:
    """The finished models of each run, by `<model>/rate_<rate>`."""
    found = {}
    for folder in sorted(out.glob("*/rate_*")):
        models = finished_models(load_run(folder))
        if models is not None:
            found[f"{folder.parent.name}/{folder.name}"] = models
    return found


def columns(models: Evaluations, k: int) -> dict[str, Any]:
    """The losses of one finished model."""
    losses = {domain: f"{loss[k]:.4f}" for domain, loss in models.losses.items()}
    mean = np.mean([loss[k] for loss in models.losses.values()])
    return {"tokens": int(models.tokens[k]), "in_domain": f"{models.in_domain[k]:.4f}", "ood": f"{mean:.4f}"} | losses


def gap_rows(run: str, models: Evaluations, reference: Evaluations) -> list[dict[str, Any]]:
    """The gaps at the budgets that both finished."""
    rows = []
    floors = pair_floors(models, reference)
    for tokens, floor, gaps in zip(reference.tokens, floors, pair_gaps(models, reference), strict=True):
        if np.isfinite(gaps).all():
            named = {domain: f"{gap:+.4f}" for domain, gap in zip(models.losses, gaps, strict=True)}
            rows.append({"run": run, "tokens": tokens, "at_in_domain": f"{floor:.4f}", "mean": f"{gaps.mean():+.4f}"})
            rows[-1] |= named
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    with atomic(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--reference", required=True, metavar="MODEL/RATE")
    args = parser.parse_args()
    found = read(args.runs)
    everything = [{"run": run} | columns(models, k) for run, models in found.items() for k in range(len(models.tokens))]
    smallest = min(int(row["tokens"]) for row in everything)
    write(args.out / "ladder.csv", [row for row in everything if row["tokens"] == smallest])
    write(args.out / "finished.csv", everything)
    reference = found[args.reference]
    gaps = [row for run, each in found.items() if run != args.reference for row in gap_rows(run, each, reference)]
    write(args.out / "gaps.csv", gaps)


if __name__ == "__main__":
    main()
