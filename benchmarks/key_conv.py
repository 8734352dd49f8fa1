"""Tabulates what a convolution of the keys does for recall: one row per exam, and the table of the results page.

    python benchmarks/key_conv.py RUNS docs/results/recall/key_conv.csv

RUNS holds the folders (`--out`) of recall exams of `Top1Chunk` at size `tiny`, one per seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from seqarch.tables import markdown, read_csv, write_csv

COLUMNS = ["selection", "chunk_size", "key_conv", "seed", "accuracy", "rate", "epochs"]
CELLS = [("exact", "8"), ("approx", "8"), ("approx", "4")]
WORDS = {"exact": "exact", "approx": "approximate"}


def points(runs: Path) -> list[list[str]]:
    """The points of all exams in a folder, as the rows of the CSV file."""
    found = []
    for path in runs.glob("*/recall/tiny/mqar.json"):
        for each in json.loads(path.read_text(encoding="utf-8"))["points"]:
            options = each["options"]
            where = options["selection"], options["chunk_size"], options.get("key_conv", 0), each["settings"]["seed"]
            found.append([*map(str, where), f"{each['accuracy']:.4f}", str(each["rate"]), str(each["epochs"])])
    return sorted(found)


def seeds(rows: list[dict[str, str]], selection: str, size: str, kernel: str) -> list[float]:
    """The accuracy of each seed of a cell."""
    wanted = {"selection": selection, "chunk_size": size, "key_conv": kernel}
    return [float(row["accuracy"]) for row in rows if row.items() >= wanted.items()]


def table(rows: list[dict[str, str]]) -> Iterator[list[str]]:
    """The mean accuracy over the seeds with its range, without and with a convolution over three keys."""
    yield ["selection", "chunk size", "without convolution", "`key_conv` 3"]
    for selection, size in CELLS:
        cells = []
        for kernel in ("0", "3"):
            own = seeds(rows, selection, size, kernel)
            cells.append(f"{sum(own) / len(own):.3f} ({min(own):.3f} to {max(own):.3f})")
        yield [WORDS[selection], size, *cells]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write_csv(Path(sys.argv[2]), COLUMNS, points(Path(sys.argv[1])))
    print(*markdown(list(table(read_csv(Path(sys.argv[2]))))), sep="\n")
