"""The output of a benchmark: rows of one schema, printed as they come and kept in a CSV file."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from seqarch.errors import UserError, say
from seqarch.tables import write_csv
from seqarch.versions import commit, version

Row = dict[str, Any]


def versions() -> Row:
    """The columns that say what ran: GPU (or CPU), versions of torch, Triton and CUDA, commit of seqarch."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    cuda = torch.version.cuda
    return {"gpu": gpu, "torch": torch.__version__, "triton": version("triton"), "cuda": cuda, "commit": commit()}


class Table:
    """Rows of a run. The CSV file is written again with each row, so that an interrupted run keeps its rows.

    Args:
        columns: columns of a row next to `versions`, in their order; a row may lack some and have others as well.
        path: the CSV file; `None` for none.
        line: a row for the terminal; by default nothing is printed.

    Raises:
        OSError: the file is a folder, its folder does not exist, or it cannot be written.
    """

    def __init__(
        self, columns: Sequence[str], path: Path | None = None, line: Callable[[Row], str] | None = None
    ) -> None:
        if path is not None:
            path.open("a").close()  # an error now, not after the time that the first row takes
        self.columns = columns
        self.path = path
        self.line = line
        self.versions = versions()
        self.rows: list[Row] = []
        if line is not None:
            say(", ".join(f"{key} {value}" for key, value in self.versions.items()))

    def add(self, row: Row) -> Row:
        """Write and print the row, and return it."""
        self.rows.append(row)
        if self.path is not None:
            fields = list(dict.fromkeys([*self.versions, *self.columns, *(name for row in self.rows for name in row)]))
            rows = [{**self.versions, **each} for each in self.rows]
            write_csv(self.path, fields, ([each.get(field) for field in fields] for each in rows))
        if self.line is not None:
            say(self.line(row))
        return row


def shown(row: Row, *parts: str) -> str:
    """A row for the terminal: the parts, such as `"MFU {mfu:.0%}"`, whose values the row has."""
    kept = [part for part in parts if all(row.get(name) is not None for _, name, *_ in Formatter().parse(part) if name)]
    return "  ".join(part.format(**row) for part in kept)


def report_failures(errors: Sequence[str], count: int, what: str) -> None:
    """End a run in which some of `count` measurements failed: `UserError` with the first reason if all of them did."""
    if errors and len(errors) == count:
        raise UserError(errors[0])
    if errors:
        sys.exit(f"{len(errors)} of {count} {what}")
