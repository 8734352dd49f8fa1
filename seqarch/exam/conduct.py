"""Conducts an exam: makes its runs in order and reports what went wrong."""

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue

import yaml

from seqarch.errors import UserError, one_line, say
from seqarch.exam.entrants import Entrant, Exam
from seqarch.exam.ladder import FACTORS, Runs, climb, rung_of, say_rates
from seqarch.exam.records import difference, has_begun, locked, minutes_used, remember, remembered, reuse
from seqarch.exam.worker import PATIENCE, Work, Worker, share_cores
from seqarch.plugins import allow_flags
from seqarch.runs.files import check_folder, write_text
from seqarch.runs.layout import CHECKPOINTS, EXAM_NOTE, branches
from seqarch.runs.record import is_finished, read_note, status, write_note


def conduct(
    exam: Exam, work: Work, *, gpus: Sequence[str | None] = (None,), progress: bool
) -> tuple[Exam, dict[str, str]]:
    """Make every missing run: the ladders, then seed by seed, the reference first.

    `gpus` holds the GPUs that each of the parallel training processes sees; `None` means all.

    Returns:
        The exam with the learning rates that the ladders chose, and what went wrong by run folder.

    Raises:
        UserError: another exam writes into the folder, it holds runs of another exam, or this machine cannot train
            some of the models, each of which is a note of the error.
    """
    check_folder(exam.folder, exam.folder.parent)
    exam.folder.mkdir(parents=True, exist_ok=True)
    workers = [Worker(work, each, share_cores(gpus)) for each in gpus]
    failed: dict[str, str] = {}
    with locked(exam.folder / ".lock", f"writes into {exam.folder}"):
        try:
            _check_folders(exam)
            _try_out(exam, workers)
            if exam.ladder:
                exam, failed = climb(exam, lambda runs: _make_runs(exam, runs, workers, progress))
                say_rates(exam)
            ready = [entrant for entrant in exam.entrants if not exam.ladder or entrant.name in exam.rungs]
            runs = [(entrant.of_seed(seed), seed) for seed in range(exam.seeds) for entrant in ready]
            if exam.neighbour is not None:
                runs.insert(len(ready), (exam.neighbour, 0))
            failed |= _make_runs(exam, runs, workers, progress)
        finally:
            for worker in workers:
                worker.close()
    return exam, failed


def _try_out(exam: Exam, workers: Sequence[Worker]) -> None:
    """Try out all models that are still to train; refuse those that this machine cannot train, before any is."""
    trials = {}
    for entrant in exam.entrants:
        runs = {exam.run(entrant, seed): exam.key(entrant, seed) for seed in range(exam.seeds)}
        if not all(is_finished(run) or (entrant.remembered and remembered(run, key)) for run, key in runs.items()):
            trials[f"{entrant.name}, trial"] = partial(_try, exam, entrant)
    if failed := _do_all(trials, workers):
        found = f"{len(failed)} of the {len(exam.entrants)} models cannot be trained here"
        error = UserError(f"{found}, and nothing was trained: correct what follows, or leave these models out")
        for trial, why in failed.items():
            error.add_note(f"{trial.removesuffix(', trial')}: {why}")
        raise error


def _try(exam: Exam, entrant: Entrant, worker: Worker) -> str:
    start = time.time()
    worker.fit({"recipe": dict(entrant.recipe), "allow_code": exam.allow_code})
    return f"passed after {time.time() - start:.1f} seconds"


def _make_runs(exam: Exam, runs: Runs, workers: Sequence[Worker], progress: bool) -> dict[str, str]:
    for entrant, seed in runs:
        _check_folder(exam, [entrant], seed)
    for entrant, _ in reversed(runs):  # at the best rate, which is that of the first seed
        write_text(exam.folder / entrant.name / "recipe.yaml", yaml.safe_dump(dict(entrant.recipe), sort_keys=False))
    named = {f"{entrant.name}, seed {seed}": (entrant, seed) for entrant, seed in runs}
    jobs = {name: partial(_make_run, exam, *run, progress=progress) for name, run in named.items()}
    return {str(exam.run(*named[name])): why for name, why in _do_all(jobs, workers).items()}


def _do_all(jobs: Mapping[str, Callable[[Worker], str]], workers: Sequence[Worker]) -> dict[str, str]:
    """Do each job with an idle worker and print what it says; return what went wrong, by the jobs' names."""
    failed: dict[str, str] = {}
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def do(number: int, name: str) -> None:
        head = f"[{number}/{len(jobs)}] {name}:"
        worker = idle.get()
        try:
            say(f"{head} {jobs[name](worker)}")
        except UserError as error:
            failed[name] = why = one_line(error)
            say(f"{head} failed: {why}")
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(len(workers))
    done = [threads.submit(do, number, name) for number, name in enumerate(jobs, start=1)]
    try:
        wait(done)
    except KeyboardInterrupt:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.stop()
        wait([job for job in done if not job.cancelled()], PATIENCE)
        raise
    for job in done:
        job.result()
    return failed


def _make_run(exam: Exam, entrant: Entrant, seed: int, worker: Worker, *, progress: bool) -> str:
    """Make one run, or find it; return what to print about it."""
    run, key = exam.run(entrant, seed), exam.key(entrant, seed)
    if is_finished(run):
        return "already finished"
    if entrant.remembered and status(run) == "missing" and (source := reuse(run, key)) is not None:
        return f"taken from {source}"
    if read_note(run).get("fingerprint", key) != key and not has_begun(run):
        shutil.rmtree(run)
    start = time.time() - 60 * minutes_used(run)
    write_note(run, fingerprint=key, start=start)
    args = [f"--config={run.parent / 'recipe.yaml'}", f"--seed_everything={seed}", f"--run_dir={run}"]
    args += [f"--model.learning_rate={entrant.rate!r}", *allow_flags(exam.allow_code)]
    if not progress:
        args.append("--trainer.enable_progress_bar=false")
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


def _check_folders(exam: Exam) -> None:
    """Refuse a run of another exam, also where the ladder has yet to choose a run's rate."""
    for entrant in exam.entrants:
        rungs = [rung_of(entrant, factor) for factor in FACTORS] if exam.ladder else []
        for rung in rungs:
            _check_folder(exam, [rung], 0)
        for seed in range(exam.seeds):
            _check_folder(exam, [entrant.at_rate(rung.rate) for rung in rungs] or [entrant], seed)


def _check_folder(exam: Exam, possible: Sequence[Entrant], seed: int) -> None:
    """Refuse a run of another exam in the folder, unless it never took a step."""
    run = exam.run(possible[0], seed)
    before, now = read_note(run).get("fingerprint"), [exam.key(entrant, seed) for entrant in possible]
    if not run.exists() or before in now or (before and not has_begun(run)):
        return
    reason = difference(before, now[0]) if before else f"it has no {EXAM_NOTE}"
    raise UserError(f"{run} is not a run of this exam, {reason}: choose another --out, or delete that folder")
