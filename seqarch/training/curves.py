"""Writes `curves.csv`: one row per step, one column per tag, an empty cell if nothing was measured."""

import contextlib
import csv
import io
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from seqarch.errors import SeqarchWarning, UserError
from seqarch.runs.curves import checksum, read_rows
from seqarch.runs.files import sync, write_text
from seqarch.runs.folder import is_finished, read_record, write_record


class CurvesLogger(Logger):
    """A Lightning logger that keeps every scalar of a run in one CSV file.

    Numbers are written with all their digits, so that two equal runs have equal files. The rows stay in memory too: a
    file that something else removes or changes while the run writes it is written again.

    Args:
        path: the file; rows already in it are kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.row: dict[str, Any] = {}
        columns, rows = read_rows(self.path)
        self._keep(columns or ["step", "tokens"], rows)
        self._written = self._on_disk()

    @property
    def name(self) -> str:
        return "curves"

    @property
    def version(self) -> str:
        return ""

    @property
    def note(self) -> dict[str, int]:
        """What a checkpoint and a finished run note of the file: the number of `rows`, and their checksum."""
        return {"rows": len(self._lines) - 1, "curves": self._checksum}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing: the resolved config lies next to the curves."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.row.get("step") != step:
            self.save()
            self.row = {"step": step}
        self.row.update({tag: value for tag, value in metrics.items() if tag != "epoch"})

    @rank_zero_only
    def save(self) -> None:
        """Write the row being collected."""
        if not self.row:
            return
        self._restore()
        if (new := [tag for tag in self.row if tag not in self.columns]) or len(self._lines) == 1:
            self._keep([*self.columns, *new], list(csv.DictReader(self._lines)))
            self._rewrite()
        line = self._add(self.row)
        with self.path.open("a", newline="") as file:
            file.write(line)
        self.row, self._written = {}, self._on_disk()

    @rank_zero_only
    def sync(self) -> None:
        """Write the row being collected, and wait until the file is on disk."""
        self.save()
        self._restore()
        if self.path.exists():
            sync(self.path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        # of a run that failed, report the first error
        with contextlib.suppress(OSError) if status == "failed" else contextlib.nullcontext():
            self.save()
            self._restore()
        if status == "success" and is_finished(run := self.path.parent):
            write_record(run, read_record(run) | self.note)

    @rank_zero_only
    def truncate(self, step: int, noted: Mapping[str, Any] | None = None, path: Path | None = None) -> None:
        """Keep the rows up to `step`: a run that resumes from that step's checkpoint writes later ones again.

        A warning says which rows the file has lost.

        Args:
            step: the last one whose row is kept.
            noted: the `note` in the checkpoint.
            path: the file of another run that this one goes on from.

        Raises:
            UserError: the rows are not those that the checkpoint noted; the file stays as it is.
        """
        path, noted = path or self.path, noted or {}
        columns, rows = read_rows(path)
        # a callback may have logged more at this step after the checkpoint
        kept = [row for row in rows if int(row["step"]) <= step][: noted.get("rows")]
        self._keep(columns or self.columns, kept)
        if (lost := (noted.get("rows") or 0) - len(kept)) > 0:
            of = f"{lost} of the {noted['rows']} rows that it had at step {step}"
            self._warn(f"lacks {of}; the run goes on, and its curves have a gap")
        elif noted.get("curves", self._checksum) != self._checksum:
            raise UserError(f"{path} is not what the run had written at step {step}: restore it, or remove it")
        self._rewrite()

    def _keep(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        """Let the file in memory have these columns and rows."""
        self.columns, self._lines, self._checksum = columns, [_line(columns)], 0
        for row in rows:
            self._add(row)

    def _add(self, row: Mapping[str, Any]) -> str:
        """Add a row to the file in memory; return its line."""
        self._lines.append(_line(row.get(tag, "") for tag in self.columns))
        # columns that come later change lines, and not what is in their cells
        cells = next(csv.reader(self._lines[-1:]))
        self._checksum = checksum([dict(zip(self.columns, cells, strict=True))], self._checksum)
        return self._lines[-1]

    def _on_disk(self) -> tuple[int, int, int] | None:
        """What changes with the file; `None` if there is none."""
        with contextlib.suppress(FileNotFoundError):
            stat = self.path.stat()
            return stat.st_ino, stat.st_size, stat.st_mtime_ns
        return None

    def _restore(self) -> None:
        """Write the file again if something else has removed or changed it."""
        if self._written == (now := self._on_disk()):
            return
        if now is None or self.path.read_bytes() != "".join(self._lines).encode():
            what = "removed" if now is None else "changed"
            self._warn(f"was {what} by something else: its rows are written again")
            self._rewrite()

    def _rewrite(self) -> None:
        write_text(self.path, "".join(self._lines))
        self._written = self._on_disk()

    def _warn(self, message: str) -> None:
        # the caller is in Lightning, whose warnings the command line does not show
        warnings.warn(f"{self.path} {message}", SeqarchWarning, stacklevel=1)


def _line(cells: Iterable[Any]) -> str:
    """A line of the file."""
    line = io.StringIO(newline="")
    csv.writer(line).writerow(cells)
    return line.getvalue()
