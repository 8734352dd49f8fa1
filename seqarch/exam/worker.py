"""A process that trains: run after run, so that the imports are paid once; a new one after a crash."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from seqarch.errors import UserError

Work = Callable[[Connection], None]
"""What the process does: takes arguments of `seqarch fit` from the connection, answers "" or what went wrong."""
PATIENCE = 120.0
"""Seconds that a run has to write its checkpoint after Ctrl-C."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_environment = threading.Lock()


class Stopped(Exception):
    """The exam was stopped while a run was being made; the run has written a checkpoint."""


class Worker:
    """Runs `seqarch fit` again and again in another process.

    Args:
        work: what the process does, a function of a module.
        gpus: the GPUs that it sees, as in `CUDA_VISIBLE_DEVICES`; by default those that this process sees.
    """

    def __init__(self, work: Work, gpus: str | None = None) -> None:
        self.work = work
        self.gpus = gpus
        self._process: BaseProcess | None = None
        self._connection: Any = None
        self._stopping = False
        self._starting = threading.Lock()

    def fit(self, args: list[str]) -> None:
        """Train one run.

        Raises:
            UserError: the run failed; what it said.
            Stopped: another thread called `stop`.
        """
        with self._starting:
            if self._stopping:
                raise Stopped
            process, connection = self._process or self._start(), self._connection
            connection.send(args)
        wait([connection, process.sentinel])
        answer = _answer(process, connection)
        if self._stopping:
            raise Stopped
        if answer:
            self.close()  # a process in which CUDA failed is of no more use
            raise UserError(answer)

    def stop(self) -> None:
        """Have the process end, a run once it has written a checkpoint; `fit` raises `Stopped`. For another thread."""
        with self._starting:
            self._stopping = True
            if self._process is not None:
                self._process.terminate()

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        process, connection = self._process, self._connection
        self._process = self._connection = None
        connection.close()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()

    def _start(self) -> BaseProcess:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=self.work, args=(theirs,))
        with _seeing(self.gpus):
            self._process.start()
        theirs.close()
        return self._process


def _answer(process: BaseProcess, connection: Connection) -> str:
    """What the process says of its run, or how it ended."""
    try:
        if connection.poll():
            return connection.recv()
    except (EOFError, OSError):
        pass
    process.join()
    code = process.exitcode
    if code is not None and code < 0:
        hint = ", mostly for want of memory" if code == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{hint}"
    return f"its process ended with status {code}"


@contextlib.contextmanager
def _seeing(gpus: str | None) -> Iterator[None]:
    """Processes that are started inside see these GPUs alone, from their first import on."""
    if gpus is None:
        yield
        return
    with _environment:
        before = os.environ.get(VISIBLE)
        os.environ[VISIBLE] = gpus
        try:
            yield
        finally:
            os.environ.pop(VISIBLE)
            if before is not None:
                os.environ[VISIBLE] = before
