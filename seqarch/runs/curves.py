"""`curves.csv`: one row per step, one column per tag, an empty cell if nothing was measured."""

import csv
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqarch.errors import UserError, refused
from seqarch.runs import tags
from seqarch.runs.files import is_label, read_text

if TYPE_CHECKING:
    import numpy as np
    import pandas


@dataclass(frozen=True)
class Curve:
    """One column of `curves.csv`: the values that were logged, in training order, all arrays `[K]`."""

    step: "np.ndarray"
    tokens: "np.ndarray"
    value: "np.ndarray"


class Curves(dict[str, Curve]):
    """The curves of a run by their tags."""

    def __repr__(self) -> str:
        return f"<{len(self)} curves: {', '.join(self)}>"

    def to_pandas(self) -> "pandas.DataFrame":
        """One row per step, one column per tag and `tokens`; nan where nothing was measured.

        Raises:
            UserError: pandas is not installed.
        """
        with refused("a data frame needs pandas: pip install pandas", ImportError):
            import pandas
        tokens = {step: n for curve in self.values() for step, n in zip(curve.step, curve.tokens, strict=True)}
        columns = {tag: pandas.Series(curve.value, curve.step) for tag, curve in self.items()}
        return pandas.DataFrame({"tokens": tokens, **columns}).sort_index().rename_axis("step")


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows as text, none if there is no file. Half of a last line, left by a kill, is dropped.

    Raises:
        UserError: the file is damaged: not text, a row unlike the header, or a step that is not a number.
    """
    if not path.exists():
        return [], []
    header, rows = _parsed(path)
    return header, [dict(zip(header, cells, strict=True)) for _, cells, _ in rows]


def last_step(path: Path) -> float:
    """The last step in the file, 0 where there is none yet; errors as for `read_rows`."""
    _, rows = read_rows(path)
    return float(rows[-1]["step"]) if rows else 0.0


def checksum(rows: Iterable[Mapping[str, str]], before: int = 0) -> int:
    """A CRC-32 of what is in the cells of rows that follow others; a column that comes later does not change it."""
    for row in rows:
        before = zlib.crc32(json.dumps(sorted(cell for cell in row.items() if cell[1])).encode(), before)
    return before


def read_curves(path: Path, noted: Any = None, end: int | None = None) -> tuple[Curves, int, int]:
    """The curves by tag, the last step and its tokens.

    If the run has ended, `noted` is the checksum of its rows, and `end` its last step if it logged the training loss.

    A last line without a line break is left out. A row without tokens is left out too, because it has no place on the
    axis. A user's callback may log such a row.

    Raises:
        UserError: the file is damaged; names the line.
    """
    curves, step, tokens = _curves(path, noted)
    if (tags.TRAIN_LOSS in curves or not curves) and step < (end or 0):  # TrainLoss ends every finished run with a row
        raise UserError(f"{path} ends at step {step} of {end}: it was cut, restore it")
    return curves, step, tokens


def _curves(path: Path, noted: Any) -> tuple[Curves, int, int]:
    header, rows = _parsed(path)
    if noted not in (None, checksum(dict(zip(header, cells, strict=True)) for _, cells, _ in rows)):
        raise UserError(f"{path} is not what the run had written when it ended: restore it")
    logged: dict[str, list[tuple[float, float, float]]] = {tag: [] for tag in header if tag not in ("step", "tokens")}
    step = tokens = -1.0
    for line, _, row in rows:
        if "tokens" not in row:
            continue
        if not row["step"] > step or row["tokens"] < tokens:
            raise UserError(f"{path}:{line}: expected a step above {step:.0f} and at least {tokens:.0f} tokens")
        step, tokens = row.pop("step"), row.pop("tokens")
        for tag, value in row.items():
            logged[tag].append((step, tokens, value))
    import numpy as np

    curves = Curves()
    for tag, points in logged.items():
        table = np.array(points, dtype=np.float64).reshape(-1, 3)
        curves[tag] = Curve(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2])
    return curves, max(int(step), 0), max(int(tokens), 0)


def _parsed(path: Path) -> tuple[list[str], list[tuple[int, list[str], dict[str, float]]]]:
    """The header, and of each row its line, its cells and the numbers in them by tag. Half a last line is left out."""
    complete, _, _ = read_text(path).rpartition("\n")
    reader = csv.reader(complete.splitlines(keepends=True), strict=True)
    with refused(f"{path}: malformed CSV", csv.Error, why=lambda error: f"line {reader.line_num}, {error}"):
        rows = [(reader.line_num, cells) for cells in reader if cells]
    if not rows:
        return [], []
    (_, header), *rows = rows
    if not {"step", "tokens"} <= {*header} or len({*header}) < len(header) or not all(map(is_label, header)):
        raise UserError(f"{path}:1: expected columns step, tokens and printable tags, each once, found {header!r:.200}")
    return header, [(line, cells, _numbers(f"{path}:{line}", header, cells)) for line, cells in rows]


def _numbers(where: str, header: list[str], cells: list[str]) -> dict[str, float]:
    if len(cells) != len(header):
        raise UserError(f"{where}: {len(cells)} cells where the header has {len(header)} columns")
    with refused(where, ValueError, why=True):
        row = {tag: float(cell) for tag, cell in zip(header, cells, strict=True) if cell.strip() or tag == "step"}
    if not all(axis.is_integer() and abs(axis) < 2**53 for axis in (row["step"], row.get("tokens", 0.0))):
        raise UserError(f"{where}: step and tokens must be whole numbers")
    return row
