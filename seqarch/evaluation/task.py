"""The contract of an evaluation task, and the one function that runs tasks."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from seqarch.arguments import Limited
from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError, refused
from seqarch.evaluation.rows import RowFiles
from seqarch.evaluation.scorer import Scorer


@dataclass(frozen=True)
class Scores:
    """The scores that a task returns.

    Args:
        metrics: by tag.
        samples: arrays with one number per sample, by name. Under the tag of a metric: the numbers whose mean it is;
            of a share such as accuracy, bool.
        chance: the value of a guess, by tag of a metric.
        cut: number of samples whose prompt was cut to the length of a training sequence.
    """

    metrics: dict[str, float]
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    chance: dict[str, float] = field(default_factory=dict)
    cut: int = 0

    @classmethod
    def of(cls, samples: dict[str, np.ndarray], chance: dict[str, float] | None = None, cut: int = 0) -> "Scores":
        """The means of samples, all of which are metrics."""
        means = {tag: float(each.mean(dtype="float64")) for tag, each in samples.items()}
        return cls(means, samples, chance or {}, cut)


@dataclass(frozen=True)
class Asked:
    """The request to `seqarch eval`: at most `limit` samples per task, prompt `lengths`, a folder of `rows`."""

    limit: int | None = None
    lengths: tuple[int, ...] | None = None
    rows: str | None = None


class Task(Limited, ABC):
    """Scores a model on fixed inputs.

    A task draws no number from a global generator and leaves the model as it found it. All processes of a run call
    it, and all of them get the same scores. It calls the scorer in the same order every time. The options of
    `__init__` are the options in a recipe.
    """

    group: ClassVar[str] = "other"
    """The word for `--tasks` that means this task among others: loss, few_shot, retrieval, ..."""
    version: ClassVar[int] = 0
    """Rises when the same model would get other scores."""
    reads_data: bool = True
    """Whether `prepare` reads the data of the run."""
    decodes: ClassVar[bool] = False
    """Whether the model must be able to decode: to carry a state over `length` tokens."""
    length: int = 1
    """Tokens that the task reads in one sequence; only of tasks that decode."""
    by_group: bool = False
    """Whether only a word for several tasks means this one, so that it is left out where it cannot be scored."""

    option_prefix = "{}."
    _prepared_for: TextDataModule | str | None = "nothing"

    @classmethod
    def variants(cls, asked: Asked) -> "list[Task]":
        """The tasks of this class that `seqarch eval` knows; by default one, with the default options."""
        return [cls()]

    @property
    def name(self) -> str:
        """The word for `--tasks` that means this task only, and the name of its result file."""
        return type(self).__name__

    @property
    def settings(self) -> dict[str, Any]:
        """The options that a result depends on."""
        options = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in options if name != "folder" and hasattr(self, name)}

    def row_files(self) -> RowFiles | None:
        """The files with the task's rows, `None` for a task without files.

        Raises:
            UserError: there are none; the message says how to get them.
        """
        return None

    def held_out(self, data: TextDataModule) -> dict[str, str]:
        """SHA-256 of the held-out tokens that a task with `reads_data` measures, by domain; by default all of them."""
        return data.hold_out_checksums()

    def check(self, scorer: Scorer) -> None:
        """Raise `UserError` for a model that it cannot score. Called after `prepare`, before any task is scored."""
        if not self.decodes:
            return
        with refused(f"{self.name} reads through a decoding state", UserError, why=True):
            scorer.lm.init_state(1, self.length, "meta", torch.float32)

    def prepare(self, data: TextDataModule) -> None:
        """Read or make the inputs. `evaluate` calls it once per data module, before the first scoring."""

    def prepare_once(self, data: TextDataModule | None) -> None:
        """`prepare`, unless it was called with these data before."""
        if self._prepared_for is not data:
            self.prepare(data)  # pyright: ignore[reportArgumentType]
            self._prepared_for = data

    @abstractmethod
    def score(self, scorer: Scorer) -> Scores:
        """Score the model of `scorer`. The tags must not depend on the model."""


def ready_of(tasks: Sequence[Task], ready: Callable[[Task], object]) -> tuple[list[Task], dict[str, UserError]]:
    """The tasks for which `ready` raises no `UserError`, and the errors of those of a group that are left out, by name.

    Raises:
        UserError: `ready` refuses a task that is named itself, or every task.
    """
    found, left_out = [], {}
    for task in tasks:
        try:
            ready(task)
            found.append(task)
        except UserError as error:
            left_out[task.name] = error
            if not task.by_group or len(left_out) == len(tasks):
                raise
    return found, left_out


def evaluate(tasks: Iterable[Task], scorer: Scorer, data: TextDataModule | None) -> Scores:
    """Score one model on every task.

    Args:
        tasks: what is scored.
        scorer: the model.
        data: hold-outs and training text, for the tasks that read them.

    Raises:
        UserError: two tasks give the same tag.
    """
    merged = Scores({})
    for task in tasks:
        task.prepare_once(data)
        scores = task.score(scorer)
        for tag in (*scores.metrics, *scores.samples):
            if tag in merged.metrics or tag in merged.samples:
                raise UserError(f"two evaluation tasks give '{tag}', the second is {type(task).__name__}: remove one")
        merged.metrics.update(scores.metrics)
        merged.samples.update(scores.samples)
        merged.chance.update(scores.chance)
        merged = replace(merged, cut=merged.cut + scores.cut)
    return merged
