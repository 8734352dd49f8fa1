"""The settings of a task at a size, from `settings.yaml`, and the examples that they describe."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jsonargparse import ArgumentParser

from seqarch.arguments import COUNT, SEED
from seqarch.errors import UserError, one_of, unknown
from seqarch.experiment.checker import check_tree
from seqarch.experiment.tree import read_plain
from seqarch.safe_yaml import load
from seqarch_recall import icll, mqar, retrievit
from seqarch_recall.examples import Examples


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
        """The test segments; a task with splits takes them from that of the test."""
        splits = "split" in inspect.signature(TASKS[self.task].examples).parameters
        return self._segments([{**({"split": "test"} if splits else {}), **segment} for segment in self.test], 1)

    def _segments(self, segments: Sequence[Segment], part: int) -> list[Examples]:
        """Segments with separate seeds: even parts are for training, odd parts for the test."""
        found = []
        for number, segment in enumerate(segments):
            seed = np.random.SeedSequence([self.seed, part, number]).generate_state(1)[0]
            options = {**self.options, **segment}
            try:
                found.append(TASKS[self.task].examples(int(seed), **options))
            except ValueError as error:
                raise UserError(f"there are no examples of {self.task} with {options}: {error}") from error
        return found


CHANGEABLE = [field.name for field in dataclasses.fields(Settings)][2:]
"""The settings that `--SETTING` changes."""


def find_settings(task: str, size: str, changes: Mapping[str, Any]) -> Settings:
    """The settings of a task at a size, with some of them changed.

    Raises:
        UserError: there is no such task, size or setting.
    """
    if task not in TASKS:
        raise unknown("recall task", task, TASKS)
    sizes = load(Path(__file__).parent / "settings.yaml")[task]
    if size not in sizes:
        raise UserError(f"recall task '{task}' has no size '{size}': expected {one_of(list(sizes))}")
    check_types("recall", Settings, changes)
    settings = Settings(task, size, **{**sizes[size], **changes})
    _check_ranges(settings)
    return settings


def check_types(key: str, call: Callable[..., Any], values: Mapping[str, Any], given: Collection[str] = ()) -> None:
    """Refuse values that a function or class does not take, as in a recipe, except the arguments named in `given`."""
    parser = ArgumentParser(exit_on_error=False)
    add: Any = parser.add_class_arguments if isinstance(call, type) else parser.add_function_arguments
    add(call, key, skip={*given})
    check_tree(parser, read_plain({key: values}))


def _check_ranges(settings: Settings) -> None:
    for name in ("widths", "rates", "train", "test"):
        if not getattr(settings, name):
            raise UserError(f"--{name} is empty: give at least one")
    counts = {name: getattr(settings, name) for name in ("epochs", "batch", "test_every", "layers")}
    for name, count in {**counts, "widths": min(settings.widths)}.items():
        COUNT.check(f"--{name}", count)
    SEED.check("--seed", settings.seed)
    for name in ("dropout", "warmup"):
        if not 0 <= (share := getattr(settings, name)) < 1:
            raise UserError(f"--{name} must lie in 0..1, 1 excluded, not {share}")
    if not all(0 < rate < math.inf for rate in settings.rates):
        raise UserError(f"--rates must be positive, not {list(settings.rates)}")
    if math.isnan(settings.stop):
        raise UserError("--stop must be an accuracy, such as 0.99, not nan")
    if not 0 <= settings.weight_decay < math.inf:
        raise UserError(f"--weight_decay must be 0 or more, not {settings.weight_decay}")
    _check_segments(settings)


def _check_segments(settings: Settings) -> None:
    examples, alike, *_ = TASKS[settings.task]
    for segment in (*settings.train, *settings.test):
        if alike in segment:
            raise UserError(f"{alike} must be the same in all segments: set it in --options, not in {segment}")
        options = {**settings.options, **segment}
        check_types(settings.task, examples, options, ["seed"])
        try:
            inspect.signature(examples).bind(0, **options)
        except TypeError as error:
            raise UserError(f"a segment of --train or --test is {segment}: {error}") from error
        for name, value in options.items():
            if type(value) is int:
                COUNT.check(name, value)
    least = min({**settings.options, **segment}["n"] for segment in settings.train)
    if settings.batch > least:
        raise UserError(f"--batch is {settings.batch}, but the smallest training segment has {least} examples")
