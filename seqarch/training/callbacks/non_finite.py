"""Stops a run whose loss or gradient is no longer a number."""

import math
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from seqarch.errors import DivergedError
from seqarch.runs.folder import newest_checkpoint


class NonFiniteGuard(L.Callback):
    """Raises `DivergedError` at a loss or gradient of nan or infinity; names step, documents and the last checkpoint.

    The guard checks a batch when the next one is queued, so that a GPU does not wait for the check. Before a checkpoint
    is written and at the end of training, it checks everything that is left. All processes stop together.
    """

    def __init__(self) -> None:
        self._step = 0
        self._pending: tuple[int, Tensor, Tensor, Tensor, torch.cuda.Event | None] | None = None
        """The last batch: step, loss, documents, whether it is broken, and on a GPU the event after this was copied."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch: Any) -> None:
        self._step = trainer.global_step + 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        gradient_norm: Any = pl_module.gradient_norm
        loss = outputs["loss"].detach()
        finite = loss.isfinite() if gradient_norm is None else loss.isfinite() & gradient_norm.isfinite()
        broken: Any = trainer.strategy.reduce((~finite).float(), reduce_op="sum")
        copied = None
        if broken.is_cuda:
            broken = torch.empty((), pin_memory=True).copy_(broken, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._check(trainer)
        self._pending = self._step, loss, batch["sample"], broken, copied

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(trainer)

    def _check(self, trainer: L.Trainer) -> None:
        if self._pending is None:
            return
        step, loss, samples, broken, copied = self._pending
        self._pending = None
        if copied is not None:
            copied.synchronize()
        if broken:
            raise DivergedError(self._describe(trainer, step, loss, samples))

    @staticmethod
    def _describe(trainer: Any, step: int, loss: Tensor, samples: Tensor) -> str:
        found: list[Any] = [(float(loss), trainer.datamodule.describe(samples.cpu())[:8])]
        if trainer.world_size > 1:
            found = found * trainer.world_size
            dist.all_gather_object(found, found[0])
        # a broken gradient may come from a finite loss; then the documents of the first process stand for the batch
        value, documents = next((each for each in found if not math.isfinite(each[0])), found[0])
        what = "the gradient is not finite" if math.isfinite(value) else f"the loss is {value}"
        checkpoint = newest_checkpoint(trainer.default_root_dir)
        advice = f"last good checkpoint: {checkpoint}" if checkpoint else "no checkpoint was written before it"
        return f"{what} at step {step}; documents of the batch: {'; '.join(documents)}; {advice}"
