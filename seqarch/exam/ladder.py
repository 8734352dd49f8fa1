"""The learning-rate ladder: each model of an exam at its own best rate.

A rate is judged by the loss on the in-domain hold-out after the smallest budget, never by an OOD loss. A run of that
budget is what the shortest branch of a whole run would be. The rates are multiples of the size's rate (`FACTORS`), from
the middle on. While the best of them lies at an end, the next one beyond it is tried too.

One run of one seed does not tell near rates apart. Where others come within `NEAR` of the best, the seeds take these
rates in turn, so that the interval over seeds covers the choice of the rate.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from seqarch.errors import say
from seqarch.exam.entrants import Entrant, Exam, Rung
from seqarch.report.runs import load_run
from seqarch.runs.record import has_diverged, is_finished

FIRST = (1.0, 1.5, 2.2)
"""Multiples of the size's rate."""
FACTORS = (*(2 / 3 / 1.5**n for n in range(8, -1, -1)), *FIRST, *(3.3 * 1.5**n for n in range(7)))
"""All that a ladder may come to: it ends with the first factor above 30, or below one over 30."""
NEAR = 0.012
"""Nats of in-domain loss by which the same model, rate and seed differed between two runs of the smallest budget."""

Runs = Sequence[tuple[Entrant, int]]
"""Models, each with a seed."""


def climb(exam: Exam, make: Callable[[Runs], Mapping[str, str]]) -> tuple[Exam, dict[str, str]]:
    """The exam with each model at its best rate, and what went wrong by run folder.

    The models come with the size's rate. If a rung failed for another reason than its rate, its model keeps no rate and
    has no rungs. `make` makes runs and returns what went wrong by run folder.
    """
    ladders: dict[str, dict[float, Rung]] = {entrant.name: {} for entrant in exam.entrants}
    failed: dict[str, str] = {}
    asked = [(entrant, factor) for entrant in exam.entrants for factor in FIRST]
    while asked:
        said = make([(rung_of(entrant, factor), 0) for entrant, factor in asked])
        for entrant, factor in asked:
            rung = rung_of(entrant, factor)
            run = exam.run(rung, 0)
            if is_finished(run):
                points = load_run(run).evaluations
                compared = float(list(points.with_mean().values())[-1][-1])
                ladders[entrant.name][factor] = Rung(factor, rung.rate, float(points.in_domain[-1]), compared)
            elif has_diverged(run):
                ladders[entrant.name][factor] = Rung(factor, rung.rate, math.inf, math.inf)
            else:
                failed[str(run)] = said.get(str(run), "")
        climbing = [entrant for entrant in exam.entrants if not _has_failed(exam, entrant, failed)]
        asked = [(entrant, factor) for entrant in climbing if (factor := _beyond(ladders[entrant.name])) is not None]
    return _at_best_rates(exam, ladders, failed), failed


def _has_failed(exam: Exam, entrant: Entrant, failed: Mapping[str, str]) -> bool:
    return any(run.startswith(f"{exam.folder / entrant.name}/") for run in failed)


def rung_of(entrant: Entrant, factor: float) -> Entrant:
    """A model at a multiple of its rate, for the steps of its shortest branch."""
    rate = float(f"{factor * entrant.rate:.3g}")
    recipe: dict[str, Any] = dict(entrant.at_rate(rate).recipe)
    steps = round(min(recipe["branches"]["at"]) * recipe["trainer"]["max_steps"])
    recipe["trainer"] = {**recipe["trainer"], "max_steps": steps}
    recipe["branches"] = {**recipe["branches"], "at": []}
    recipe["ood_loss"] = {**(recipe.get("ood_loss") or {}), "at": [1.0]}
    recipe["attention_entropy"] = {"every_n_steps": 0}
    return replace(entrant, name=f"{entrant.name}/ladder/rate_{rate:.2e}", recipe=recipe)


def _beyond(ladder: Mapping[float, Rung]) -> float | None:
    """The next factor to try, `None` where the best lies between two others or the ladder is as wide as may be."""
    at = FACTORS.index(_best(ladder))
    return next((each for each in FACTORS[max(at - 1, 0) : at + 2] if each not in ladder), None)


def _best(ladder: Mapping[float, Rung]) -> float:
    return min(sorted(ladder), key=lambda factor: ladder[factor].in_domain)


def _at_best_rates(exam: Exam, ladders: Mapping[str, Mapping[float, Rung]], failed: dict[str, str]) -> Exam:
    """The exam with the models that have a best rate at it, and the reference at the rate next to its best."""
    chosen = {}
    for entrant in exam.entrants:
        ladder = ladders[entrant.name]
        if _has_failed(exam, entrant, failed):
            continue
        if math.isinf((best := ladder[_best(ladder)]).in_domain):
            failed[str(exam.folder / entrant.name)] = f"it diverged at every rate down to {best.rate:g}"
            continue
        order = sorted(ladder.values(), key=lambda rung: (rung.in_domain, rung.rate))
        near = tuple(rung.rate for rung in order if rung.in_domain <= best.in_domain + NEAR)
        chosen[entrant.name] = replace(entrant.at_rate(best.rate), near_best=near)
    rungs = {name: sorted(ladders[name].values(), key=lambda rung: rung.rate) for name in chosen}
    neighbour = None
    if reference := chosen.get(exam.reference.name):
        tried = rungs[reference.name]
        at = [rung.rate for rung in tried].index(reference.rate)
        rate = min(tried[max(at - 1, 0) : at] + tried[at + 1 : at + 2], key=lambda rung: rung.in_domain).rate
        neighbour = replace(reference.at_rate(rate), near_best=(), name=f"{reference.name}-learning_rate={rate:g}")
    candidates = [chosen.get(each.name, each) for each in exam.candidates]
    return replace(exam, reference=reference or exam.reference, candidates=candidates, rungs=rungs, neighbour=neighbour)


def say_rates(exam: Exam) -> None:
    """Print the ladder of each model."""
    for entrant in exam.entrants:
        if rungs := exam.rungs.get(entrant.name):
            losses = ", ".join(f"{rung.rate:g} ({rung.in_domain:.3f})" for rung in rungs)
            rates = ", ".join(f"{rate:g}" for rate in entrant.rates)
            turns = "s in turn" if len(entrant.rates) > 1 else ""
            say(f"{entrant.name}: learning rate{turns} {rates}; in-domain loss by rate: {losses}")
