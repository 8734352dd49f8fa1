"""The settings of a task at a size, from `settings.yaml`, and the examples that they name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from seqarch.errors import UserError, unknown
from seqarch.recall import icll, mqar, ngram, position
from seqarch.recall.examples import Examples

MODULES = {"mqar": mqar, "ngram": ngram, "position": position, "icll": icll}
TASKS = tuple(MODULES)
Segment = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """One task at one size; `settings.yaml` says what its keys mean.

    Args:
        task: one of `TASKS`.
        size: name of the settings.
        options: arguments of the task's `examples` in all segments.
        train: segments of an epoch, in this order.
        test: segments of the test; its longest example has the length at which states are counted.
        widths: `d_model` of the models.
        rates: learning rates; the best one counts.
        epochs: passes over the training segments; the rate follows a cosine to zero, epoch by epoch.
        batch: examples of a step.
        test_every: epochs between tests.
        seed: of data, weights and dropout.
        layers: blocks.
        conv: whether the layers before each mixer are gated short convolutions, unless it is a model by itself.
        positions: of attention: its "own", "learned" ones of the model, or "none".
        dropout: of the embedding.
        weight_decay: of AdamW, on all parameters.
        stop: the mean accuracy at which training ends.
        warmup: share of the epochs in which the rate rises.
        fresh: whether every epoch has new examples.
        exact: whether only examples count whose answers are all right.
        graphs: whether steps on a GPU are CUDA graphs.
    """

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
        module = MODULES[self.task]
        defaults = module.examples.__kwdefaults__ or {}
        (name,) = inspect.signature(module.vocabulary).parameters
        return module.vocabulary(**{name: self.options.get(name, defaults.get(name))})

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
            found.append(MODULES[self.task].examples(int(seed), **{**self.options, **segment}))
        return found


@cache
def _file() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((Path(__file__).parent / "settings.yaml").read_text())


def find_settings(task: str, size: str, changes: Mapping[str, Any]) -> Settings:
    """The settings of a task at a size, with some of them changed.

    Raises:
        UserError: there is no such task, size or setting.
    """
    if task not in MODULES:
        raise unknown("recall task", task, TASKS)
    sizes = _file()[task]
    if size not in sizes:
        raise UserError(f"recall task '{task}' has no size '{size}': expected {' or '.join(sizes)}")
    known = [field.name for field in dataclasses.fields(Settings)][2:]
    for name in changes:
        if name not in known:
            raise unknown("setting --recall.", name, known)
    return Settings(task, size, **{**sizes[size], **changes})
