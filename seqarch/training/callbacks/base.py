"""The base of measuring callbacks: when they run, where their numbers go and how long they took."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch

from seqarch.arguments import Limited, Steps


def log(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Give scalars to every logger of the run, at the number of optimizer steps done."""
    module, data = trainer.lightning_module, trainer.datamodule
    since = (trainer.global_step - module.began) * data.sequences_per_step * data.sequence_length
    tokens = module.began_tokens + since
    for logger in trainer.loggers:
        logger.log_metrics({**metrics, "tokens": tokens}, step=trainer.global_step)


def clock(device: torch.device) -> float:
    """Seconds, once the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class EveryNSteps(Limited, L.Callback, ABC):
    """Calls `measure` before the first step, after every `every_n_steps` optimizer steps and after the last.

    Args:
        every_n_steps: distance between two measurements; 0 switches the callback off.
    """

    option_prefix = "{}."

    def __init__(self, every_n_steps: Steps) -> None:
        self.every_n_steps = every_n_steps
        self.seconds = 0.0
        """Time spent in `measure`, which does not count as training time."""
        self._last_step = 0

    @abstractmethod
    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> object:
        """The measurement; it must leave training as it found it."""

    def is_due(self, step: int, max_steps: int) -> bool:
        """Whether a measurement belongs after that step."""
        return bool(self.every_n_steps) and (step % self.every_n_steps == 0 or step == max_steps)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_step = trainer.global_step
        if trainer.global_step == 0 and self.is_due(0, trainer.max_steps):
            self._timed_measure(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch: Any) -> None:
        before, self._last_step = self._last_step, trainer.global_step
        # with gradient accumulation several batches end at the same step
        if self._last_step != before and self.is_due(self._last_step, trainer.max_steps):
            self._timed_measure(trainer, pl_module)

    def _timed_measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = clock(pl_module.device)
        training = pl_module.training
        pl_module.eval()
        try:
            self.measure(trainer, pl_module)
        finally:
            pl_module.train(training)
        self.seconds += clock(pl_module.device) - start
