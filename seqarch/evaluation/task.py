"""The contract of an evaluation task, and the one function that runs tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError
from seqarch.evaluation.scorer import Scorer


@dataclass(frozen=True)
class Scores:
    """What a task found: `metrics` by tag, and `samples`, arrays with one number per example, by name."""

    metrics: dict[str, float]
    samples: dict[str, np.ndarray] = field(default_factory=dict)


class Task:
    """Scores a model on fixed inputs.

    A task draws no number from a global generator and leaves the model as it found it. All processes of a run call
    it, and all of them get the same scores. The options of `__init__` are the options in a recipe.
    """

    _prepared_for: TextDataModule | None = None

    def prepare(self, data: TextDataModule) -> None:
        """Read or make the inputs. `evaluate` calls it once per data module, before the first scoring."""

    def score(self, scorer: Scorer) -> Scores:
        """Score the model of `scorer`. The tags must not depend on the model."""
        raise NotImplementedError


def evaluate(tasks: Iterable[Task], scorer: Scorer, data: TextDataModule) -> Scores:
    """Score one model on every task.

    Raises:
        UserError: two tasks give the same tag.
    """
    metrics: dict[str, float] = {}
    samples: dict[str, np.ndarray] = {}
    for task in tasks:
        if task._prepared_for is not data:
            task.prepare(data)
            task._prepared_for = data
        scores = task.score(scorer)
        for tag in (*scores.metrics, *scores.samples):
            if tag in metrics or tag in samples:
                raise UserError(f"two evaluation tasks give '{tag}', the second is {type(task).__name__}: remove one")
        metrics.update(scores.metrics)
        samples.update(scores.samples)
    return Scores(metrics, samples)
