"""Loss on the in-domain hold-out and on every out-of-distribution domain, while the model trains."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from seqarch.training.callbacks.base import EveryNSteps, log
from seqarch.training.module import loss_metrics


class OODLoss(EveryNSteps):
    """Logs `loss/in_domain/<domain>`, `loss/ood/<domain>` and their means, in nats a token.

    Each time the same tokens: `data.eval_tokens` of each domain's hold-out. They do not pass through the training
    loader and no random number is drawn, so a run with the callback trains exactly like one without.

    Args:
        every_n_steps: distance between two evaluations in optimizer steps; 0 for none.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        super().__init__(every_n_steps)

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        sets = data.evaluation_sets()
        losses = [domain_loss(trainer, pl_module, each.tokens, data.batch_size(trainer.world_size)) for each in sets]
        log(trainer, loss_metrics(sets, losses))


@torch.no_grad()
def domain_loss(trainer: L.Trainer, pl_module: L.LightningModule, tokens: Tensor, batch_size: int) -> float:
    """Mean loss in nats a token over `tokens [n, T + 1]`, each process taking its share of the rows.

    Every batch has the same shape (the last is filled up with rows that do not count), so that a compiled model is
    compiled once and sharded processes stay in step.
    """
    lm: Any = pl_module.lm
    stride = trainer.world_size * batch_size
    total = torch.zeros((), device=pl_module.device, dtype=torch.float64)
    with trainer.precision_plugin.forward_context():
        for start in range(trainer.global_rank * batch_size, -(-len(tokens) // stride) * stride, stride):
            rows = torch.arange(start, start + batch_size)
            batch = tokens[rows.clamp(max=len(tokens) - 1)].to(pl_module.device)
            loss = lm(batch[:, :-1], batch[:, 1:], reduction="none").double().mean(dim=1)
            total += loss[(rows < len(tokens)).to(loss.device)].sum()
    return float(trainer.strategy.reduce(total, reduce_op="sum")) / len(tokens)
