"""The average over the 13 few-shot tasks of arXiv 2505.18522 (tables 1 and 2), with the paper's metric of each."""

import math
from collections.abc import Collection, Mapping, Sequence

from seqarch.runs.results import Value

BY_LENGTH = ("openbookqa", "arc_easy", "arc_challenge", "sciq", "hellaswag", "piqa")
"""Tasks whose accuracy the paper takes by log-likelihood per byte of the answer."""
METRICS = {
    task: f"{task}/{'acc_norm' if task in BY_LENGTH else 'acc'}"
    for task in (
        *("mmlu", "openbookqa", "arc_easy", "arc_challenge", "boolq", "race", "social_iqa", "sciq", "hellaswag"),
        *("copa", "piqa", "winogrande", "wsc273"),
    )
}
"""The tag of each task's metric in the paper, in its order."""


def measured(tags: Collection[str]) -> list[str]:
    """The tags of the average that are among `tags`."""
    return [tag for tag in METRICS.values() if tag in tags]


def title(tags: Collection[str]) -> str:
    """The name of the average over the tasks of these tags, with the tasks that are left out."""
    missing = [task for task, tag in METRICS.items() if tag not in tags]
    return "few_shot/average" + (f" without {', '.join(missing)}" if missing else "")


def average(metrics: Mapping[str, Value]) -> Value | None:
    """The mean over the tasks among `metrics`; `None` for fewer than two."""
    values = [metrics[tag] for tag in measured(metrics)]
    return mean(values) if len(values) > 1 else None


def mean(values: Sequence[Value]) -> Value:
    """The mean of values, with the interval that independent values give, where all have one."""
    value = math.fsum(each.value for each in values) / len(values)
    low, high = None, None
    intervals = [(each.low, each.high) for each in values if each.low is not None and each.high is not None]
    if len(intervals) == len(values):
        half = half_width(intervals)
        low, high = value - half, value + half
    chances = [each.chance for each in values if each.chance is not None]
    chance = math.fsum(chances) / len(values) if len(chances) == len(values) else None
    return Value(value, low, high, sum(each.n or 0 for each in values) or None, chance)


def half_width(intervals: Sequence[tuple[float, float]]) -> float:
    """Half the width of the interval of the mean of independent values, from their intervals."""
    return math.hypot(*((high - low) / 2 for low, high in intervals)) / len(intervals)
