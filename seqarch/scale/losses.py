"""The losses of finished models of several sizes, from a CSV file or from run folders."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from seqarch.arguments import FILLED, SEED, Interval
from seqarch.errors import UserError, check_known, unknown
from seqarch.report import compare
from seqarch.report.costs import costs
from seqarch.report.runs import Group, Run, check_losses, load_run
from seqarch.runs.files import check_file
from seqarch.runs.tags import IN_DOMAIN
from seqarch.tables import read_csv, readable, write_csv

OOD, GAP, LOSS = "ood", "gap", "loss"
NATS = "nats per token"
"""The unit of all losses of runs."""
REQUIRED = ("model", "parameters", "tokens")
POSITIVE = Interval(0, ends="()")
LIMITS = dict.fromkeys(("parameters", "tokens", "tokens_per_second"), POSITIVE) | {"seed": SEED}
"""The limits of the numbers in a row; the loss and the learning rate have none."""


@dataclass(frozen=True)
class Point:
    """A finished model.

    Args:
        model: its name, the same at all sizes.
        rung: the size that it is compared at: models of one rung are compared with each other.
        parameters: all of them.
        tokens: its training tokens.
        seed: its run's.
        loss: nats per token, or another number of which the lowest is the best.
        learning_rate: its rate.
        tokens_per_second: the speed of its training.
    """

    model: str
    rung: str
    parameters: float
    tokens: float
    seed: int = 0
    loss: float = math.nan
    learning_rate: float = math.nan
    tokens_per_second: float = math.nan


def read_losses(path: Path, column: str | None = None) -> list[Point]:
    """The points of a CSV file with the columns model, parameters, tokens and that of the loss, by default `loss`.

    The columns `rung`, `seed`, `learning_rate` and `tokens_per_second` may be there too. Without `rung`, models of the
    same parameters are compared. The best of several learning rates counts.

    Raises:
        UserError: there is no such file or column, or a cell is not a number.
    """
    check_file(path)
    rows = read_csv(path)
    head = list(rows[0]) if rows else []
    column = column or next((each for each in (LOSS, IN_DOMAIN) if each in head), LOSS)
    columns = ", ".join(head) or "none: it has no rows"
    if missing := [name for name in (*REQUIRED, column) if name not in head]:
        raise UserError(f"{path} has no column {missing[0]!r}; its columns are {columns}")
    points = []
    for line, row in enumerate(rows, start=2):
        numbers: dict[str, Any] = {LOSS: _number(path, line, row, column)}
        for name in (*LIMITS, "learning_rate"):
            if row.get(name) or name in REQUIRED:
                numbers[name] = _number(path, line, row, name)
        for name, limit in LIMITS.items():
            limit.check(f"{path}, line {line}: {name}", numbers.get(name))
        FILLED.check(f"{path}, line {line}: model", row["model"])
        rung = row.get("rung") or readable(numbers["parameters"])
        points.append(Point(row["model"], rung, **numbers))
    return best_rates(points)


def _number(path: Path, line: int, row: dict[str, str], name: str) -> float:
    try:
        number = float(row[name])
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (name == "seed" and not number.is_integer()):
        kind = "whole number" if name == "seed" else "number"
        raise UserError(f"{path}, line {line}: {name} is {row[name]!r}, which is not a {kind}")
    return int(number) if name == "seed" else number


def best_rates(points: Iterable[Point]) -> list[Point]:
    """The points with, for each model, rung and seed, only the learning rate with the lowest loss at its last tokens.

    Raises:
        UserError: two points differ in nothing but their loss.
    """
    by_run: dict[tuple, dict[float, list[Point]]] = {}
    for point in points:
        rates = by_run.setdefault((point.model, point.rung, point.seed), {})
        own = rates.setdefault(point.learning_rate if math.isfinite(point.learning_rate) else 0.0, [])
        if any(each.tokens == point.tokens for each in own):
            where = f"seed {point.seed}, at rung {point.rung} after {readable(point.tokens)} tokens"
            raise UserError(f"two losses of {point.model}, {where}: leave one out, or give them learning_rates")
        own.append(point)
    last = {key: max(each.tokens for own in rates.values() for each in own) for key, rates in by_run.items()}
    kept = []
    for key, rates in by_run.items():
        ends = {each.learning_rate: each.loss for own in rates.values() for each in own if each.tokens == last[key]}
        best = min(ends, key=lambda rate: ends[rate])
        kept += sorted((rates[best if math.isfinite(best) else 0.0]), key=lambda each: each.tokens)
    return kept


def read_runs(folders: Sequence[Path], what: str = IN_DOMAIN, reference: str | None = None) -> list[Point]:
    """The points of run folders; models of one width are a rung.

    Args:
        folders: run folders with finished models.
        what: `in_domain`, `ood` (the mean), a domain, or `gap`, the gap to the reference at equal in-domain loss.
        reference: the name of the reference, for the gap and for the names of the rungs; by default the first run's.

    Raises:
        UserError: as `load_run` and `best_rates`; runs cannot be compared, one has no finished model, or there is no
            such domain.
    """
    runs = sorted(map(load_run, folders), key=_width)
    for run in runs:
        if not (run.facts.get("parameters") and (run.config.get("model") or {}).get("learning_rate")):
            raise UserError(f"{run.folder} lacks the parameters or the learning rate of its model: leave it out")
    check_losses([Group(run.name, [run]) for run in runs])
    reference = reference or load_run(folders[0]).name
    check_known("reference", reference, {run.name for run in runs})
    points = []
    for width, own in groupby(runs, key=_width):
        same = list(own)
        named = [run for run in same if run.name == reference]
        rung = readable(named[0].facts["parameters"]) if named else f"width {width}"
        points += _gaps(same, rung, reference) if what == GAP else _losses(same, rung, what)
    return best_rates(points)


def _width(run: Run) -> int:
    return int((run.config.get("model") or {}).get("d_model") or 0)


def _losses(runs: Sequence[Run], rung: str, what: str) -> list[Point]:
    """The finished models of some runs."""
    points = []
    for run in runs:
        models = run.finished_models()
        if models is None:
            raise UserError(f"{run.folder} has no finished model yet: finish it, or leave it out")
        losses = {IN_DOMAIN: models.in_domain, OOD: list(models.with_mean().values())[-1], **models.losses}
        if what not in losses:
            raise unknown("loss", what, [*losses, GAP])
        rate = float(run.config["model"]["learning_rate"])
        speed = costs(Group(run.name, [run])).tokens_per_second or math.nan
        for tokens, loss in zip(models.tokens.tolist(), losses[what].tolist(), strict=True):
            points.append(Point(run.name, rung, run.facts["parameters"], tokens, run.seed, loss, rate, speed))
    return points


def _gaps(runs: Sequence[Run], rung: str, reference: str) -> list[Point]:
    """The gaps of one rung at each budget; the reference's are zero."""
    findings = compare([run.folder for run in runs], reference).findings
    budgets: dict[float, None] = {}
    points = []
    for group in findings.others:
        for at in findings.finished[group.name].budgets if group.name in findings.finished else ():
            budgets[at.tokens] = None
            points.append(Point(group.name, rung, group.runs[0].facts["parameters"], at.tokens, loss=at.raw.value))
    size = findings.reference.runs[0].facts["parameters"]
    return [*(Point(reference, rung, size, tokens, loss=0.0) for tokens in budgets), *points]


def write_losses(path: Path, points: Sequence[Point]) -> Path:
    """Write points as the CSV file that `read_losses` takes."""
    names = [each.name for each in fields(Point)]
    rows = ([value if value == value else "" for value in (getattr(point, name) for name in names)] for point in points)
    return write_csv(path, names, rows)
