"""The speed-up of two GPUs over one, from the runs of `benchmarks/fsdp_runs.sh` or from the CSV of their steps.

    python benchmarks/fsdp_table.py runs/fsdp --csv fsdp.csv
    python benchmarks/fsdp_table.py benchmarks/fsdp_h200.csv

Rates are medians from the third step on. The last column is the largest difference between the losses of both runs at
one step, in nats per token.
"""

import argparse
import statistics
from pathlib import Path

from seqarch.tables import read_csv, write_csv

COLUMNS = {
    "step": "step",
    "loss": "loss/train",
    "tokens_per_s": "throughput/tokens_per_second",
    "peak_gib": "memory/peak_gib",
}
GPUS = {"one": "1", "two": "2"}
FIRST = 3
"""The first step whose rate counts; the steps before compile."""
HEAD = ["recipe", "one GPU, tokens/s", "two GPUs, tokens/s", "speed-up", "peak memory per GPU, one and two", "losses"]


def steps(runs: Path) -> list[dict[str, str]]:
    """The steps of all runs in a folder, whose names are `<recipe>_one` and `<recipe>_two`."""
    found = []
    for path in sorted(runs.glob("*_*/curves.csv")):
        recipe, _, gpus = path.parent.name.rpartition("_")
        for row in read_csv(path):
            found.append({"recipe": recipe, "gpus": GPUS[gpus], **{key: row[tag] for key, tag in COLUMNS.items()}})
    return found


def table(rows: list[dict[str, str]]) -> list[list[str]]:
    """The cells of the table, the largest speed-up first."""
    found: list[tuple[float, list[str]]] = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        one, two = ([row for row in rows if (row["recipe"], row["gpus"]) == (recipe, n)] for n in GPUS.values())
        rates = [
            statistics.median(float(row["tokens_per_s"]) for row in run if int(row["step"]) >= FIRST)
            for run in (one, two)
        ]
        memory = [max(float(row["peak_gib"]) for row in run) for run in (one, two)]
        apart = max(abs(float(a["loss"]) - float(b["loss"])) for a, b in zip(one, two, strict=True))
        cells = [f"`{recipe}`", *(f"{round(rate, -2):,.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}"]
        cells += [f"{memory[0]:.1f} and {memory[1]:.1f} GiB", f"{apart:.4f}"]
        found.append((rates[1] / rates[0], cells))
    return [cells for _, cells in sorted(found, reverse=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, help="a folder of runs, or the CSV of their steps")
    parser.add_argument("--csv", type=Path, help="where to write the steps")
    args = parser.parse_args()
    rows = steps(args.runs) if args.runs.is_dir() else read_csv(args.runs)
    if args.csv:
        write_csv(args.csv, list(rows[0]), [list(row.values()) for row in rows])
    for cells in (HEAD, ["---"] * len(HEAD), *table(rows)):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
