"""Tokens a second, model FLOP utilisation and memory."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops

from seqarch.training.callbacks.base import EveryNSteps, clock, log


class Throughput(EveryNSteps):
    """Logs speed and memory between two measurements.

    * `throughput/tokens_per_second`: over all devices, without the time that evaluations and checkpoints took;
    * `throughput/mfu`: the share of the devices' peak in bf16 that the model's own operations make up
      (`flops_per_token`, forward and backward, nothing counted twice for activation checkpointing); GPUs only;
    * `memory/peak_gib`: the most memory that tensors held on one GPU since the last measurement.

    Args:
        every_n_steps: distance between two measurements in optimizer steps; 0 for none.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        super().__init__(every_n_steps)
        self.tokens_per_second: float | None = None
        """The last measurement, for progress bars."""
        self._mark = (0, 0.0)
        self._flops_per_token = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        lm: Any = pl_module.lm
        self._flops_per_token = lm.flops_per_token(data.sequence_length, training=True)
        self._mark = (trainer.global_step, self._training_clock(trainer, pl_module))

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        step, seconds = trainer.global_step, self._training_clock(trainer, pl_module)
        steps, elapsed = step - self._mark[0], seconds - self._mark[1]
        self._mark = (step, seconds)
        if not steps:
            return
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        rate = steps * data.sequences_per_step * data.sequence_length / elapsed
        self.tokens_per_second = rate
        metrics = {"throughput/tokens_per_second": rate}
        if pl_module.device.type == "cuda":
            peak = get_available_flops(pl_module.device, torch.bfloat16)
            if peak:
                metrics["throughput/mfu"] = rate * self._flops_per_token / (peak * trainer.world_size)
            metrics["memory/peak_gib"] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        log(trainer, metrics)

    def _training_clock(self, trainer: L.Trainer, pl_module: L.LightningModule) -> float:
        measuring = sum(each.seconds for each in trainer.callbacks if isinstance(each, EveryNSteps))  # pyright: ignore
        return clock(pl_module.device) - measuring
