"""One line about the runs that are being made and the time that is left, in a terminal or in a log."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from seqarch.errors import UserError, say
from seqarch.exam.plan import Exam, Runs
from seqarch.runs.curves import last_step
from seqarch.runs.layout import CURVES, branches, step_of
from seqarch.runs.record import has_diverged, is_finished, read_note
from seqarch.tables import readable_time

SHARE = 0.05
"""A log gets a line whenever this share of all steps has been made since the last one."""
EVERY = 5.0
"""Seconds between two looks at the run folders."""


@dataclasses.dataclass
class Ahead:
    """A run that is to be made.

    Args:
        name: what the line calls it.
        folder: its run folder.
        model: the name of its model: seeds of one model take equally long.
        recipe: its recipe.
    """

    name: str
    folder: Path
    model: str
    recipe: Mapping[str, Any]
    _first: tuple[float, float] | None = None
    """When steps of it were first seen, and how many."""

    @property
    def steps(self) -> float:
        """Steps of the run and of its branches, each from where it leaves."""
        length, model = self.recipe["trainer"]["max_steps"], self.recipe["model"]
        return length * (1 + sum(self._at) * (model.get("decay_share") or 0))

    @property
    def _at(self) -> Sequence[float]:
        return (self.recipe.get("branches") or {}).get("at") or ()

    def done(self) -> float:
        """The steps that it has made so far; all of them if it diverged, since it makes no more."""
        if has_diverged(self.folder) or (is_finished(self.folder) and all(map(is_finished, branches(self.folder)))):
            return self.steps
        share = 1 - (self.recipe["model"].get("decay_share") or 0)
        beyond = (max(0.0, last_step(branch / CURVES) - share * step_of(branch)) for branch in branches(self.folder))
        return min(self.steps, last_step(self.folder / CURVES) + sum(beyond))

    def seconds_per_step(self, done: float, now: float) -> float | None:
        """What a step takes: measured since the first look, or by the note of a run that is finished."""
        if done >= self.steps and (minutes := read_note(self.folder).get("minutes")):
            return 60 * minutes / self.steps
        if self._first is None and done > 0:
            self._first = now, done
        if self._first is None or done <= self._first[1]:
            return None
        return (now - self._first[0]) / (done - self._first[1])


def ahead(exam: Exam, runs: Runs) -> list[Ahead]:
    """What is to be made of some runs, and those that are finished, which tell how long a model takes."""
    return [
        Ahead(
            name=f"{entrant.name}, seed {seed}",
            folder=exam.cached(entrant, seed) or exam.run(entrant, seed),
            model=entrant.name.partition("/")[0],  # a rung of the ladder has the name of its model before its own
            recipe=entrant.recipe,
        )
        for entrant, seed in runs
    ]


class Progress:
    """How far some runs are.

    Args:
        runs: those to make now.
        later: those that are made afterwards, in which a ladder's choices may still change something.
        workers: how many are made at a time.
    """

    def __init__(self, runs: Sequence[Ahead], later: Sequence[Ahead], workers: int) -> None:
        self.runs, self.later, self.workers = runs, later, workers
        self.share = 0.0
        """Steps that are done over all steps."""

    def line(self, now: float) -> str | None:
        """The line, `None` before anything is measured and after the last run."""
        runs = [*self.runs, *self.later]
        done = [run.done() for run in runs]
        left = [run.steps - steps for run, steps in zip(runs, done, strict=True)]
        self.share = sum(done) / sum(run.steps for run in runs)
        rates = {run.name: run.seconds_per_step(steps, now) for run, steps in zip(runs, done, strict=True)}
        measured = [rate for rate in rates.values() if rate is not None]
        if not measured or not sum(left[: len(self.runs)]):
            return None
        seconds = 0.0
        for run, steps in zip(runs, left, strict=True):
            alike = [rate for each in runs if each.model == run.model and (rate := rates[each.name]) is not None]
            seconds += steps * fmean(alike or measured)
        busy = sum(steps > 0 for steps in left)
        at = [
            f"{run.name} at {steps / run.steps:.0%}"
            for run, steps in zip(runs, done, strict=True)
            if 0 < steps < run.steps
        ]
        about = readable_time(seconds / max(1, min(self.workers, busy)))
        return f"{', '.join(at) or 'starting'}; {busy} run{'s' if busy > 1 else ''} to finish, about {about} left"


@contextlib.contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """Show the line while runs are made: kept up to date in a terminal, or in a log again after each `SHARE`."""
    console = Console()
    if console.is_terminal:
        line = lambda: Text(_line(progress) or "", overflow="ellipsis", no_wrap=True)  # noqa: E731
        with Live(console=console, transient=True, refresh_per_second=1 / EVERY, get_renderable=line):
            yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_tell, args=(progress, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(progress: Progress, ended: threading.Event) -> None:
    last = -SHARE
    while True:
        if (line := _line(progress)) and progress.share >= last + SHARE:
            last = progress.share
            say(line)
        if ended.wait(EVERY):
            return


def _line(progress: Progress) -> str | None:
    try:
        return progress.line(time.time())
    except (OSError, UserError):  # a file that is being written; the run itself says what is damaged
        return None
