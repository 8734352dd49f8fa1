"""Results of evaluation tasks on one checkpoint, in a run folder: `evaluations/step_N/TASK.json`, `TASK.samples.npz`.

The JSON file holds what identifies the result (`IDENTITY`) and `metrics`, a mapping from tags to `Value`. The other
file holds arrays with one number per sample, in the fixed order of the samples. An array under the tag of a metric
holds the numbers whose mean is the metric. Other arrays describe the samples, for example `depth`.
"""

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.errors import UserError
from seqarch.runs.files import is_label, read_json, read_numbers, write_arrays, write_json
from seqarch.runs.folder import result_paths, step_of

IDENTITY = ("task", "version", "rows", "settings", "tokenizer", "prefix", "precision", "checkpoint")
"""The entries that must be equal for two results to be the same measurement."""

NORMAL = 1.959964
"""The standard normal quantile of a 95 % interval."""


def interval(samples: np.ndarray, share: bool | None = None) -> tuple[float, float]:
    """The 95 % interval of the mean of `samples [n]`.

    For a `share` of 0 and 1 it is Wilson's (Wilson 1927), which holds for few samples and at 0 and 1; otherwise the
    normal one. `None` means that the samples decide, as in results that do not say what they are.
    """
    n, mean = len(samples), float(samples.mean())
    if share is not False and np.isin(samples, (0, 1)).all():
        from scipy.stats import binomtest

        wilson = binomtest(int(samples.sum()), n).proportion_ci(method="wilson")
        return float(wilson.low), float(wilson.high)
    half = NORMAL * float(samples.std(ddof=1)) / n**0.5 if n > 1 else float("inf")
    return mean - half, mean + half


@dataclass(frozen=True, eq=False, repr=False)
class Value(float):
    """A metric: its 95 % interval over the samples, their number, the value of a guess, and whether it is a share."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    chance: float | None = None
    share: bool | None = None

    def __new__(cls, value: float, *_: Any, **facts: Any) -> "Value":
        return super().__new__(cls, value)

    def __repr__(self) -> str:
        known = self.low is not None and self.high is not None
        return f"{self.value:.4g}" + (f" ({self.low:.4g} to {self.high:.4g})" if known else "")

    @property
    def at_chance(self) -> bool:
        """Whether the interval holds the value of a guess."""
        known = self.chance is not None and self.low is not None and self.high is not None
        return known and self.low <= self.chance <= self.high  # pyright: ignore[reportOperatorIssue]


@dataclass(frozen=True)
class Result:
    """A task's result as its file holds it."""

    path: Path
    content: Mapping[str, Any]

    @property
    def task(self) -> str:
        return self.path.stem

    @property
    def step(self) -> int:
        """The optimizer steps of the checkpoint."""
        return step_of(self.path.parent)

    @property
    def metrics(self) -> dict[str, Value]:
        """The metrics by tag."""
        return {tag: Value(**value) for tag, value in self.content["metrics"].items()}

    @cached_property
    def samples(self) -> dict[str, np.ndarray]:
        """The numbers of the samples, `[n]`, by name; empty if there is no such file."""
        path = samples_path(self.path)
        return read_numbers(path) if path.is_file() else {}


def samples_path(path: Path) -> Path:
    """The file of samples that belongs to a result."""
    return path.with_suffix(".samples.npz")


def write_result(
    path: Path, facts: Mapping[str, Any], metrics: Mapping[str, Value], samples: Mapping[str, np.ndarray]
) -> None:
    """Write a result, its samples first; the JSON file completes it."""
    if samples:
        write_arrays(samples_path(path), samples, compressed=True)
    write_json(path, {**facts, "metrics": {tag: asdict(value) for tag, value in metrics.items()}})


def read_result(path: Path) -> Result:
    """The result in a file.

    Raises:
        UserError: the file is damaged.
    """
    content = read_json(path)
    result = Result(path, content)
    try:
        numbers = [number for value in result.metrics.values() for number in astuple(value)]
        held = all(isinstance(content[key], dict) for key in ("metrics", "settings"))
        held = held and all(map(is_label, [*content["metrics"], *content["settings"]]))
        rows = (content.get("rows") or {"sha256": {}})["sha256"]
        whole = held and isinstance(rows, dict) and all(isinstance(each, int | float | None) for each in numbers)
    except (KeyError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} is not a result of seqarch eval: remove it, then evaluate the task again")
    return result


def newest_results(run: Path) -> dict[str, Result]:
    """The result of every task of a run folder, by task, each from the last step at which there is one."""
    return {path.stem: read_result(path) for path in result_paths(run)}
