"""Scores tasks on one checkpoint and writes each result at once."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import SeqarchWarning, UserError
from seqarch.evaluation.partial import Partial
from seqarch.evaluation.rows import RowFiles
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task, evaluate, ready_of
from seqarch.runs.files import check_folder
from seqarch.runs.folder import EVALUATIONS, result_path
from seqarch.runs.results import IDENTITY, Result, Value, interval, read_result, write_result


def values(scores: Scores) -> dict[str, Value]:
    """The metrics with their intervals, where there are samples, and the value of a guess."""
    found = {}
    for tag, value in scores.metrics.items():
        samples = scores.samples.get(tag)
        n, share = (None, None) if samples is None else (len(samples), samples.dtype == bool)
        low, high = interval(samples, share) if samples is not None and n else (None, None)
        found[tag] = Value(value, low, high, n, scores.chance.get(tag), share)
    return found


def evaluate_into(
    folder: Path,
    step: int,
    tasks: Sequence[Task],
    scorer: Scorer,
    data: TextDataModule | None,
    origin: Mapping[str, Any],
    trained_on: Mapping[str, str] | None = None,
    begin: Callable[[str], None] = lambda name: None,
) -> list[Result]:
    """Score tasks and write their results to a run folder; existing results are not measured again.

    A warning names each task of a group that is left out, since it cannot score this model or these data.

    Args:
        folder: the run folder.
        step: optimizer steps of the checkpoint.
        tasks: what is scored.
        scorer: the model.
        data: hold-outs and training text; may be `None` if no task reads them.
        origin: other facts that identify the results: `checkpoint`, its SHA-256, and `precision`.
        trained_on: names of the files that the model was trained on, by SHA-256.
        begin: called with the name of each task before it is scored.

    Raises:
        UserError: before anything is scored: no task can score the model, or one that is named itself cannot, its rows
            are missing or were trained on, or there is a result of another setting.
    """
    check_folder(folder / EVALUATIONS, folder)
    facts = {task.name: _facts(task, scorer, data, origin, trained_on or {}) for task in tasks}
    for name, about in facts.items():
        _check_same(result_path(folder, step, name), about)
    tasks, left_out = ready_of(tasks, lambda task: (task.prepare_once(data), task.check(scorer)))
    for name, error in left_out.items():
        warnings.warn(f"left out {name}: {error}", SeqarchWarning, stacklevel=3)
    results = []
    result_path(folder, step, "").parent.mkdir(parents=True, exist_ok=True)  # before the work, whose results need it
    for task in tasks:
        path = result_path(folder, step, task.name)
        if not path.is_file():
            begin(task.name)
            with Partial(path.with_suffix(".partial"), facts[task.name]) as partial:
                scorer.partial = partial
                scores = evaluate([task], scorer, data)
                about = {**facts[task.name], "seconds": partial.seconds, "cut": scores.cut}
                write_result(path, about, values(scores), scores.samples)
            scorer.partial = None
        results.append(read_result(path))
    return results


def _facts(
    task: Task, scorer: Scorer, data: Any, origin: Mapping[str, Any], trained_on: Mapping[str, str]
) -> dict[str, Any]:
    """What identifies a result (`IDENTITY`)."""
    rows = task.row_files() or RowFiles("the data of the run", {})
    for name, digest in rows.sha256.items():
        if digest in trained_on:
            raise UserError(f"{task.name}: {name} is {trained_on[digest]}, which the model was trained on: use others")
    sha256 = rows.sha256 | (task.held_out(data) if task.reads_data else {})
    return {
        "task": task.name,
        "group": task.group,
        "version": task.version,
        "rows": {"where": rows.where, "sha256": sha256} if sha256 else None,
        "settings": task.settings,
        "tokenizer": scorer.tokenizer.name if scorer.tokenizer else None,
        "prefix": "eos" if scorer.prefix else "none",
        **({"document_mask": True} if scorer.lm.document_mask else {}),
        **origin,
    }


def _check_same(path: Path, facts: Mapping[str, Any]) -> None:
    """Refuse an existing result that has other settings than the requested one."""
    if not path.is_file():
        return
    there = read_result(path).content
    for key in IDENTITY:
        old, new = there.get(key), facts.get(key)
        if key == "rows" and old and new:  # the same files may lie elsewhere
            old, new = old["sha256"], new["sha256"]
        if old != new:
            raise UserError(f"{path} was measured with {key} {old}, not {new}: remove it, or set another --out")
