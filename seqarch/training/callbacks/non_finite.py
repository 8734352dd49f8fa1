"""Stops a run whose loss or gradient is no longer a number."""

import dataclasses
import math
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from seqarch.errors import UserError
from seqarch.runs.layout import newest_checkpoint


@dataclasses.dataclass
class _Look:
    """The facts of a batch: step, loss, documents, and (once copied from the device) whether it is broken."""

    step: int
    loss: Tensor
    samples: Tensor
    broken: Tensor
    copied: torch.cuda.Event | None


class NonFiniteGuard(L.Callback):
    """Raises `UserError` at a loss or gradient of nan or infinity; names step, documents and the last checkpoint.

    The guard checks a batch when the next one is queued, so that a GPU does not wait for the check. Before a checkpoint
    is written and at the end of training, it checks everything that is left. All processes stop together.
    """

    def __init__(self) -> None:
        self._step = 0
        self._pending: _Look | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch: Any) -> None:
        self._step = trainer.global_step + 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        gradient_norm: Any = pl_module.gradient_norm
        loss = outputs["loss"].detach()
        finite = loss.isfinite() if gradient_norm is None else loss.isfinite() & gradient_norm.isfinite()
        look = self._look(trainer, loss, batch["sample"], finite)
        self._check(trainer)
        self._pending = look

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._check(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(trainer)

    def _look(self, trainer: L.Trainer, loss: Tensor, samples: Tensor, finite: Tensor) -> _Look:
        broken: Any = trainer.strategy.reduce((~finite).float(), reduce_op="sum")
        if not broken.is_cuda:
            return _Look(self._step, loss, samples, broken, None)
        on_host = torch.empty((), pin_memory=True).copy_(broken, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return _Look(self._step, loss, samples, on_host, copied)

    def _check(self, trainer: L.Trainer) -> None:
        look, self._pending = self._pending, None
        if look is None:
            return
        if look.copied is not None:
            look.copied.synchronize()
        if look.broken:
            raise UserError(self._describe(trainer, look))

    @staticmethod
    def _describe(trainer: Any, look: _Look) -> str:
        found: list[Any] = [(float(look.loss), trainer.datamodule.describe(look.samples.cpu())[:8])]
        if trainer.world_size > 1:
            found = found * trainer.world_size
            dist.all_gather_object(found, found[0])
        # a broken gradient may come from a finite loss; then the documents of the first process stand for the batch
        loss, documents = next((each for each in found if not math.isfinite(each[0])), found[0])
        what = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        checkpoint = newest_checkpoint(trainer.default_root_dir)
        advice = f"last good checkpoint: {checkpoint}" if checkpoint else "no checkpoint was written before it"
        return f"{what} at step {look.step}; documents of the batch: {'; '.join(documents)}; {advice}"
