"""Collects the steps of the runs of `benchmarks/fsdp_runs.sh` in one CSV file, for the table of docs/performance.md.

python benchmarks/fsdp_steps.py runs/fsdp benchmarks/fsdp_h200.csv
"""

import sys
from pathlib import Path

from seqarch.tables import read_csv, write_csv

COLUMNS = {
    "step": "step",
    "loss": "loss/train",
    "tokens_per_s": "throughput/tokens_per_second",
    "peak_gib": "memory/peak_gib",
}
GPUS = {"one": "1", "two": "2"}


def steps(runs: Path) -> list[dict[str, str]]:
    """The steps of all runs in a folder, whose names are `<recipe>_one` and `<recipe>_two`."""
    found = []
    for path in sorted(runs.glob("*_*/curves.csv")):
        recipe, _, gpus = path.parent.name.rpartition("_")
        for row in read_csv(path):
            found.append({"recipe": recipe, "gpus": GPUS[gpus], **{key: row[tag] for key, tag in COLUMNS.items()}})
    return found


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    rows = steps(Path(sys.argv[1]))
    write_csv(Path(sys.argv[2]), list(rows[0]), [list(row.values()) for row in rows])
