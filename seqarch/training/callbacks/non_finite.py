"""Stops a run whose loss is no longer a number."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.training.checkpoint import newest_checkpoint


class NonFiniteGuard(L.Callback):
    """Raises `UserError` at a loss of nan or infinity; names the step, the batch's documents and the last checkpoint.

    A batch's loss is looked at when the next batch is done, so that the GPU never waits for the look; before a
    checkpoint is written and at the end of training nothing is left unlooked at.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, Tensor] | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        self._check(trainer)
        self._pending = (trainer.global_step, outputs["loss"].detach(), batch["sample"])

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(trainer)

    def _check(self, trainer: L.Trainer) -> None:
        if self._pending is None:
            return
        (step, loss, samples), self._pending = self._pending, None
        if torch.isfinite(loss):
            return
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        documents = "; ".join(data.describe(samples.cpu())[:8])
        checkpoint = newest_checkpoint(trainer.default_root_dir)
        advice = f"last good checkpoint: {checkpoint}" if checkpoint else "no checkpoint was written before it"
        raise UserError(f"the loss is {float(loss)} at step {step}; documents of the batch: {documents}; {advice}")
