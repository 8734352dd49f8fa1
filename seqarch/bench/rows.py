"""The output of a benchmark: rows of one schema, printed as they come and kept in a CSV file."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seqarch.errors import UserError
from seqarch.versions import commit, version

Row = dict[str, Any]

VERSIONS = ("gpu", "torch", "triton", "cuda", "commit")


def versions() -> Row:
    """The columns that say what ran: GPU (or CPU), versions of torch, Triton and CUDA, commit of seqarch."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "commit": commit(),
    }


class Table:
    """Rows of a run. The CSV file is written again with each row, so that a run that breaks off has kept its own.

    Args:
        columns: columns of a row after `VERSIONS`, in their order; a row may lack some and have others.
        path: the CSV file; `None` for none.

    Raises:
        UserError: the file is a folder, or its folder does not exist.
    """

    def __init__(self, columns: Sequence[str], path: Path | None = None) -> None:
        if path is not None and path.is_dir():
            raise UserError(f"--csv {path} is a folder: name a file")
        if path is not None and not path.parent.is_dir():
            raise UserError(f"--csv {path}: there is no folder {path.parent}")
        self.columns = columns
        self.path = path
        self.versions = versions()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is not None:
            write_csv(self.path, self.columns, [{**self.versions, **each} for each in self.rows])


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    """The rows under one header: `VERSIONS`, `columns`, then whatever else a row has."""
    rows = list(rows)
    fields = dict.fromkeys([*VERSIONS, *columns, *(name for row in rows for name in row)])
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(fields))
        writer.writeheader()
        writer.writerows(rows)


def require(checks: Iterable[bool]) -> None:
    """Raise `SystemExit` if a check failed, after all have run: no speed without correctness."""
    held = list(checks)
    if not all(held):
        sys.exit(f"{held.count(False)} of {len(held)} checks failed")
