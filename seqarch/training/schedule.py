"""The learning rate by step: a function of only the step, so that a resumed run follows it exactly."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

Shape = Literal["linear", "cosine", "constant_then_decay"]


class Schedule(ABC):
    """A schedule of your own, named in a recipe: `schedule: {class_path: yours.Schedule}`.

    Args:
        warmup_steps: `model.warmup_steps`.
        max_steps: `trainer.max_steps`, the length of the run.
    """

    def __init__(self, warmup_steps: int, max_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps

    @abstractmethod
    def share(self, step: int) -> float:
        """The share of `model.learning_rate` at a step, counted from 0."""


ScheduleFactory = Callable[[int, int], Schedule]


def decay_start(warmup_steps: int, max_steps: int, decay_share: float | None) -> int:
    """The step from which the learning rate falls to zero at `max_steps`: never one of the warm-up."""
    return warmup_steps if decay_share is None else max(warmup_steps, max_steps - round(decay_share * max_steps))


def warmup_and_decay(step: int, warmup_steps: int, start: int, max_steps: int, shape: Shape = "linear") -> float:
    """Share of the highest learning rate at a step: a linear rise over `warmup_steps`, a fall from `start` on.

    It falls linearly, or as half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983). From `max_steps` on it is 0.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    left = 1.0 if step < start else max(0.0, (max_steps - step) / max(1, max_steps - start))
    return (1 - math.cos(math.pi * left)) / 2 if shape == "cosine" else left
