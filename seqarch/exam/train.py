"""Trains the models of an exam: a trial of each, the learning-rate ladder, then seed by seed, the reference first.

The ladder gives each model its own best rate. A rate is judged by the loss on the in-domain hold-out after the smallest
budget, never by an OOD loss. A run of that budget is what the shortest branch of a whole run would be. The rates are
multiples of the size's rate (`FACTORS`), from the middle on. While the best of them lies at an end, the next one beyond
it is tried too.

One run of one seed does not tell near rates apart. Where others come within `NEAR` of the best, the seeds take these
rates in turn, so that the interval over seeds covers the choice of the rate.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import yaml

from seqarch.errors import UserError, refused, say
from seqarch.exam.plan import Entrant, Exam, Rung, Runs, has_begun, minutes_used, remember, reuse, rung_of
from seqarch.exam.pool import Pool, Worker
from seqarch.exam.progress import Progress, shown
from seqarch.plugins import allow_flags
from seqarch.runs import tags
from seqarch.runs.curves import read_curves
from seqarch.runs.files import check_folder, locked, write_text
from seqarch.runs.folder import CHECKPOINTS, CURVES, branches, has_diverged, is_finished, read_note, status, write_note

FIRST = (1.0, 1.5, 2.2)
"""Multiples of the size's rate."""
FACTORS = (*(2 / 3 / 1.5**n for n in range(8, -1, -1)), *FIRST, *(3.3 * 1.5**n for n in range(7)))
"""All that a ladder may come to: it ends with the first factor above 30, or below one over 30."""
NEAR = 0.012
"""Nats of in-domain loss by which the same model, rate and seed differed between two runs of the smallest budget."""


def train(exam: Exam, pool: Pool) -> tuple[Exam, dict[str, str]]:
    """Make every missing run.

    Args:
        exam: the plan; where there is a ladder, all models have the size's learning rate.
        pool: the processes that train.

    Returns:
        The exam with the learning rates that the ladders chose, and what went wrong by run folder.

    Raises:
        UserError: another exam writes into the folder, it holds runs of another exam, or this machine cannot train
            some of the models, each of which is a note of the error.
    """
    check_folder(exam.folder, exam.folder.parent)
    exam.folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    refusal = f"another exam writes into {exam.folder}: wait for it, or choose another --out"
    with locked(exam.folder / ".lock", refusal):
        exam.check_folders(FACTORS if exam.ladder else ())
        _try_out(exam, pool)
        if exam.ladder:
            later = [(entrant, seed) for seed in range(exam.seeds) for entrant in exam.entrants]
            exam, failed = climb(exam, lambda runs: _make_runs(exam, runs, pool, later))
            say_rates(exam)
        ready = [entrant for entrant in exam.entrants if not exam.ladder or entrant.name in exam.rungs]
        runs = [(entrant.for_seed(seed), seed) for entrant, seed in exam.runs(ready)]
        if exam.neighbour is not None:
            runs.insert(len(ready), (exam.neighbour, 0))
        failed |= _make_runs(exam, runs, pool)
    return exam, failed


def check_all_finished(failed: Mapping[str, str]) -> None:
    """Raise `UserError` for what `train` says went wrong."""
    if failed:
        first, why = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(f"{first}{more} not finished ({why}); the same command makes the missing runs")


def _try_out(exam: Exam, pool: Pool) -> None:
    """Try out all models that are still to train; refuse those that this machine cannot train, before any is."""
    trials = {}
    for entrant in exam.entrants:
        if not all(is_finished(exam.run(entrant, seed)) or exam.cached(entrant, seed) for seed in range(exam.seeds)):
            trials[f"{entrant.name}, trial"] = partial(_try, exam, entrant)
    if failed := pool.do(trials):
        error = UserError(f"{len(failed)} of {len(exam.entrants)} models cannot be trained here: correct or omit them")
        for trial, why in failed.items():
            error.add_note(f"{trial.removesuffix(', trial')}: {why}")
        raise error


def _try(exam: Exam, entrant: Entrant, worker: Worker) -> str:
    start = time.time()
    worker.fit({"recipe": dict(entrant.recipe), "allow_code": exam.allow_code})
    return f"passed after {time.time() - start:.1f} seconds"


def _make_runs(exam: Exam, runs: Runs, pool: Pool, later: Runs = ()) -> dict[str, str]:
    for entrant, seed in runs:
        exam.check_folder([entrant], seed)
    for entrant, _ in reversed(runs):  # at the best rate, which is that of the first seed
        write_text(exam.folder / entrant.name / "recipe.yaml", yaml.safe_dump(dict(entrant.recipe), sort_keys=False))
    named = {f"{entrant.name}, seed {seed}": (entrant, seed) for entrant, seed in [*runs, *later]}
    jobs = {name: partial(_make_run, exam, *named[name]) for name in [*named][: len(runs)]}
    folders = {name: (exam.cached(*run) or exam.run(*run), run[0].recipe) for name, run in named.items()}
    with shown(Progress(folders)):
        failed = pool.do(jobs)
    return {str(exam.run(*named[name])): why for name, why in failed.items()}


def _make_run(exam: Exam, entrant: Entrant, seed: int, worker: Worker) -> str:
    """Make one run, or find it; return what to print about it."""
    run, key = exam.run(entrant, seed), exam.key(entrant, seed)
    if is_finished(run):
        return "already finished"
    if (source := exam.cached(entrant, seed)) is not None:
        reuse(run, source)
        return f"taken from {source}"
    if read_note(run).get("fingerprint", key) != key and not has_begun(run):
        shutil.rmtree(run)
    before = minutes_used(run)
    start = time.time() - 60 * before
    write_note(run, fingerprint=key, minutes=before or None, start=start)
    args = [
        f"--config={run.parent / 'recipe.yaml'}",
        f"--seed_everything={seed}",
        f"--run_dir={run}",
        "--trainer.enable_progress_bar=false",
    ]
    args += [f"--model.learning_rate={entrant.rate!r}", *allow_flags(exam.allow_code)]
    try:
        worker.fit(args)
    finally:
        minutes = (time.time() - start) / 60
        with contextlib.suppress(OSError):  # on a full disk, report the run's own error
            write_note(run, minutes=round(minutes, 3), start=None)
    if not is_finished(run):
        raise UserError(f"it stopped before its last step (status {status(run)}); the same command resumes it")
    for folder in (run, *branches(run)):  # 0.5 GB each at size small, and no verdict needs them
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    if entrant.remembered:
        remember(run, key)
    return f"finished after {minutes:.1f} minutes"


def climb(exam: Exam, make: Callable[[Runs], Mapping[str, str]]) -> tuple[Exam, dict[str, str]]:
    """The exam with each model at its best rate, and what went wrong by run folder.

    The models come with the size's rate. If a rung failed for another reason than its rate, its model keeps no rate and
    has no rungs. `make` makes runs and returns what went wrong by run folder.
    """
    ladders: dict[str, dict[float, Rung]] = {entrant.name: {} for entrant in exam.entrants}
    failed: dict[str, str] = {}
    coming = [(entrant, factor) for entrant in exam.entrants for factor in FIRST]
    while coming:
        rungs = [rung_of(entrant, factor) for entrant, factor in coming]
        errors = make([(rung, 0) for rung in rungs if not _diverged_before(exam, rung)])
        for (entrant, factor), rung in zip(coming, rungs, strict=True):
            run = exam.run(rung, 0)
            if is_finished(run):
                ladders[entrant.name][factor] = Rung(factor, rung.rate, *_last_losses(run))
            elif has_diverged(run):
                ladders[entrant.name][factor] = Rung(factor, rung.rate, math.inf, math.inf)
            else:
                failed[str(run)] = errors.get(str(run), "")
        climbing = [entrant for entrant in exam.entrants if not _has_failed(exam, entrant, failed)]
        coming = [(entrant, factor) for entrant in climbing if (factor := _beyond(ladders[entrant.name])) is not None]
    return _at_best_rates(exam, ladders, failed), failed


def _diverged_before(exam: Exam, rung: Entrant) -> bool:
    """Whether the same run has diverged; without a step it may be another exam's."""
    run = exam.run(rung, 0)
    return has_diverged(run) and read_note(run).get("fingerprint") == exam.key(rung, 0)


def _last_losses(run: Path) -> tuple[float, float]:
    """The last in-domain loss of a run, and the last mean loss on its OOD domains or, without any, its hold-outs."""
    curves, *_ = read_curves(run / CURVES)
    role = tags.OOD if tags.domains(curves, tags.OOD) else tags.IN_DOMAIN
    with refused(f"{run / CURVES} lacks a last loss: remove {run}", KeyError, IndexError, ValueError):
        compared = [float(curves[tags.loss(role, domain)].value[-1]) for domain in tags.domains(curves, role)]
        return float(curves[tags.loss(tags.IN_DOMAIN)].value[-1]), fmean(compared)


def _has_failed(exam: Exam, entrant: Entrant, failed: Mapping[str, str]) -> bool:
    return any(run.startswith(f"{exam.folder / entrant.name}/") for run in failed)


def _beyond(ladder: Mapping[float, Rung]) -> float | None:
    """The next factor to try, `None` where the best lies between two others or the ladder is as wide as may be."""
    at = FACTORS.index(_best(ladder))
    return next((factor for factor in FACTORS[max(at - 1, 0) : at + 2] if factor not in ladder), None)


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
    candidates = [chosen.get(entrant.name, entrant) for entrant in exam.candidates]
    return replace(exam, reference=reference or exam.reference, candidates=candidates, rungs=rungs, neighbour=neighbour)


def say_rates(exam: Exam) -> None:
    """Print the ladder of each model."""
    for entrant in exam.entrants:
        if rungs := exam.rungs.get(entrant.name):
            losses = ", ".join(f"{rung.rate:g} ({rung.in_domain:.3f})" for rung in rungs)
            rates = ", ".join(f"{rate:g}" for rate in entrant.rates)
            turns = "s in turn" if len(entrant.rates) > 1 else ""
            say(f"{entrant.name}: learning rate{turns} {rates}; in-domain loss by rate: {losses}")
