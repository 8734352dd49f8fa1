"""The settings of a task at a size, from `settings.yaml`, and the examples that they name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml

from seqarch.errors import UserError, unknown
from seqarch.recall import icll, mqar, retrievit
from seqarch.recall.examples import Examples


class Task(NamedTuple):
    """The function that makes a task's examples. The option sets the number of token ids: `times * option + more`."""

    examples: Callable[..., Examples]
    option: str
    times: int = 1
    more: int = 0


TASKS = {
    "mqar": Task(mqar.examples, "vocab_size"),
    "ngram": Task(retrievit.ngram, "symbols", more=2),
    "position": Task(retrievit.position, "symbols", times=2, more=2),
    "icll": Task(icll.examples, "symbols", more=2),
}
Segment = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """One task at one size; the head of `settings.yaml` says what each of them means."""

    task: str
    size: str
    options: Mapping[str, Any]
    train: Sequence[Segment]
    test: Sequence[Segment]
    widths: Sequence[int]
    rates: Sequence[float]
    epochs: int
    batch: int
    test_every: int = 1
    seed: int = 0
    layers: int = 2
    conv: bool = True
    positions: Literal["own", "learned", "none"] = "none"
    dropout: float = 0.1
    weight_decay: float = 0.1
    stop: float = 0.99
    warmup: float = 0.0
    fresh: bool = False
    exact: bool = False
    graphs: bool = True

    @property
    def vocab_size(self) -> int:
        """Token ids of the task."""
        task = TASKS[self.task]
        return task.times * {**(task.examples.__kwdefaults__ or {}), **self.options}[task.option] + task.more

    def training(self, epoch: int) -> list[Examples]:
        """The training segments of an epoch."""
        return self._segments(self.train, 2 * (epoch if self.fresh else 0))

    def testing(self) -> list[Examples]:
        """The test segments."""
        return self._segments(self.test, 1)

    def _segments(self, segments: Sequence[Segment], part: int) -> list[Examples]:
        """Segments with seeds of their own: even parts are training, odd ones test."""
        found = []
        for number, segment in enumerate(segments):
            seed = np.random.SeedSequence([self.seed, part, number]).generate_state(1)[0]
            found.append(TASKS[self.task].examples(int(seed), **{**self.options, **segment}))
        return found


@cache
def _file() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text())


def find_settings(task: str, size: str, changes: Mapping[str, Any]) -> Settings:
    """The settings of a task at a size, with some of them changed.

    Raises:
        UserError: there is no such task, size or setting.
    """
    if task not in TASKS:
        raise unknown("recall task", task, TASKS)
    sizes = _file()[task]
    if size not in sizes:
        raise UserError(f"recall task '{task}' has no size '{size}': expected {' or '.join(sizes)}")
    known = [field.name for field in dataclasses.fields(Settings)][2:]
    for name in changes:
        if name not in known:
            raise unknown("setting --recall.", name, known)
    return Settings(task, size, **{**sizes[size], **changes})
