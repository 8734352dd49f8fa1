"""Tables of text for a terminal, Markdown and CSV, and numbers as people read them."""

import csv
import itertools
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqarch.errors import UserError, refused

Rows = Sequence[Sequence[str]]
"""Cells, the head first."""


def aligned(rows: Rows, right: Collection[int] = ()) -> list[str]:
    """The lines of a table in columns as wide as their cells; those with an index in `right` end on one line."""
    return ["  ".join(cells).rstrip() for cells in _padded(rows, right)]


def markdown(rows: Rows) -> list[str]:
    """The lines of a Markdown table with aligned columns, which reads as plain text too."""
    head, *body = _padded([[cell.replace("|", r"\|") for cell in row] for row in rows])
    return [f"| {' | '.join(cells)} |" for cells in (head, ["-" * len(cell) for cell in head], *body)]


def listed(words: Mapping[str, str]) -> str:
    """Names and what they mean: no line is longer than the terminal is wide, or a line each in a pipe or file."""
    width = shutil.get_terminal_size((sys.maxsize, 24)).columns
    column = min(max(map(len, words), default=0) + 2, max(width // 2, 1))
    lines = []
    for name, meaning in words.items():
        first = f"{name:{column - 1}} "
        lines += textwrap.wrap(first + meaning, width, subsequent_indent=" " * column, break_on_hyphens=False)
    return "\n".join(lines)


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a CSV file and return its path. A text that a spreadsheet would run as a formula begins with `'` there."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[_harmless(cell) for cell in row] for row in (head, *rows)])
    return path


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by the names in its head, without spaces after commas and the mark of Excel's UTF-8.

    Raises:
        UserError: it is not such a file, or two columns have one name.
    """
    wrong = f"{path} is not a CSV file"
    with refused(wrong, UnicodeDecodeError, csv.Error, why=True), path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True, skipinitialspace=True)
        head = list(reader.fieldnames or ())
        rows = list(reader)
    check_columns(path, head, head)
    if ragged := next((row for row, cells in enumerate(rows, 2) if None in (*cells, *cells.values())), None):
        raise UserError(f"{path}, row {ragged}, has more or fewer cells than the head")
    return rows


def check_columns(where: object, names: Sequence[str], read: Sequence[str]) -> None:
    """Refuse a table with several columns of a name that is read."""
    if twin := next((name for name in read if names.count(name) > 1), None):
        raise UserError(f"{where}: {names.count(twin)} columns are called '{twin}': leave one, or rename the others")


def _harmless(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(("=", "+", "-", "@", "\t", "\r")) or cell in "+-":
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def counted(count: int, noun: str) -> str:
    """ "1 document" or "1,200 documents"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def readable(count: float) -> str:
    """`12_340_000` as "12.3M"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def readable_time(seconds: float) -> str:
    """Seconds in words: "40 seconds", "12 minutes", "3.5 hours"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours"


def ranges_of(numbers: Sequence[int]) -> list[str]:
    """[3, 4, 5, 9] as ["3-5", "9"]."""
    groups = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _padded(rows: Rows, right: Collection[int] = ()) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return [[pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)] for row in rows]
