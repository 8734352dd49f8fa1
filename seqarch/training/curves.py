"""Writes `curves.csv`: one row per step, one column per tag, an empty cell if nothing was measured."""

import contextlib
import csv
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from seqarch.runs.curves import read_rows
from seqarch.runs.files import atomic, sync


class CurvesLogger(Logger):
    """A Lightning logger that keeps every scalar of a run in one CSV file.

    Numbers are written with all their digits, so that two equal runs have equal files.

    Args:
        path: the file; rows already in it are kept.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.columns = read_rows(self.path)[0] or ["step", "tokens"]
        self.row: dict[str, Any] = {}
        self.n_rows = 0
        """Rows in the file, as far as this process has written or kept them."""

    @property
    def name(self) -> str:
        return "curves"

    @property
    def version(self) -> str:
        return ""

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
        new = [tag for tag in self.row if tag not in self.columns]
        if new or not self.path.exists():
            self._rewrite([*self.columns, *new], read_rows(self.path)[1])
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(self.row)
        self.n_rows += 1
        self.row = {}

    @rank_zero_only
    def sync(self) -> None:
        """Write the row being collected, and wait until the file is on disk."""
        self.save()
        if self.path.exists():
            sync(self.path)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with contextlib.suppress(*[OSError] * (status == "failed")):  # report the first error
            self.save()

    @rank_zero_only
    def truncate(self, step: int) -> None:
        """Remove the rows after `step`: a run that resumes from that step's checkpoint writes them again."""
        kept = [row for row in read_rows(self.path)[1] if int(row["step"]) <= step]
        self._rewrite(self.columns, kept)
        self.n_rows = len(kept)

    def _rewrite(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        self.columns = columns
        with atomic(self.path) as partial, partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
