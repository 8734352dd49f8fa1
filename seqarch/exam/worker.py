"""A process that trains run after run, so that it imports only once. After a crash a new process takes its place."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from seqarch.errors import UserError

Asked = list[str] | dict[str, Any]
"""Arguments of `seqarch fit`, or for a trial of a model those of `Experiment.from_recipe`."""
Work = Callable[[Connection], None]
"""The work of the process: it takes what is `Asked` from the connection and answers "" or an error."""
PATIENCE = 120.0
"""Seconds that a run has to write its checkpoint after Ctrl-C."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


def share_cores(gpus: Sequence[str | None]) -> int | None:
    """Threads for each process of workers that see these GPUs; `None`, OpenMP's choice, for one worker.

    Each process by itself would start one thread per core. The threads of all processes then wait for each other,
    most of all in the QR decompositions of orthogonal initial weights. These take minutes instead of seconds.
    """
    if len(gpus) == 1:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = sum(each.count(",") + 1 if each else 1 for each in gpus)
    return max(1, cores // processes)


class Stopped(Exception):
    """The exam was stopped while a run was being made; the run has written a checkpoint."""


class Worker:
    """Runs `seqarch fit` again and again in another process.

    Args:
        work: what the process does, a function of a module.
        gpus: the GPUs that it sees, as in `CUDA_VISIBLE_DEVICES`; by default those that this process sees.
        threads: the threads that it computes with on the CPU, unless `OMP_NUM_THREADS` is set; by default OpenMP's
            choice.
    """

    def __init__(self, work: Work, gpus: str | None = None, threads: int | None = None) -> None:
        self.work = work
        self.gpus = gpus
        self.threads = threads
        self._running: tuple[BaseProcess, Connection] | None = None
        self._stopping = False
        self._starting = threading.Lock()

    def fit(self, args: Asked) -> None:
        """Train one run, or try out a model.

        Raises:
            UserError: that failed; what it said.
            Stopped: another thread called `stop`.
        """
        with self._starting:
            if self._stopping:
                raise Stopped
            process, connection = self._running or self._start()
            connection.send(args)
        wait([connection, process.sentinel])
        answer = _answer(process, connection)
        if self._stopping:
            raise Stopped
        if answer:
            self.close()  # a process in which CUDA failed is of no more use
            raise UserError(answer)

    def stop(self) -> None:
        """End the process from another thread; a run first writes a checkpoint, and `fit` raises `Stopped`."""
        with self._starting:
            self._stopping = True
            if self._running is not None:
                self._running[0].terminate()

    def close(self) -> None:
        """End the process."""
        if self._running is None:
            return
        (process, connection), self._running = self._running, None
        connection.close()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        variables = {} if self.gpus is None else {VISIBLE: self.gpus}
        if self.threads is not None and THREADS not in os.environ:
            variables[THREADS] = str(self.threads)
        process = context.Process(target=_begin, args=(theirs, variables))
        process.start()
        self._running = process, connection
        theirs.close()
        connection.send(self.work)
        return self._running


def _answer(process: BaseProcess, connection: Connection) -> str:
    """The process's answer about its run, or the way it ended."""
    with contextlib.suppress(EOFError, OSError):
        if connection.poll():
            return connection.recv()
    process.join()
    if (code := process.exitcode) is not None and code < 0:
        hint = ", usually for lack of memory" if code == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{hint}"
    return f"its process ended with status {code}"


def _begin(connection: Connection, variables: Mapping[str, str]) -> None:
    """Do the work that the connection brings; its module, and so PyTorch, is imported with the variables set."""
    os.environ.update(variables)
    connection.recv()(connection)
