"""Loss on the in-domain hold-out and on every out-of-distribution domain, while the model trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import lightning as L
import numpy as np

from seqarch.errors import UserError
from seqarch.evaluation import LossByDomain, Task
from seqarch.runs.files import atomic
from seqarch.runs.layout import evaluation_path, newest_checkpoint
from seqarch.training.callbacks.evaluate_tasks import EvaluateTasks


class OODLoss(EvaluateTasks):
    """Logs `loss/in_domain/<domain>`, `loss/ood/<domain>` and their means, in nats per token (task `LossByDomain`).

    Each time the same tokens: `data.eval_tokens` of each domain's hold-out. They do not pass through the training
    loader and no random number is drawn, so a run with the callback trains exactly like one without.

    Args:
        every_n_steps: distance between two evaluations in optimizer steps; 0 for none.
        at: when to evaluate instead, as shares of the training: 0.5 is the step half-way through, 1 the last.
        keep_sequences: also write the loss of each evaluation sequence to `evaluations/` of the run folder. A report
            resamples the documents from it.
        tasks: further evaluation tasks for the same steps.
    """

    key = "ood_loss"

    def __init__(
        self,
        every_n_steps: int = 100,
        at: list[float] | None = None,
        keep_sequences: bool = False,
        tasks: list[Task] | None = None,
    ) -> None:
        super().__init__([LossByDomain(), *(tasks or [])], every_n_steps, at)
        self.keep_sequences = keep_sequences

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        scores = self.evaluate(trainer, pl_module)
        if self.keep_sequences and trainer.is_global_zero:
            write_samples(evaluation_path(trainer.default_root_dir, trainer.global_step), scores.samples)
        broken = [tag for tag, value in scores.metrics.items() if tag.startswith("loss/") and not math.isfinite(value)]
        if broken and trainer.global_step == trainer.max_steps:  # before that, NonFiniteGuard sees the next step
            checkpoint = newest_checkpoint(trainer.default_root_dir)
            raise UserError(
                f"{broken[0]} is not a finite number after the last step; checkpoint before it: {checkpoint}"
            )


def write_samples(path: Path, samples: Mapping[str, np.ndarray]) -> None:
    """Write the samples of the tasks."""
    with atomic(path) as partial, partial.open("wb") as file:
        np.savez(file, **samples)  # pyright: ignore[reportArgumentType]
