"""Tells how far the runs of an exam are and how long they still take."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from seqarch.errors import UserError, say
from seqarch.runs.curves import last_step
from seqarch.runs.folder import CURVES, branches, has_diverged, is_finished, step_of
from seqarch.tables import readable_time

SHARE = 0.05
"""A log gets a line whenever this share of all steps has been made since the last one."""
EVERY = 5.0
"""Seconds between two looks at the run folders."""


class Progress:
    """How far some runs are.

    Args:
        runs: run folders and recipes, by what the line calls the runs.
    """

    def __init__(self, runs: Mapping[str, tuple[Path, Mapping[str, Any]]]) -> None:
        self.runs = runs
        self.share = 0.0
        """Steps that are done over all steps."""
        self._first: tuple[float, float] | None = None
        """When the first steps were seen, and how many."""

    def line(self, now: float) -> str | None:
        """The line, `None` before anything is measured: the time left is as long as that of as many steps was."""
        steps = {name: _steps(recipe) for name, (_, recipe) in self.runs.items()}
        done = {name: _done(*run) for name, run in self.runs.items()}
        made, left = sum(done.values()), sum(steps.values()) - sum(done.values())
        self.share = made / max(1.0, sum(steps.values()))  # of no runs if every ladder failed
        if self._first is None or made <= self._first[1]:
            self._first = self._first or ((now, made) if made else None)
            return None
        seconds = left * (now - self._first[0]) / (made - self._first[1])
        at = [f"{name} at {each / steps[name]:.0%}" for name, each in done.items() if 0 < each < steps[name]]
        busy = sum(each < steps[name] for name, each in done.items())
        return f"{', '.join(at) or 'starting'}; runs to finish: {busy}, about {readable_time(seconds)} left"


def _steps(recipe: Mapping[str, Any]) -> float:
    """Steps of a run and of its branches, each from where it leaves."""
    share, at = recipe["model"].get("decay_share") or 0, (recipe.get("branches") or {}).get("at") or ()
    return recipe["trainer"]["max_steps"] * (1 + share * sum(at))


def _done(run: Path, recipe: Mapping[str, Any]) -> float:
    """The steps that a run has made so far; all of them if it diverged, since it makes no more."""
    if has_diverged(run) or (is_finished(run) and all(map(is_finished, branches(run)))):
        return _steps(recipe)
    share = 1 - (recipe["model"].get("decay_share") or 0)
    beyond = (max(0.0, last_step(branch / CURVES) - share * step_of(branch)) for branch in branches(run))
    return min(_steps(recipe), last_step(run / CURVES) + sum(beyond))


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
    last = 0.0
    while not ended.wait(EVERY):
        if (line := _line(progress)) and progress.share >= last + SHARE:
            last = progress.share
            say(line)


def _line(progress: Progress) -> str | None:
    try:
        return progress.line(time.time())
    except (OSError, UserError):  # a file that is being written; the run itself says what is damaged
        return None
