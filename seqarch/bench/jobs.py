"""Runs each measurement in its own process: options go there as JSON, a row comes back as JSON.

Rows of one schema are printed as they come and kept in a CSV file.

`python -m seqarch.bench.jobs MODULE:FUNCTION '{"recipe": "rwkv7_110m", ...}'` is such a process.
"""

import dataclasses
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from seqarch.errors import UserError, of_memory, say
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


STDERR_LINES = 8
"""Lines of output to quote in the error of a process that a signal ended."""
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclasses.dataclass(frozen=True)
class Job:
    """A model to time: its name, the function "module:name" that gives its row, with options, and whose model it is."""

    name: str
    function: str
    options: Mapping[str, Any]
    of: str = "seqarch"


def run_job(job: Job, own_caches: bool) -> Row:
    """The row that the job's process prints, or one with its error.

    Args:
        job: what to run.
        own_caches: whether compile caches of earlier runs are used; otherwise the process starts with empty ones.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # compilers may still write
        caches = {} if own_caches else {name: os.path.join(folder, name.lower()) for name in CACHES}
        done = subprocess.run(
            [sys.executable, "-m", "seqarch.bench.jobs", job.function, json.dumps(dict(job.options))],
            env={**os.environ, **caches, "PYTHONFAULTHANDLER": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        say(done.stderr.rstrip(), file=sys.stderr)
        return {"name": job.name, "of": job.of, "error": _reason(done.returncode, done.stderr)}
    return {"name": job.name, "of": job.of, **json.loads(done.stdout.splitlines()[-1])}


def answer(function: str, options: str) -> None:
    """The process of a job: print the row that the function gives for the options, which are JSON, or its error."""
    warnings.filterwarnings("ignore")
    try:
        row = pkgutil.resolve_name(function)(**json.loads(options))
    except Exception as error:
        if (message := str(error) if isinstance(error, UserError) else of_memory(error)) is None:
            raise
        row = {"error": message}
    print(json.dumps(row))  # noqa: T201 - for the process that started this one


def _reason(code: int, stderr: str) -> str:
    """Say in one line why a process failed: its last line or, if a signal ended it, the call it was in."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if code > 0:
        return lines[-1] if lines else "no output"
    # faulthandler's traceback begins with the innermost call; lists of other threads and modules follow it
    traceback = next((index for index, line in enumerate(lines) if line.startswith("Current thread")), None)
    last = lines[-STDERR_LINES:] if traceback is None else lines[traceback + 1 :][:STDERR_LINES]
    return "; ".join((f"stopped by signal {-code} ({signal.strsignal(-code)})", *last))


if __name__ == "__main__":
    answer(*sys.argv[1:])
