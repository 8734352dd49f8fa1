"""Records of runs: what a report needs of finished models comes back from the archives, byte by byte."""

import json
import runpy
from pathlib import Path

import pytest

RECORDS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/exam_records.py"))
PACK, UNPACK = RECORDS["pack"], RECORDS["unpack"]


def run_folder(path: Path, status: str) -> Path:
    (path / "evaluations").mkdir(parents=True)
    (path / "checkpoints").mkdir()
    (path / "tensorboard").mkdir()
    (path / "run.json").write_text(json.dumps({"status": status, "name": path.parent.name}))
    (path / "config.yaml").write_text("seed_everything: 0\n")
    (path / "curves.csv").write_text(f"step,tokens\n1,{len(str(path))}\n")
    (path / "evaluations/step_00000001.npz").write_bytes(b"losses")
    (path / "checkpoints/step_00000001.ckpt").write_bytes(b"weights")
    (path / "tensorboard/events").write_bytes(b"events")
    return path


@pytest.fixture
def exam(tmp_path):
    run_folder(run_folder(tmp_path / "exam/A/seed_0", "finished") / "branches/step_00000001", "finished")
    run_folder(run_folder(tmp_path / "exam/B/seed_1", "running") / "branches/step_00000001", "finished")
    run_folder(tmp_path / "exam/C/seed_0", "running")
    return tmp_path / "exam"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_finished_models_come_back_without_checkpoints_and_events(exam, tmp_path):
    archives = PACK(exam, tmp_path / "records")
    assert [path.name for path in archives] == ["A-seed_0.tar.xz", "B-seed_1.tar.xz"]
    UNPACK(tmp_path / "records", tmp_path / "back")
    left = {name: data for name, data in contents(exam).items() if not name.startswith("C/")}
    kept = {name: data for name, data in left.items() if "checkpoints" not in name and "tensorboard" not in name}
    assert contents(tmp_path / "back") == kept
    assert len(kept) == 16


def test_the_same_runs_give_the_same_bytes(exam, tmp_path):
    first = [path.read_bytes() for path in PACK(exam, tmp_path / "records")]
    UNPACK(tmp_path / "records", tmp_path / "back")
    assert [path.read_bytes() for path in PACK(tmp_path / "back", tmp_path / "again")] == first


def test_a_run_that_is_there_stays_as_it_is(exam, tmp_path):
    PACK(exam, tmp_path / "records")
    (exam / "A/seed_0/curves.csv").write_text("newer")
    assert UNPACK(tmp_path / "records", exam) == []
    assert (exam / "A/seed_0/curves.csv").read_text() == "newer"
