"""The line of an exam about its runs and the time that is left."""

import time

import pytest

from seqarch.exam.progress import Progress, shown
from seqarch.runs.folder import write_record
from seqarch.tables import readable_time

RECIPE = {"trainer": {"max_steps": 100}, "model": {"decay_share": 0.2}, "branches": {"at": [0.5]}}


def train(run, step):
    run.mkdir(parents=True, exist_ok=True)
    (run / "curves.csv").write_text(f"step,tokens\n{step},{step}\n" if step else "")


@pytest.fixture
def runs(tmp_path):
    """Runs of 100 steps and a branch of 50 that leaves at step 40: 110 in all."""
    for name in ("a", "b"):
        train(tmp_path / name, 0)
    return {name: (tmp_path / name, RECIPE) for name in ("a", "b")}


def test_time_left_is_measured_from_the_first_steps_on(runs, tmp_path):
    progress = Progress(runs)
    assert progress.line(0) is None
    train(tmp_path / "a", 10)
    assert progress.line(100) is None  # what came before the first steps, such as a compilation, is no rate
    train(tmp_path / "a", 20)
    assert progress.line(120) == "a at 18%; runs to finish: 2, about 7 minutes left"  # (90 + 110) steps of 2 seconds
    assert progress.share == pytest.approx(20 / 220)
    train(tmp_path / "a/branches/step_00000050", 45)
    train(tmp_path / "a", 40)
    assert progress.line(140) == "a at 41%; runs to finish: 2, about 3 minutes left"  # 175 steps of 40 / 35 seconds
    assert progress.share == pytest.approx(45 / 220)


@pytest.mark.parametrize("end", [{"status": "finished"}, {"status": "failed", "diverged": True}])
def test_a_run_that_ended_has_no_steps_left(runs, tmp_path, end):
    progress = Progress(runs)
    train(tmp_path / "a", 10)
    assert progress.line(0) is None
    write_record(tmp_path / "a", end)
    assert progress.line(100) == "starting; runs to finish: 1, about 2 minutes left"


def test_without_runs_there_is_no_line():
    assert Progress({}).line(0) is None  # an exam whose ladders all failed


def test_a_log_gets_the_line_and_not_twice(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("seqarch.exam.progress.EVERY", 0.01)
    with shown(Progress(runs)):
        for step in (10, 50, 50, 51):
            train(tmp_path / "a", step)
            time.sleep(0.5)
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.1, "1 seconds"), (89, "89 seconds"), (91, "2 minutes"), (5400, "1.5 hours")]
)
def test_readable_time(seconds, words):
    assert readable_time(seconds) == words
