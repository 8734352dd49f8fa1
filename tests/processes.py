"""`seqarch` in new processes that need not import PyTorch: they are forked from a process that has it."""

from __future__ import annotations

import dataclasses
import gc
import importlib.metadata
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

SAMPLE = 1 << 13
"""Training tokens in which bigrams are counted, here and in the tests' process: more took a tenth of a small run."""
HANG = 120.0
"""Seconds after which processes that train together are stopped and started once more. They take 3 to 30."""
SERVER = multiprocessing.get_context("forkserver")
"""The server from which processes start. It has imported what a run imports, and runs nothing."""
MIXERS = {point.module for point in importlib.metadata.entry_points(group="seqarch.mixers")}
SERVER.set_forkserver_preload(
    ["seqarch.experiment.experiment", "torch.utils.tensorboard", "docstring_parser", *MIXERS, "tests.preload"]
)


@dataclasses.dataclass
class Done:
    """A process that ended; a negative `returncode` is the signal that ended it."""

    returncode: int | None
    stdout: str
    stderr: str


def seqarch(
    args: Sequence[str],
    logs: Path,
    env: Mapping[str, str] | None = None,
    *,
    timeout: float | None = None,
    cwd: Path | None = None,
    module: str = "seqarch",
) -> Done:
    """Run `python -m seqarch ARGS`, or another module, to its end, or for `timeout` seconds.

    It leads a new session. `env` extends the environment, and the folders of its `PYTHONPATH` are in `sys.path`.
    """
    return _end(_start(args, logs, env or {}, cwd, module), logs, timeout)


def fit(args: Sequence[str], logs: Path, env: Mapping[str, str] | None = None) -> Done:
    return seqarch(["fit", *args], logs, env)


def fit_in_two(args: Sequence[str], logs: Path, command: str = "fit", count: int = 2) -> list[Done]:
    """Run a command by two processes together, or more, as Lightning starts them. Returns the result of each rank."""
    return fit_together(args, logs, [{"NODE_RANK": "0", "LOCAL_RANK": str(rank)} for rank in range(count)], command)


def fit_on_nodes(args: Sequence[str], logs: Path, *interruptions: Mapping[str, str]) -> list[Done]:
    """Run a command by one process per node, with torchrun's environment and each node's interruption."""
    return fit_together(
        args,
        logs,
        [
            {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "GROUP_RANK": str(rank),
                "TORCHELASTIC_RUN_ID": "run",
                **interruption,
            }
            for rank, interruption in enumerate(interruptions)
        ],
    )


def fit_together(
    args: Sequence[str], logs: Path, envs: Sequence[Mapping[str, str]], command: str = "fit"
) -> list[Done]:
    """Run a command by one process per environment.

    All of them start once more from the same run folder if one hangs: gloo of PyTorch 2.13 sometimes loses a message of
    an all-gather. The sender then waits in `waitSend` and the receiver in `~UnboundBuffer`, for half an hour.
    """
    run = Path(next(arg for arg in args if arg.startswith("--run_dir=")).partition("=")[2])
    with tempfile.TemporaryDirectory() as kept:
        if run.exists():
            shutil.copytree(run, f"{kept}/run")
        ranks, folders = _start_together(args, logs, envs, command)
        end = time.monotonic() + HANG
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        if any(process.is_alive() for process in ranks):
            for process in ranks:
                process.kill()
                process.join()
            shutil.rmtree(run, ignore_errors=True)
            if Path(kept, "run").exists():
                shutil.copytree(f"{kept}/run", run)
            ranks, folders = _start_together(args, logs, envs, command)
    return [_end(process, folder) for process, folder in zip(ranks, folders, strict=True)]


def _start_together(
    args: Sequence[str], logs: Path, envs: Sequence[Mapping[str, str]], command: str
) -> tuple[list[ForkServerProcess], list[Path]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(envs))}
    folders = [logs / f"rank_{rank}" for rank in range(len(envs))]
    words = [command, *args]
    return [_start(words, folder, {**shared, **env}) for folder, env in zip(folders, envs, strict=True)], folders


def _start(
    args: Sequence[str], logs: Path, env: Mapping[str, str], cwd: Path | None = None, module: str = "seqarch"
) -> ForkServerProcess:
    logs.mkdir(parents=True, exist_ok=True)
    process = SERVER.Process(target=_run, args=(list(args), logs, {**os.environ, **env}, cwd or Path.cwd(), module))
    process.start()
    return process


def _end(process: ForkServerProcess, logs: Path, timeout: float | None = None) -> Done:
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    return Done(process.exitcode, (logs / "stdout").read_text(), (logs / "stderr").read_text())


def _run(args: list[str], logs: Path, env: dict[str, str], cwd: Path, module: str) -> None:
    """The life of such a process: `python -m MODULE ARGS`, with what `tests.preload` changes."""
    from seqarch.cli.training import parser_of

    gc.freeze()  # what the server has imported is no garbage
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    os.environ.clear()  # the server's, from when it started
    os.environ.update(env)
    os.chdir(cwd)
    places = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    if not {*places} <= {*sys.path}:
        parser_of.cache_clear()  # there may be plug-ins
    sys.path[:0] = places
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with (logs / name).open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    multiprocessing.set_start_method(None, force=True)  # otherwise the workers of a loader import PyTorch again
    torch.set_num_threads(1)
    rank_zero_only.rank = int(
        env.get("RANK", env.get("LOCAL_RANK", 0))
    )  # Lightning reads it from the environment when imported
    sys.argv[1:] = args
    runpy.run_module(module, run_name="__main__", alter_sys=True)
