"""Tabulates what a convolution of the keys does for recall: one row per exam.

    python benchmarks/key_conv.py RUNS docs/results/recall/key_conv.csv

RUNS holds the folders (`--out`) of recall exams of `Top1Chunk` at size `tiny`, one per seed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from seqarch.tables import write_csv

COLUMNS = ["selection", "chunk_size", "key_conv", "seed", "accuracy", "rate", "epochs"]


def points(runs: Path) -> list[list[str]]:
    """The points of all exams in a folder, as the rows of the CSV file."""
    found = []
    for path in runs.glob("*/recall/tiny/mqar.json"):
        for each in json.loads(path.read_text(encoding="utf-8"))["points"]:
            options = each["options"]
            where = options["selection"], options["chunk_size"], options.get("key_conv", 0), each["settings"]["seed"]
            found.append([*map(str, where), f"{each['accuracy']:.4f}", str(each["rate"]), str(each["epochs"])])
    return sorted(found)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write_csv(Path(sys.argv[2]), COLUMNS, points(Path(sys.argv[1])))
