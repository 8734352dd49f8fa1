"""Conducts an exam: makes its runs in order and reports what went wrong."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue

import yaml

from seqarch.errors import UserError, one_line
from seqarch.exam.entrants import Entrant, Exam
from seqarch.exam.ladder import Runs, climb, say_rates
from seqarch.exam.records import difference, has_begun, locked, minutes_used, remember, remembered, reuse
from seqarch.exam.worker import PATIENCE, Work, Worker, share_cores
from seqarch.plugins import allow_flags
from seqarch.runs.files import refuse_links, write_text
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
        UserError: another exam writes into the folder, it holds runs of another exam, or this machine cannot run a
            model.
    """
    refuse_links(exam.folder, exam.folder.parent)
    exam.folder.mkdir(parents=True, exist_ok=True)
    workers = [Worker(work, each, share_cores(gpus)) for each in gpus]
    failed: dict[str, str] = {}
    with locked(exam.folder / ".lock", f"writes into {exam.folder}"):
        try:
            _try_out(exam, workers[0])
            if exam.ladder:
                exam, failed = climb(exam, lambda runs: _make_runs(exam, runs, workers, progress))
                say_rates(exam)
            ready = [entrant for entrant in exam.entrants if not exam.ladder or entrant.name in exam.rungs]
            runs = [(entrant, seed) for seed in range(exam.seeds) for entrant in ready]
            if exam.neighbour is not None:
                runs.insert(len(ready), (exam.neighbour, 0))
            failed |= _make_runs(exam, runs, workers, progress)
        finally:
            for worker in workers:
                worker.close()
    return exam, failed


def _try_out(exam: Exam, worker: Worker) -> None:
    """Refuse a model that is still to train and takes no step on this machine, before any is trained."""
    for entrant in exam.entrants:
        runs = {exam.run(entrant, seed): exam.key(entrant, seed) for seed in range(exam.seeds)}
        if all(is_finished(run) or (entrant.remembered and remembered(run, key)) for run, key in runs.items()):
            continue
        try:
            worker.fit({"recipe": dict(entrant.recipe), "allow_code": exam.allow_code})
        except UserError as error:
            raise UserError(f"{entrant.name} cannot be trained here: {error}") from error
    worker.close()  # its kernels are tuned for one sequence


def _make_runs(exam: Exam, runs: Runs, workers: Sequence[Worker], progress: bool) -> dict[str, str]:
    for entrant, seed in runs:
        _check_folder(exam, entrant, seed)
    for entrant, _ in runs:
        write_text(exam.folder / entrant.name / "recipe.yaml", yaml.safe_dump(dict(entrant.recipe), sort_keys=False))
    failed: dict[str, str] = {}
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def make(number: int, entrant: Entrant, seed: int) -> None:
        head = f"[{number}/{len(runs)}] {entrant.name}, seed {seed}:"
        worker = idle.get()
        try:
            print(f"{head} {_make_run(exam, entrant, seed, worker, progress)}", flush=True)
        except UserError as error:
            failed[str(exam.run(entrant, seed))] = why = one_line(error)
            print(f"{head} failed: {why}", flush=True)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(len(workers)) as threads:
        made = [threads.submit(make, number, *run) for number, run in enumerate(runs, start=1)]
        try:
            wait(made)
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.stop()
            wait([run for run in made if not run.cancelled()], PATIENCE)
            for worker in workers:
                worker.close()
            raise
    for each in made:
        each.result()
    return failed


def _make_run(exam: Exam, entrant: Entrant, seed: int, worker: Worker, progress: bool) -> str:
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
    args += allow_flags(exam.allow_code)
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


def _check_folder(exam: Exam, entrant: Entrant, seed: int) -> None:
    """Refuse a run of another exam in the folder, unless it never took a step."""
    run = exam.run(entrant, seed)
    if not run.exists():
        return
    before, now = read_note(run).get("fingerprint"), exam.key(entrant, seed)
    if before == now or (before and not has_begun(run)):
        return
    reason = difference(before, now) if before else f"it has no {EXAM_NOTE}"
    raise UserError(f"{run} is not a run of this exam, {reason}: choose another --out, or delete that folder")
