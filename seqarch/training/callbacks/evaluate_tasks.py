"""Runs evaluation tasks while the model trains."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning as L

from seqarch.errors import UserError
from seqarch.evaluation import Scores, Task, evaluate
from seqarch.training.callbacks.base import EveryNSteps, log
from seqarch.training.scorer import scorer_of


class EvaluateTasks(EveryNSteps):
    """Logs the metrics of evaluation tasks.

    Args:
        tasks: evaluation tasks by class, such as `[Copying]`.
        every_n_steps: distance between two evaluations in optimizer steps; 0 for none.
        at: when to evaluate instead, as shares of the training: 0.5 is the step half-way through, 1 the last.
    """

    key: ClassVar[str] = "EvaluateTasks"
    """The name of the callback's options in messages."""

    def __init__(self, tasks: list[Task], every_n_steps: int = 100, at: list[float] | None = None) -> None:
        super().__init__(every_n_steps)
        if at is not None and not (at and all(0 < share <= 1 for share in at)):
            raise UserError(f"{self.key}.at must hold shares of the training in (0, 1], not {at}")
        self.tasks = tasks
        self.at = at

    def is_due(self, step: int, max_steps: int) -> bool:
        if self.at is None:
            return super().is_due(step, max_steps)
        return step in {max(1, round(share * max_steps)) for share in self.at}

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.evaluate(trainer, pl_module)

    def evaluate(self, trainer: L.Trainer, pl_module: Any) -> Scores:
        """Score the tasks and log their metrics."""
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        scores = evaluate(self.tasks, scorer_of(trainer, pl_module), data)
        log(trainer, scores.metrics)
        return scores
