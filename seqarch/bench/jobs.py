"""Runs each measurement in its own process: options go there as JSON, a row comes back as JSON.

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
from collections.abc import Mapping
from typing import Any

from seqarch.bench.rows import Row
from seqarch.errors import UserError, of_memory, say

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
