"""A damaged file of a run folder gives one line. It names the file and says what is still usable."""

import json
import shutil

import pytest

from seqarch.errors import UserError
from seqarch.report import load_run
from seqarch.runs.curves import read_curves, read_rows
from seqarch.runs.folder import checkpoint_path, read_config, read_note, read_record, write_note
from seqarch.training.curves import CurvesLogger
from seqarch.training.run_folder import check_same_run
from tests.report.runs_for_tests import write_run

CHECKPOINT = "checkpoints/step_00000100.ckpt (its weights)"
BINARY = b"\x80\x02\xff\x00"


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "a", "a", steps=100)
    for step in (50, 100):
        checkpoint_path(folder, step).parent.mkdir(exist_ok=True)
        checkpoint_path(folder, step).touch()
    (folder / "tensorboard").mkdir()
    return folder


def refusal(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


@pytest.mark.parametrize("damage", [cut, lambda path: path.write_bytes(BINARY), lambda path: path.write_bytes(b"")])
def test_a_damaged_record(run, damage):
    damage(run / "run.json")
    said = refusal(load_run, run)
    assert said.startswith(refusal(read_record, run))
    assert said.startswith(str(run / "run.json"))
    assert said.endswith(f"; still usable of this run: curves.csv (its scalars) and {CHECKPOINT}")
    assert read_curves(run / "curves.csv")[1] == 100  # as the message says


@pytest.mark.parametrize("content", [BINARY, b"", b"model: {d_mod", b"model:\n  a: 1\n - b"])
def test_a_damaged_configuration(run, content):
    (run / "config.yaml").write_bytes(content)
    for read, args in ((read_config, ()), (load_run, ()), (check_same_run, ({},))):
        assert refusal(read, run, *args).startswith(str(run / "config.yaml"))
    assert refusal(load_run, run).endswith(f"; still usable of this run: curves.csv (its scalars) and {CHECKPOINT}")


def test_damaged_curves(run):
    path = run / "curves.csv"
    for damage in (cut, lambda path: path.write_bytes(BINARY), lambda path: path.write_bytes(b"")):
        whole = path.read_bytes()
        damage(path)
        said = refusal(load_run, run)
        assert said.startswith(str(path))
        assert said.endswith(f"; still usable of this run: tensorboard (its scalars) and {CHECKPOINT}")
        path.write_bytes(whole)
    shutil.rmtree(run / "tensorboard")
    shutil.rmtree(run / "checkpoints")
    path.write_bytes(BINARY)
    assert refusal(load_run, run).endswith("; still usable of this run: nothing")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (BINARY, "curves.csv is not UTF-8 text"),
        (b"tokens\n1\n", "curves.csv:1: expected columns step, tokens"),
        (b"step,tokens\n0,0\n1,x\n", "curves.csv:3: could not convert string to float: 'x'"),
        (b"step,tokens\n0,0\n1\n2,0\n", "curves.csv:3: 1 cells where the header has 2 columns"),
    ],
)
def test_a_run_does_not_go_on_with_damaged_curves(run, content, expected):
    (run / "curves.csv").write_bytes(content)
    assert expected in refusal(CurvesLogger, run / "curves.csv")


def test_half_a_last_line_is_no_damage_to_a_run_that_goes_on(run):
    cut(run / "curves.csv")
    header, rows = read_rows(run / "curves.csv")
    assert header[:2] == ["step", "tokens"]
    assert [int(row["step"]) for row in rows] == list(range(4, 4 * len(rows) + 1, 4))
    assert 0 < len(rows) < 25


def test_a_damaged_note_of_an_exam(run):
    assert read_note(run) == {}
    write_note(run, minutes=4.0)
    write_note(run, start=None)
    assert json.loads((run / "exam.json").read_text()) == {"minutes": 4.0, "start": None}
    for key, value in (("start", "x"), ("minutes", 10**400), ("fingerprint", 3)):
        (run / "exam.json").write_text(json.dumps({key: value}))
        assert f"exam.json is not a note of an exam: '{key}' is" in refusal(read_note, run)
    (run / "exam.json").write_text('{\n"a')
    assert refusal(read_note, run).startswith(f"{run / 'exam.json'}:2: is not JSON")
