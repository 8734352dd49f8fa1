"""Loss on the in-domain hold-out and on every out-of-distribution domain, while the model trains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from seqarch.data.datamodule import EvaluationSet
from seqarch.errors import UserError
from seqarch.training.callbacks.base import EveryNSteps, log
from seqarch.training.module import loss_metrics

EVALUATIONS = "evaluations"
"""The folder in a run folder that holds the loss of each evaluation sequence."""


class OODLoss(EveryNSteps):
    """Logs `loss/in_domain/<domain>`, `loss/ood/<domain>` and their means, in nats a token.

    Each time the same tokens: `data.eval_tokens` of each domain's hold-out. They do not pass through the training
    loader and no random number is drawn, so a run with the callback trains exactly like one without.

    Args:
        every_n_steps: distance between two evaluations in optimizer steps; 0 for none.
        at: when to evaluate instead, as shares of the training: 0.5 is the step half-way through, 1 the last.
        keep_sequences: write the loss of each evaluation sequence to `evaluations/` of the run folder too, from which a
            report resamples the documents.
    """

    def __init__(self, every_n_steps: int = 100, at: list[float] | None = None, keep_sequences: bool = False) -> None:
        super().__init__(every_n_steps)
        if at is not None and not (at and all(0 < share <= 1 for share in at)):
            raise UserError(f"ood_loss.at must hold shares of the training in (0, 1], not {at}")
        self.at = at
        self.keep_sequences = keep_sequences

    def is_due(self, step: int, max_steps: int) -> bool:
        if self.at is None:
            return super().is_due(step, max_steps)
        return step in {max(1, round(share * max_steps)) for share in self.at}

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        sets = data.evaluation_sets()
        batch_size = data.batch_size(trainer.world_size)
        losses = [sequence_losses(trainer, pl_module, each.tokens, batch_size) for each in sets]
        log(trainer, loss_metrics(sets, [float(loss.mean()) for loss in losses]))
        if self.keep_sequences and trainer.is_global_zero:
            write_sequences(Path(trainer.default_root_dir) / EVALUATIONS, trainer.global_step, sets, losses)


@torch.no_grad()
def sequence_losses(trainer: L.Trainer, pl_module: L.LightningModule, tokens: Tensor, batch_size: int) -> Tensor:
    """Mean loss of each row of `tokens [n, T + 1]`, nats a token: `[n]` float64 on the CPU.

    Each process takes its share of the rows. Every batch has the same shape (the last is filled up with rows that do
    not count), so that a compiled model is compiled once and sharded processes stay in step.
    """
    lm: Any = pl_module.lm
    stride = trainer.world_size * batch_size
    total = torch.zeros(len(tokens), device=pl_module.device, dtype=torch.float64)
    with trainer.precision_plugin.forward_context():
        for start in range(trainer.global_rank * batch_size, -(-len(tokens) // stride) * stride, stride):
            rows = torch.arange(start, start + batch_size)
            batch = tokens[rows.clamp(max=len(tokens) - 1)].to(pl_module.device)
            loss = lm(batch[:, :-1], batch[:, 1:], reduction="none").double().mean(dim=1)
            kept = rows < len(tokens)
            total[rows[kept].to(total.device)] = loss[kept.to(loss.device)]
    return trainer.strategy.reduce(total, reduce_op="sum").cpu()  # pyright: ignore[reportAttributeAccessIssue]


def write_sequences(folder: Path, step: int, sets: Sequence[EvaluationSet], losses: Sequence[Tensor]) -> None:
    """Write `step_00000500.npz`: for each set `loss/<role>/<domain>` float32 `[n]` and `document/<role>/<domain>`
    int32 `[n]`, the document of the hold-out in which each sequence begins.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    for each, loss in zip(sets, losses, strict=True):
        arrays[f"loss/{each.role}/{each.domain}"] = loss.numpy().astype(np.float32)
        arrays[f"document/{each.role}/{each.domain}"] = each.documents.numpy().astype(np.int32)
    partial = folder / f"step_{step:08d}.partial"
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, partial.with_suffix(".npz"))
