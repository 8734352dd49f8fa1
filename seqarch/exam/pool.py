"""Processes that train run after run, so that each imports only once. After a crash or a run of several
processes, a new one takes its place.

PyTorch is imported only by a process that has its GPUs and threads, so never at the top of this file.
"""

import contextlib
import gc
import io
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any

from seqarch.data.workers import follow_parent
from seqarch.errors import UserError, of_storage, one_line, say

Call = list[str] | dict[str, Any]
"""Arguments of `seqarch fit`, or for a trial of a model those of `Experiment.from_recipe`."""
PATIENCE = 120.0
"""Seconds that a run has to write its checkpoint after Ctrl-C."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
START = "spawn"
"""How processes start: CUDA and the number of threads are not yet chosen in a spawned one."""


def share_gpus(trainer: Mapping[str, Any], workers: int | None, runs: int) -> list[str | None]:
    """The GPUs that each simultaneous run sees; `None` for all GPUs.

    By default there are as many runs as the GPUs allow. More runs than that share GPUs. On a CPU each core has a
    run: a second thread makes a small model hardly faster.

    Args:
        trainer: the recipe's section.
        workers: how many runs at a time, if the user says so.
        runs: how many there are to make.
    """
    import torch

    accelerator, devices = trainer.get("accelerator", "auto"), trainer.get("devices", 1)
    if not isinstance(devices, int) or devices < 1:  # such as "auto"
        devices = None
    if accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available()):
        return [None] * (workers or max(1, min(runs, _cores() // (devices or 1))))
    if accelerator not in ("gpu", "cuda"):
        return [None] * (workers or 1)
    named = os.environ.get(VISIBLE)
    gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    devices = devices or len(gpus)
    shares = [",".join(gpus[n : n + devices]) for n in range(0, len(gpus) - devices + 1, devices)]
    return list(itertools.islice(itertools.cycle(shares), workers or len(shares)))


def share_cores(gpus: Sequence[str | None]) -> int | None:
    """Threads for each process of workers that see these GPUs; `None`, OpenMP's choice, for one worker.

    Each process by itself would start one thread per core. The threads of all processes then wait for each other,
    most of all in the QR decompositions of orthogonal initial weights. These take minutes instead of seconds.
    """
    if len(gpus) == 1:
        return None
    processes = sum(share.count(",") + 1 if share else 1 for share in gpus)
    return max(1, _cores() // processes)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def work(call: Call) -> str:
    """`fit` in a process of its own, without the messages of libraries."""
    warnings.filterwarnings("ignore")
    in_terminal = sys.stdout.isatty()  # where the exam keeps a line about the runs
    with contextlib.redirect_stdout(io.StringIO()) if in_terminal else contextlib.nullcontext():
        error = fit(call)
    if (exam := multiprocessing.parent_process()) is not None and not exam.is_alive():
        os._exit(1)  # no other call comes, and nobody would end this process
    return error


def fit(call: Call) -> str:
    """One run or trial; "" or what went wrong, on one line."""
    import torch

    from seqarch.experiment.experiment import Experiment

    torch._dynamo.reset()  # compiled code of the run before counts against the limit of recompilations
    try:
        if isinstance(call, dict):
            Experiment.from_recipe(**call).try_out()
        else:
            sys.argv[1:] = ["fit", *call]  # what Lightning starts on the other devices of a run
            Experiment(call).fit(figures=False)  # the exam draws all runs together
    except UserError as error:
        return one_line(error)
    except SystemExit as stop:
        return f"it ended with status {stop.code}" if stop.code else ""
    except Exception as error:  # a bug of a mixer must not take the other runs with it
        return (of_storage(error) if isinstance(error, OSError) else None) or _traced(error)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return ""


def _traced(error: Exception) -> str:
    traceback.print_exception(error)
    first, *_ = [*str(error).splitlines(), ""]  # compilers print hundreds of lines
    return one_line(f"{type(error).__name__}: {first}")


class Stopped(Exception):
    """The exam was stopped while a run was being made; the run has written a checkpoint."""


class Worker:
    """Makes run after run in one other process.

    Args:
        work: what the process does with a call: it returns "" or what went wrong. A function of a module.
        gpus: the GPUs that it sees, as in `CUDA_VISIBLE_DEVICES`; by default those that this process sees.
        threads: the threads that it computes with on the CPU, unless `OMP_NUM_THREADS` is set; by default OpenMP's
            choice.
    """

    def __init__(self, work: Callable[[Call], str], gpus: str | None = None, threads: int | None = None) -> None:
        self._work = work
        self._variables = {} if gpus is None else {VISIBLE: gpus}
        if threads is not None and THREADS not in os.environ:
            self._variables[THREADS] = str(threads)
        self._running: tuple[ProcessPoolExecutor, BaseProcess] | None = None
        self._stopping = False
        self._starting = threading.Lock()

    def fit(self, call: Call) -> None:
        """Train one run, or try out a model.

        Raises:
            UserError: that failed; what it said.
            Stopped: another thread called `stop`.
        """
        try:
            with self._starting:
                if self._stopping:
                    raise Stopped
                executor, _ = self._running or self._start()
                answer = executor.submit(self._work, call)
            error = answer.result()
            joined = executor.submit(os.getenv, "LOCAL_RANK").result()
        except BrokenProcessPool:
            error, joined = self._ending(), None
        if self._stopping:
            raise Stopped
        if error or joined:  # in which CUDA failed, or which Lightning joined to processes that are no more
            self.close()
        if error:
            raise UserError(error)

    def stop(self) -> None:
        """End the process from another thread; a run first writes a checkpoint, and `fit` raises `Stopped`."""
        with self._starting:
            self._stopping = True
            if self._running is not None:
                self._running[1].terminate()

    def close(self) -> None:
        """End the process."""
        if self._running is None:
            return
        (executor, process), self._running = self._running, None
        executor.shutdown(wait=False)
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()

    def _start(self) -> tuple[ProcessPoolExecutor, BaseProcess]:
        executor = ProcessPoolExecutor(1, multiprocessing.get_context(START), _begin, (self._variables,))
        pid = executor.submit(os.getpid).result()
        (process,) = (child for child in multiprocessing.active_children() if child.pid == pid)
        self._running = executor, process
        return self._running

    def _ending(self) -> str:
        """How the process ended that is no more."""
        if self._running is None:
            return "its process could not start"
        executor, process = self._running
        executor.shutdown()
        if (code := process.exitcode) is not None and code < 0:
            hint = ", usually for lack of memory" if code == -signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(-code).name}{hint}"
        return f"its process ended with status {code}"


def _begin(variables: Mapping[str, str]) -> None:
    """Prepare a process, before PyTorch is imported there; the exam handles Ctrl-C."""
    os.environ.update(variables)
    follow_parent(os.kill, os.getpid(), signal.SIGTERM)  # to write a checkpoint, if the exam was killed


class Pool(contextlib.AbstractContextManager["Pool"]):
    """A worker for each share of the GPUs, as in `CUDA_VISIBLE_DEVICES`; `None` means all."""

    def __init__(self, gpus: Sequence[str | None], work: Callable[[Call], str] = work) -> None:
        self.workers = [Worker(work, share, share_cores(gpus)) for share in gpus]

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    def do(self, jobs: Mapping[str, Callable[[Worker], str]]) -> dict[str, str]:
        """Do each job with an idle worker and print what it says; return what went wrong, by the jobs' names."""
        failed: dict[str, str] = {}
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self.workers:
            idle.put(worker)

        def attempt(number: int, name: str) -> None:
            head = f"[{number}/{len(jobs)}] {name}:"
            worker = idle.get()
            try:
                say(f"{head} {jobs[name](worker)}")
            except UserError as error:
                failed[name] = why = one_line(error)
                say(f"{head} failed: {why}")
            finally:
                idle.put(worker)

        threads = ThreadPoolExecutor(len(self.workers))
        done = [threads.submit(attempt, number, name) for number, name in enumerate(jobs, start=1)]
        try:
            wait(done)
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in self.workers:
                worker.stop()
            wait([job for job in done if not job.cancelled()], PATIENCE)
            say("stopped; the same command resumes from the last checkpoint")
            raise
        for job in done:
            job.result()
        return failed
