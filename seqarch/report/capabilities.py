"""Results of `seqarch eval` for the models of a report, compared sample by sample with the reference."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from seqarch.report.runs import Group
from seqarch.runs import few_shot
from seqarch.runs.results import Result, Value, interval, newest_results

DRAWS = 2000
SAME = ("version", "settings", "prefix")
OF_TEXT = ("few_shot", "retrieval")
"""The groups of tasks whose samples and scores do not depend on the tokenizer."""
LOSS = "loss"
"""The group of tasks whose results the curves already show."""


@dataclass(frozen=True)
class Measured:
    """A metric of a model: its value, the facts of its result file, and the numbers of its samples `[n]`.

    With several seeds, value and samples are means over them. `difference` is the distance to the reference on the same
    samples with its 95 % interval, `None` for the reference and if the samples are not the same.
    """

    value: Value
    facts: dict[str, Any]
    samples: np.ndarray
    step: int
    """The training step of the evaluated checkpoint; of several seeds the latest, and only its results count."""
    depth: np.ndarray | None = None
    """The place of each sample's answer in its prompt, `[n]` from 0 to 1; only for tasks that note it."""
    difference: tuple[float, float, float] | None = None

    @property
    def of_loss(self) -> bool:
        """Whether a task of the group `LOSS` measured it."""
        return self.facts.get("group") == LOSS

    @property
    def alike(self) -> bool:
        """Whether the model cannot be told apart from the reference."""
        return self.difference is not None and self.difference[1] <= 0 <= self.difference[2]


def capabilities(groups: Sequence[Group], reference: Group, *, losses: bool = False) -> dict[str, dict[str, Measured]]:
    """The metrics of the models' newest results that have samples: by tag, then by the name of the model.

    For models without curves to compare, `losses` adds the metrics of the group `LOSS`, and those without samples.
    """
    metrics: dict[str, dict[str, Measured]] = {}
    for group in groups:
        for tag, measured in _metrics(group, losses).items():
            metrics.setdefault(tag, {})[group.name] = measured
    for tag, every in metrics.items():
        # a tag of two tasks: the loss by position in long documents, and in the sequences of a run
        metrics[tag] = {name: one for name, one in every.items() if not one.of_loss} or every
    for measured in metrics.values():
        base = measured.get(reference.name)
        for name, one in measured.items():
            paired = base and one is not base and 0 < len(one.samples) == len(base.samples)
            if base and paired and _same(one.facts, base.facts):
                measured[name] = replace(one, difference=paired_difference(one.samples, base.samples))
    metrics |= _average(metrics)
    return dict(sorted(metrics.items(), key=lambda each: _in_order(each[0])))


def _average(metrics: Mapping[str, Mapping[str, Measured]]) -> dict[str, dict[str, Measured]]:
    """The average over few-shot tasks, for the tasks that all models with results of such tasks have."""
    tags = few_shot.measured(metrics)
    models = dict.fromkeys(name for tag in tags for name in metrics[tag])
    tags = [tag for tag in tags if metrics[tag].keys() == models.keys()]
    if len(tags) < 2:
        return {}
    means = {}
    for name in models:
        each = {tag: metrics[tag][name] for tag in tags}
        value = few_shot.mean([one.value for one in each.values()])
        differences = [one.difference for one in each.values() if one.difference]
        difference = None
        if len(differences) == len(tags):
            half = few_shot.half_width([(low, high) for _, low, high in differences])
            by = float(np.mean([one for one, _, _ in differences]))
            difference = by, by - half, by + half
        first = next(iter(each.values()))
        facts = {"settings": {"limit": first.facts["settings"].get("limit")}}
        step = max(one.step for one in each.values())
        means[name] = Measured(value, facts, np.empty(0), step, difference=difference)
    return {few_shot.title(tags): means}


def _in_order(tag: str) -> list[Any]:
    """A key that sorts tags by the numbers in them: texts and numbers by turns."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]{1,18})", tag))]


def paired_difference(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float, float]:
    """The mean of `ours - theirs`, both `[n]`, and its 95 % bootstrap interval over the samples."""
    distances, counts = np.unique(ours.astype(np.float64) - theirs, return_counts=True)
    n = int(counts.sum())
    means = np.random.default_rng(0).multinomial(n, counts / n, size=DRAWS) @ distances / n
    low, high = np.quantile(means, [0.025, 0.975])
    return float(distances @ counts / n), float(low), float(high)


def _metrics(group: Group, losses: bool) -> dict[str, Measured]:
    """The metrics of a model by tag: means over its runs that came to the latest step and met the same samples."""
    seeds: dict[str, list[Result]] = {}
    for run in group.runs:
        for task, result in newest_results(run.folder).items():
            if losses or result.content.get("group") != LOSS:
                seeds.setdefault(task, []).append(result)
    metrics = {}
    for results in sorted(seeds.values(), key=lambda each: each[0].content.get("group") != LOSS):  # others replace it
        step = max(each.step for each in results)
        latest = [each for each in results if each.step == step]
        first = latest[0]
        alike = [each for each in latest if _same(each.content, first.content)]
        for tag, value in first.metrics.items():
            samples = [each.samples[tag] for each in alike if tag in each.samples]
            samples = [each for each in samples if len(each) == len(samples[0])]
            if samples:
                mean = np.stack(samples).mean(axis=0, dtype=np.float64)
                value = Value(float(mean.mean()), *interval(mean, value.share), len(mean), value.chance)
                depth = first.samples.get("depth")
                same = depth is not None and len(depth) == len(mean)
                metrics[tag] = Measured(value, dict(first.content), mean, step, depth if same else None)
            elif losses:
                values = [each.metrics[tag].value for each in alike if tag in each.metrics]
                metrics[tag] = Measured(Value(float(np.mean(values))), dict(first.content), np.empty(0), step)
    return metrics


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results measure the same samples in the same way."""
    rows = [(facts.get("rows") or {}).get("sha256") for facts in (one, other)]
    same = SAME if one.get("group") in OF_TEXT else (*SAME, "tokenizer")
    return rows[0] == rows[1] and all(one.get(key) == other.get(key) for key in same)
