"""The process that trains: one for all runs of an exam, so that the imports are paid once; a new one after a crash."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from seqarch.errors import UserError

Work = Callable[[Connection], None]
"""What the process does: takes arguments of `seqarch fit` from the connection, answers "" or what went wrong."""
PATIENCE = 120.0
"""Seconds that a run has to write its checkpoint after Ctrl-C."""


class Worker:
    """Runs `seqarch fit` again and again in another process.

    Args:
        work: what the process does, a function of a module.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self._process: Any = None
        self._connection: Any = None

    def fit(self, args: list[str]) -> None:
        """Train one run.

        Raises:
            UserError: the run failed; what it said.
            KeyboardInterrupt: Ctrl-C; the run has written a checkpoint.
        """
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            self._connection.send(args)
            wait([self._connection, self._process.sentinel])
            answer = self._answer()
        except KeyboardInterrupt:
            self._process.terminate()
            self.close()
            raise
        if answer:
            self.close()  # a process in which CUDA failed is of no more use
            raise UserError(answer)

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

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=self.work, args=(theirs,))
        self._process.start()
        theirs.close()

    def _answer(self) -> str:
        try:
            if self._connection.poll():
                return self._connection.recv()
        except EOFError:
            pass
        self._process.join()
        code = self._process.exitcode
        if code is not None and code < 0:
            hint = ", mostly for want of memory" if code == -signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(-code).name}{hint}"
        return f"its process ended with status {code}"
