"""The training loss between two measurements, the learning rate and the norm of the gradient."""

import math
from typing import Any

import lightning as L
from torch import Tensor

from seqarch.runs import tags
from seqarch.training.callbacks.base import EveryNSteps, log


class TrainLoss(EveryNSteps):
    """Logs `loss/train`, `learning_rate` and `gradient_norm`.

    The loss is in nats per token, the mean over the steps since the last row. What mixers add to it is in it, and is
    `loss/train/NAME` too. Rate and norm (before clipping) are those of the step that ends the row.

    Its sums go into checkpoints, so that a resumed run writes the same rows as an uninterrupted one.

    Args:
        every_n_steps: distance between two rows in optimizer steps; 0 for none.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        super().__init__(every_n_steps)
        self._totals: dict[str, Tensor] = {}
        """Sums of the losses since the last row, by tag."""
        self._batches = 0
        self._rate = math.nan
        self._reduce: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._reduce = trainer.strategy.reduce

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._rate = optimizer.param_groups[0]["lr"]  # after the step the schedule sets the next step's rate

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *batch: Any) -> None:
        # each the mean of the batch, divided by the batches of the step
        shares = {tags.TRAIN_LOSS: outputs["loss"].detach().double()}
        for name, loss in outputs.get("added", {}).items():
            shares[tags.added_loss(name)] = loss.double() / trainer.accumulate_grad_batches
        for tag, share in shares.items():
            self._totals[tag] = self._totals[tag].to(share.device) + share if tag in self._totals else share
        self._batches += trainer.global_step != self._last_step  # whole ones: a resumed run may cut them otherwise
        super().on_train_batch_end(trainer, pl_module, outputs, *batch)

    def measure(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not self._totals:
            return
        means = {tag: float(self._reduced(total / self._batches)) for tag, total in self._totals.items()}
        self._totals, self._batches = {}, 0
        metrics = {**means, tags.LEARNING_RATE: self._rate, tags.GRADIENT_NORM: float(pl_module.gradient_norm)}
        log(trainer, metrics)

    def state_dict(self) -> dict[str, Any]:
        # the mean over processes, since each of them goes on from the one that is saved
        totals = {tag: self._reduced(total) for tag, total in self._totals.items()}
        return {"totals": totals, "batches": self._batches}

    def _reduced(self, total: Tensor) -> Tensor:
        return self._reduce(total, reduce_op="mean")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "totals" in state_dict:
            self._totals = state_dict["totals"]
        elif state_dict["total"] is not None:  # of an earlier version
            self._totals = {tags.TRAIN_LOSS: state_dict["total"]}
        self._batches = state_dict["batches"]
