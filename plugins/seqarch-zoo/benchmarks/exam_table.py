"""The README's table of the exam at `small`, as Markdown, from the tables of `benchmarks/budget_tables.py`.

    python benchmarks/budget_tables.py runs/exam/small tables --reference transformer_pp
    python plugins/seqarch-zoo/benchmarks/exam_table.py tables DLR TTTLinear ...

The first command's folder holds `NAME/seed_N` of each mixer, of the reference, and of models with several seeds: their
spread gives an interval to a mixer with one seed. The names choose the rows; without names all models have one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from seqarch.tables import read_csv

RAW, PARTS = "mean, raw", ("mean, recallable tokens", "mean, other tokens")
Gaps = dict[str, dict[int, dict[str, dict[str, str]]]]


def with_width(row: dict[str, str] | None) -> str:
    """A gap and half of its interval, "-" without a value."""
    if row is None or row["gap"] in ("", "nan"):
        return "-"
    gap = f"{float(row['gap']):+.3f}"
    return gap if row["high"] in ("", "nan", "inf") else f"{gap} ± {float(row['high']) - float(row['gap']):.3f}"


def table(folder: Path, names: list[str]) -> list[str]:
    """The lines of the table, by rising gap at the largest budget; models without a gap come last.

    A gap has pairs: seeds that the reference has too. The in-domain loss is the mean of these seeds.
    """
    gaps: Gaps = {}
    words, losses, paired = {}, {}, {}
    for row in read_csv(folder / "gaps.csv"):
        words[row["run"]], paired[row["run"]] = row["word"] or row["verdict"], row["seeds"].split()
        if row["tokens"]:
            gaps.setdefault(row["run"], {}).setdefault(int(row["tokens"]), {})[row["domain"]] = row
    for row in read_csv(folder / "losses.csv"):  # the largest budget of a run comes last
        losses.setdefault(row["model"], {})[row["seed"]] = row
    if unknown := [name for name in names if name not in words]:
        sys.exit(f"no run of {', '.join(unknown)} in {folder / 'gaps.csv'}, which has {', '.join(words)}")
    budgets = sorted({tokens for found in gaps.values() for tokens in found})
    header = ["mixer", "seed pairs", "in-domain loss", *(f"gap at {round(tokens / 1e6)}M" for tokens in budgets)]
    lines = [[*header, "standardised", "recallable tokens", "other tokens", "verdict"]]
    lines.append(["---"] * len(lines[0]))

    def place(name: str) -> float:
        found = gaps.get(name)
        return float(found[max(found)][RAW]["gap"]) if found else float("inf")

    for name in sorted(names or words, key=place):
        found = gaps.get(name, {})
        last = found[max(found)] if found else {}
        ends = [float(losses[name][seed]["in_domain"]) for seed in paired[name]]
        cells = [f"`{name}`", str(len(ends)), f"{sum(ends) / len(ends):.3f}" if ends else "-"]
        cells += [with_width(found.get(tokens, {}).get(RAW)) for tokens in budgets]
        cells += [with_width(last.get(kind)) for kind in ("mean", *PARTS)]
        lines.append([*cells, words[name]])
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    print("\n".join(table(arguments.tables, arguments.names)))
