"""The line of an exam about its runs and the time that is left."""

import pytest

from seqarch.exam.progress import Ahead, Progress, shown
from seqarch.runs.record import write_note, write_record
from seqarch.tables import readable_time

RECIPE = {"trainer": {"max_steps": 100}, "model": {"decay_share": 0.2}, "branches": {"at": [0.5]}}


@pytest.fixture
def ahead(tmp_path):
    """Makes a run with curves up to a step, of 100 steps and a branch of 50 that leaves at step 40: 110 in all."""

    def make(name, step=0, minutes=None):
        run = Ahead(name, tmp_path / name, name.rstrip("0123456789"), RECIPE)
        train(run.folder, step)
        if minutes is not None:
            write_record(run.folder, {"status": "finished"})
            write_note(run.folder, minutes=minutes)
        return run

    return make


def train(run, step):
    run.mkdir(parents=True, exist_ok=True)
    (run / "curves.csv").write_text(f"step,tokens\n{step},{step}\n" if step else "")


def test_time_left_is_measured_from_the_first_steps_on(ahead):
    first, second = ahead("a0"), ahead("b0")
    progress = Progress([first, second], [], workers=1)
    assert progress.line(0) is None
    train(first.folder, 10)
    assert progress.line(100) is None  # what came before the first steps, such as a compilation, is no rate
    train(first.folder, 20)
    assert progress.line(120) == "a0 at 18%; 2 runs to finish, about 7 minutes left"  # (90 + 110) steps of 2 seconds
    assert progress.share == pytest.approx(20 / 220)
    train(first.folder / "branches/step_00000050", 45)
    train(first.folder, 40)
    assert first.done() == 45


def test_a_finished_run_tells_the_time_of_its_model_at_the_start(ahead):
    progress = Progress([ahead("a0", 100, minutes=11), ahead("a1"), ahead("b0", 100, minutes=110)], [ahead("b1")], 1)
    assert progress.line(0) == "starting; 2 runs to finish, about 2.0 hours left"
    assert (
        Progress(progress.runs, progress.later, workers=4).line(0)
        == "starting; 2 runs to finish, about 60 minutes left"
    )


def test_a_log_gets_the_line_and_not_twice(ahead, capsys, monkeypatch):
    monkeypatch.setattr("seqarch.exam.progress.EVERY", 0.01)
    progress = Progress([ahead("a0", 100, minutes=11), ahead("a1")], [], workers=1)
    with shown(progress):
        pass
    assert capsys.readouterr().out == "starting; 1 run to finish, about 11 minutes left\n"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.1, "1 seconds"), (89, "89 seconds"), (91, "2 minutes"), (5400, "1.5 hours")]
)
def test_readable_time(seconds, words):
    assert readable_time(seconds) == words
