"""The measurements of an interrupted task: the file `evaluations/step_N/TASK.partial`."""

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqarch.runs.files import atomic

SAVE_SECONDS = 10.0
"""Time between two writes."""

Measured = list[tuple[list[int], Tensor]]
"""Indices of rows and their numbers `[len(indices), ...]`, batch by batch."""


class Partial(contextlib.AbstractContextManager):
    """The rows that a scorer has measured for one task, in a file that is removed when the task is done.

    Used as a context. The calls of the scorer are known by their order: a task makes the same calls every time.

    Args:
        path: the file.
        facts: all that the numbers depend on; a file with other facts is not used.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        self.calls: list[Measured] = []
        self.begun = 0
        self.start = self.saved = time.monotonic()
        with contextlib.suppress(Exception):  # a file that is damaged or not there: the task begins anew
            content = torch.load(path, weights_only=True)
            if content["facts"] == self.digest:
                self.calls, self.start = content["calls"], self.start - content["seconds"]

    @property
    def seconds(self) -> float:
        """Time that the task has taken, before its interruptions too."""
        return round(time.monotonic() - self.start, 3)

    def begin(self) -> Measured:
        """The measured rows of the next call, which appends its own."""
        self.begun += 1
        self.calls += [[] for _ in range(len(self.calls), self.begun)]
        return self.calls[self.begun - 1]

    def save(self, *, now: bool = False) -> None:
        """Write the file, if it is time."""
        if any(self.calls) and (now or time.monotonic() - self.saved >= SAVE_SECONDS):
            with atomic(self.path) as partial, partial.open("wb") as file:
                torch.save({"facts": self.digest, "calls": self.calls, "seconds": self.seconds}, file)
            self.saved = time.monotonic()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.save(now=True) if error else self.path.unlink(missing_ok=True)
