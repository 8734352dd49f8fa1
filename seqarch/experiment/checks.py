"""Checks a configuration before anything is built, and translates Lightning's errors when it builds."""

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng

from seqarch.errors import UserError, check_known, say
from seqarch.experiment.tree import Tree, at
from seqarch.training import LanguageModel
from seqarch.training.fsdp import FSDP2
from seqarch.training.weights import OtherWeights

PROCESSES = 8
"""Processes per core of a CPU, at most."""
PATIENCE = 30.0
"""Seconds after which a process says which processes it waits for."""
BYTES_PER_PARAMETER = 16
"""Bytes per parameter that float32 training holds: the weight, its gradient and AdamW's two moments.

Another optimizer may hold none, so half of them are certain.
"""
NO_REASON = "Expected a |Does not validate|Not a valid|a class path|a dict with"
"""Beginnings of lines in which the parser lists what else it tried."""
OF_OPTIONS = ("Early stopping conditioned on metric", "Unknown backend type")
"""Beginnings of errors about options of the trainer that show only in training."""
OF_TRAINER = (MisconfigurationException, ModuleNotFoundError)
OF_CONSTRUCTOR = (ValueError, TypeError, RuntimeError, AssertionError)
"""Errors about options of the trainer: always, and where it is made, as when SLURM's variables do not fit."""
WORKING = (
    *(callbacks.DeviceStatsMonitor, callbacks.EarlyStopping, callbacks.LambdaCallback, callbacks.LearningRateMonitor),
    *(callbacks.ModelCheckpoint, callbacks.ModelSummary, callbacks.ProgressBar, callbacks.SpikeDetection),
    *(callbacks.Timer, callbacks.WeightAveraging),
)
"""Callbacks of Lightning that work here; their subclasses do too."""
NO_DESTINATION = {
    *("class_path", "name", "version", "prefix", "project", "experiment_name", "run_name", "id", "run_id", "notes"),
    *("tags", "mode", "group", "job_type", "resume", "experiment_key", "log_model"),
    *("save_dir", "dir", "root_dir", "sub_dir", "checkpoint_name", "add_file_policy"),
}
"""Options of Lightning's loggers, as texts, that name no host, no account and no key."""
NOT_HERE = "notebook|fork|spawn|xla|tpu"
"""In the names of Lightning's strategies that copy this process, which has threads, or need other devices."""
ON_A_CPU = (
    "--trainer.accelerator=cpu --trainer.devices=1 --trainer.strategy=auto --trainer.precision=32-true "
    "--model.compile=false"
)


def check_machine(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for GPUs that PyTorch does not see here, a wrong number of processes, or another strategy.

    The names of strategies are those of Lightning that work here; the parser checks classes.
    """
    accelerator, devices, strategy = (config["trainer"][name] for name in ("accelerator", "devices", "strategy"))
    on_gpu, gpus, cores = accelerator in ("gpu", "cuda"), torch.cuda.device_count(), os.cpu_count() or 1
    if on_gpu and not gpus:
        raise UserError(f"trainer.accelerator is {accelerator}, but PyTorch sees no GPU here; on a CPU add: {ON_A_CPU}")
    most = gpus if on_gpu else max(gpus, PROCESSES * cores)
    if str(devices).isdigit() and not 1 <= int(devices) <= most:
        raise UserError(f"trainer.devices is {devices}, but there are {gpus} GPUs and {cores} cores: set 1 to {most}")
    if isinstance(strategy, str):
        check_known("trainer.strategy", strategy, strategies())


def strategies() -> list[str]:
    """The names of strategies that work here."""
    names = [name for name in StrategyRegistry.available_strategies() if not re.search(NOT_HERE, name)]
    return ["auto", *[name for name in names if not has_own_checkpoints(StrategyRegistry[name]["strategy"])]]


def has_own_checkpoints(strategy: type[Strategy]) -> bool:
    """Whether a strategy would read checkpoints in its own way, which checks less."""
    return strategy is not FSDP2 and strategy.load_checkpoint is not Strategy.load_checkpoint


def check_callbacks(named: Sequence[Any]) -> None:
    """Raise `UserError` for a callback of Lightning that brings its own schedule, accumulation or checkpoints."""
    for callback in named:
        if type(callback).__module__.startswith("lightning.") and not isinstance(callback, WORKING):
            raise UserError(f"trainer.callbacks holds {type(callback).__name__}: leave it out, seqarch does its work")


def check_destinations(trainer: Namespace, tree: Tree) -> None:
    """Raise `UserError` where a file, and not the user, says to which host or account something is sent, by what key.

    Args:
        trainer: the section of the recipe.
        tree: the same as it was written, which knows what comes from a file.
    """
    for keys, value in _destinations([], trainer):
        if value and (where := at(tree, keys).where) and value not in os.environ.values():
            key = f"{where}trainer.{'.'.join(keys)}"
            raise UserError(f"{key} is '{value}' in a file, which may not say where to send: give it in the command")


def _destinations(keys: list[str], value: Any, of_logger: bool = False) -> Iterator[tuple[list[str], str]]:
    """Each text in nested options that may say where something is sent, with its keys."""
    if isinstance(value, str) and ((of_logger and keys[-1] not in NO_DESTINATION) or re.search("://|::", value)):
        yield keys, value
    elif isinstance(value, Namespace | Mapping):
        options = vars(value) if isinstance(value, Namespace) else value
        of_logger |= keys[:1] == ["logger"] and str(options.get("class_path")).startswith("lightning.")
        for name, each in options.items():
            yield from _destinations([*keys, name], each, of_logger)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(value):
            yield from _destinations([*keys, str(index)], each, of_logger)


def check_memory(model: LanguageModel, on_cpu: bool) -> None:
    """Raise `UserError` for a model that cannot be trained in this machine's memory.

    Args:
        model: what is trained; nothing is allocated and no random number drawn.
        on_cpu: whether the CPU trains it; GPUs report a lack of memory themselves.
    """
    with isolate_rng(include_cuda=False), torch.device("meta"):
        n_parameters = model.build().n_parameters()
    per_parameter = BYTES_PER_PARAMETER // (1 if model.optimizer_factory is None else 2)
    needed, there = per_parameter * n_parameters, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if on_cpu and needed > there:
        gib = f"{needed / 2**30:,.0f} GiB of memory in training, and this machine has {there / 2**30:,.0f} GiB"
        raise UserError(f"{n_parameters:,} parameters take at least {gib}: make the model smaller")


@contextlib.contextmanager
def running(trainer: Trainer, checkpoint: str | Path | None) -> Iterator[None]:
    """Around a call of the trainer: turn errors of the user's making into `UserError`.

    After `PATIENCE` seconds it says that processes of other nodes are missing.
    """
    timer = threading.Timer(PATIENCE, _say_missing_nodes, [trainer])
    timer.daemon = True
    if trainer.num_nodes > 1:
        timer.start()
    try:
        with user_errors_of_lightning(checkpoint=checkpoint):
            yield
    finally:
        timer.cancel()


def _say_missing_nodes(trainer: Trainer) -> None:
    if not torch.distributed.is_initialized():
        here: Any = trainer.strategy.cluster_environment  # pyright: ignore[reportAttributeAccessIssue]
        say(
            f"seqarch: node {here.node_rank()} of {trainer.num_nodes} (trainer.num_nodes) waits at "
            f"{here.main_address}:{here.main_port} for the others. Start the same command on each of them, with "
            "MASTER_ADDR, MASTER_PORT and NODE_RANK in its environment",
            file=sys.stderr,
        )


@contextlib.contextmanager
def end_at_sigterm(trainer: Trainer) -> Iterator[None]:
    """Around training: end it at once by SIGTERM while `RunCheckpoint` does not handle the signal.

    The system would end only this process, and the processes that it started would wait for it.
    """

    def end(*_: Any) -> None:
        raise SIGTERMException

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except SIGTERMException:  # its own exit status is 0
        if trainer.is_global_zero:
            say("seqarch: stopped by SIGTERM while no step was running; the same command goes on", file=sys.stderr)
        sys.exit(128 + signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Around a call of Lightning: no tips, no list of devices, no warnings about its own code; errors stay."""
    levels = {"lightning.pytorch": logging.WARNING, "lightning.fabric": logging.WARNING}
    levels["lightning.pytorch.profilers"] = logging.INFO  # else they show no result
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {logger: logger.level for logger in loggers}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        # torch says so when it traces an RMSNorm of bf16 activations and fp32 weights, which is what autocast means
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        try:
            for logger, level in loggers.items():
                logger.setLevel(level)
            yield
        finally:
            for logger, level in before.items():
                logger.setLevel(level)


@contextlib.contextmanager
def user_errors_of_lightning(*, of_trainer_options: bool = False, checkpoint: Any = None) -> Iterator[None]:
    """Turn what Lightning and PyTorch raise for a user's choices into `UserError`; bugs pass through as they are.

    Args:
        of_trainer_options: around `Trainer(...)` and nothing else, where a `ValueError` is about the options too.
        checkpoint: what Lightning reads.
    """
    try:
        with without_chatter():
            yield
    except Exception as error:
        of_options = isinstance(error, OF_TRAINER) or str(error).startswith(OF_OPTIONS)
        of_options |= of_trainer_options and isinstance(error, OF_CONSTRUCTOR)
        if not of_options and isinstance(error, UserError | OSError):
            raise
        if (message := f"trainer: {error}" if of_options else _explained(error, checkpoint)) is None:
            raise
        raise UserError(message) from error


def _explained(error: Exception, checkpoint: str | Path | None) -> str | None:
    """What a user can do about an error of Lightning or PyTorch; `None` for a bug."""
    text = str(error)
    first = text.partition("\n")[0]
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any("lightning/pytorch/loggers/" in code.co_filename for code in frames):
        return f"trainer.logger: {text}"  # no account, no server, no such run
    reads = any("checkpoint_connector" in code.co_filename and code.co_name != "dump_checkpoint" for code in frames)
    if reads and isinstance(error, LookupError | TypeError | AttributeError | ValueError | ArithmeticError):
        return f"{checkpoint} lacks what Lightning reads in a checkpoint ({type(error).__name__}: {text})"
    # what the constructor of a class in a recipe raises comes out of the parser as one reason in a list
    reasons = re.findall(rf"^( *)- (?!{NO_REASON})(.+(?:\n\1 +.+)*)", text, re.MULTILINE)
    if reasons and text.startswith("Does not validate"):
        return reasons[-1][1]
    if isinstance(error, torch.OutOfMemoryError):
        smaller = "make data.micro_batch_size smaller or set model.activation_checkpointing"
        return f"the GPU's memory is not enough: {smaller} ({first})"
    if isinstance(error, torch.distributed.DistError) or "/gloo/" in text:
        again = "read the error of that process, then start the same command again"
        return f"the connection to another process of this run broke: {again} ({first})"
    if isinstance(error, OtherWeights):
        own = "use the config.yaml of its own run folder"
        return f"the checkpoint holds another model than the configuration describes ({error}): {own}"
    return None
