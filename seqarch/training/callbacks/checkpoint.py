"""Writes checkpoints: atomically, at regular steps, at the end and when a signal stops the process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from seqarch.arguments import Count
from seqarch.errors import UserError, refused, say
from seqarch.runs.files import atomic, remove
from seqarch.runs.folder import CHECKPOINTS, checkpoint_path, checkpoints, newest_checkpoint
from seqarch.training.callbacks.base import EveryNSteps
from seqarch.training.integrity import seal
from seqarch.training.sharded_checkpoints import IN_BACKGROUND, ShardedCheckpoints


class RunCheckpoint(EveryNSteps, Checkpoint):
    """Writes `checkpoints/step_00000500.ckpt` of the run folder, every `every_n_steps` optimizer steps and at the end.

    A file is complete or not there. On SIGTERM and Ctrl-C the run finishes the step, writes a checkpoint and stops;
    the same command resumes from it. So it does if `trainer.max_time` or a callback stops it. A second Ctrl-C stops at
    once. A process that ignores SIGINT still ignores it.
    In a job of SLURM, SIGUSR1 does what SIGTERM does and then puts the job back into the queue.

    Args:
        every_n_steps: distance between two checkpoints in optimizer steps; 0 for none except at a stop signal.
        keep: how many of the newest stay on disk.
        sharded: with `trainer.strategy: fsdp2`, a checkpoint is a folder, to which each process writes its own part.
            No process needs memory for the whole model. By default the first process gathers all and writes one file.
        in_background: with `sharded`, training goes on while a copy of each part in the CPU's memory is written. Only
            the last checkpoint is waited for.
    """

    def __init__(
        self, every_n_steps: int = 500, keep: Count = 2, sharded: bool = False, in_background: bool = False
    ) -> None:
        super().__init__(every_n_steps)
        self.keep = keep
        self.sharded = sharded
        self.in_background = in_background
        self.told_to_stop = False
        self.interrupted = False
        """Whether Ctrl-C was the reason to stop."""
        self._path: Path | None = None
        self._ends = False
        """Whether something else than a signal stops training."""
        self._requeue = False
        self._previous_handlers: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.in_background and not self.sharded:
            raise UserError("checkpoint.in_background is for split checkpoints: set checkpoint.sharded to true")
        if stage == "fit" and self.sharded:
            if not isinstance(trainer.strategy, ShardedCheckpoints):
                raise UserError("checkpoint.sharded is for models that are split: set trainer.strategy to fsdp2")
            trainer.strategy.write_folders()
        # Lightning's own handler would write a checkpoint of another kind, in the middle of a step
        if stage == "fit" and "SLURM_JOB_ID" in os.environ:
            self._handle(signal.SIGUSR1)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._restore_handlers()
        if self._requeue and trainer.is_global_zero:
            requeue()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step
        if trainer.is_global_zero:
            for interrupted in (Path(trainer.default_root_dir) / CHECKPOINTS).glob("*.partial"):
                remove(interrupted)
        # replaces Lightning's handler, which stops in the middle of an accumulated step
        self._handle(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._handle(signal.SIGINT)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch: Any) -> None:
        stepped = trainer.global_step != self._last_step
        super().on_train_batch_end(trainer, pl_module, *batch)
        self._defer_stop(trainer)
        if stepped and trainer.strategy.reduce_boolean_decision(self.told_to_stop or self._ends, all=False):
            self.told_to_stop = trainer.strategy.reduce_boolean_decision(self.told_to_stop, all=False)
            if not self._is_saved(trainer):
                self.measure(trainer, pl_module)
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._is_saved(trainer):
            self._defer_stop(trainer)

    def _defer_stop(self, trainer: L.Trainer) -> None:
        """Let what else stops training wait for the end of a step. Within one, the gradients so far would be lost."""
        self._ends, trainer.should_stop = self._ends or trainer.should_stop, False

    def _is_saved(self, trainer: L.Trainer) -> bool:
        """Whether the checkpoint of this step is written, or being written."""
        path = checkpoint_path(trainer.default_root_dir, trainer.global_step)
        return path in (self._path, trainer.strategy.broadcast(newest_checkpoint(trainer.default_root_dir)))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer)
        self._restore_handlers()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer)
        path = self._path = checkpoint_path(trainer.default_root_dir, trainer.global_step)
        with self._named_errors(trainer):
            if self.sharded:
                options = IN_BACKGROUND if self.in_background else None
                trainer.save_checkpoint(path, weights_only=False, storage_options=options)
            else:
                with atomic(path, durable=True, replace=trainer.is_global_zero) as partial:
                    save_sealed(trainer, partial)
        if self.told_to_stop or trainer.global_step == trainer.max_steps or not self.in_background:
            self._finish(trainer)

    def _finish(self, trainer: L.Trainer) -> None:
        """Wait until the last checkpoint is whole, and remove the oldest."""
        if self.in_background:
            with self._named_errors(trainer):
                cast(ShardedCheckpoints, trainer.strategy).finish_writing()
        if trainer.is_global_zero:
            for old in checkpoints(trainer.default_root_dir)[: -self.keep]:
                remove(old)
        trainer.strategy.barrier()

    @contextlib.contextmanager
    def _named_errors(self, trainer: L.Trainer) -> Iterator[None]:
        """Raise `UserError`, which names the last checkpoint, for an `OSError`."""

        def reason(error: OSError) -> str:
            before = newest_checkpoint(trainer.default_root_dir)
            return f"{error.strerror}; the same command resumes from {before or 'the start'}"

        with refused(f"cannot write the checkpoint {self._path}", OSError, why=reason):
            yield

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """What a signal does."""
        self.told_to_stop = True
        self._requeue = self._requeue or number == signal.SIGUSR1
        if number == signal.SIGINT:
            self.interrupted = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            message = b"\nfinishing this step, then writing a checkpoint; Ctrl-C again stops at once\n"
            os.write(2, message)  # print may be interrupted in the middle of itself

    def _handle(self, number: int) -> None:
        self._previous_handlers[number] = signal.signal(number, self._stop)

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}


def requeue() -> None:
    """Put the SLURM job that this process belongs to back into the queue; SLURM ends the job then."""
    job = os.environ["SLURM_JOB_ID"]
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        say(f"seqarch: warning: the job {job} is not requeued ({error}); submit it again", file=sys.stderr)


def save_sealed(trainer: L.Trainer, path: Path) -> None:
    """Write a checkpoint from which training goes on, and seal it. Every process calls this."""
    trainer.save_checkpoint(path, weights_only=False)  # the optimizer's state too
    if trainer.is_global_zero:
        seal(path)
