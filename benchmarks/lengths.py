"""Draws gaps over the length of training sequences, from exams of several lengths (`seqarch exam --length`).

    python -m benchmarks.lengths runs/exam small figures

writes figures/lengths.csv and lengths.svg from the verdicts in runs/exam/small and runs/exam/small-LENGTH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import script
from seqarch.errors import UserError
from seqarch.experiment.recipes import find_recipe, merged_recipe
from seqarch.report.panels import Picture, own_style
from seqarch.report.styles import styles
from seqarch.tables import write_csv

HEADER = ("length", "model", "gap", "half_width", "in_domain", "reference_in_domain")


def rows(out: Path, size: str) -> list[tuple[int, str, float, float | None, float, float]]:
    """The headline gap of each candidate at each length, and both models' last losses in domain, nats per token."""
    own = merged_recipe(find_recipe(f"exam/{size}"))["data"]["sequence_length"]
    found = []
    for path in sorted(out.glob(f"{size}*/*/verdict.json")):
        folder, verdict = path.parts[-3], json.loads(path.read_text())
        length = own if folder == size else int(folder.removeprefix(f"{size}-"))
        if finished := verdict.get("finished"):
            gap = finished["budgets"][-1]["raw"]
            last = [verdict["final"][side]["in_domain"] for side in ("candidate", "reference")]
            found.append((length, verdict["candidate"], gap["value"], gap["half_width"], *last))
    if not found:
        raise UserError(f"no verdict between finished models in {out}/{size}*: run seqarch exam --length first")
    return sorted(found)


def draw(table: list[tuple[int, str, float, float | None, float, float]], path: Path) -> None:
    """Gaps over lengths, one line for each model; below zero a model is better than the reference."""
    names = dict.fromkeys(row[1] for row in table)
    looks = styles({name: name for name in names})
    with own_style():
        figure = Picture(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        for name in names:
            lengths, _, gaps, halves, *_ = zip(*(row for row in table if row[1] == name), strict=True)
            axes.errorbar(lengths, gaps, [half or 0 for half in halves], capsize=3, label=name, **looks[name].line())
        axes.axhline(0, color="#777777", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens per training sequence")
        axes.set_ylabel("gap, nats per token (95 % interval)")
        axes.legend()
        figure.savefig(path)


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    out, size, figures = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    table = rows(out, size)
    figures.mkdir(parents=True, exist_ok=True)
    write_csv(figures / "lengths.csv", HEADER, table)
    draw(table, figures / "lengths.svg")
    print(f"wrote {figures}/lengths.csv and lengths.svg")


if __name__ == "__main__":
    script.run(main)
