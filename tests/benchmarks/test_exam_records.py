"""Records of an exam's runs come back from archives byte by byte; a script tabulates finished models and their gaps."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.budget_tables import compared, ranks, until
from benchmarks.exam_records import pack, unpack
from seqarch.errors import UserError
from seqarch.report.gap import FinishedModels
from seqarch.tables import read_csv
from tests.report.runs_for_tests import write_branched, write_run
from tests.report.test_gap import TOKENS, shifted

SCRIPT = Path(__file__).parents[2] / "benchmarks/budget_tables.py"


@pytest.fixture
def tabulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the script on an exam's folder."""

    def run(exam: Path, out: Path, *options: str) -> None:
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, str(exam), str(out), "--reference", "base", *options])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return run


def write_exam(exam: Path, branches: tuple[int, ...]) -> None:
    """Two models, of which one has OOD losses 0.2 above the other's."""
    for name, above in (("base", 0.0), ("other", 0.2)):
        write_branched(exam / name / "seed_0", name, branches, gap=above, noise=0.0)
        write_run(exam / name / "ladder/rate_1.00e-03/seed_0", "rate_1.00e-03", steps=100)
    for config in exam.rglob("config.yaml"):
        config.write_text("model: {d_model: 8, learning_rate: 0.001}\n")


def test_finished_models_and_their_gaps(tmp_path: Path, tabulate: Callable[..., None]) -> None:
    write_exam(tmp_path / "small", (100, 200))
    out = tmp_path / "tables"
    tabulate(tmp_path / "small", out)
    tokens = [row["tokens"] for row in read_csv(out / "losses.csv") if row["model"] == "other"]
    assert tokens == [str(steps * 4096) for steps in (100, 200, 400)]
    rungs = [(row["model"], row["rate"]) for row in read_csv(out / "ladder.csv")]
    assert rungs == [("base", "1.00e-03"), ("other", "1.00e-03")]
    gaps = {row["domain"]: float(row["gap"]) for row in read_csv(out / "gaps.csv") if row["tokens"] == tokens[-1]}
    assert gaps["code"] == pytest.approx(0.2, abs=2e-3)
    assert gaps["mean"] == pytest.approx(0.23, abs=2e-3)  # code 0.2, legal 0.26
    found = [(row["earlier"], row["later"], row["same_sign"]) for row in read_csv(out / "ranks.csv")]
    assert found == [(earlier, tokens[-1], "1") for earlier in tokens[:2]]
    assert all((out / f"{name}.png").is_file() for name in ("budgets", "scatter"))


def test_some_domains_where_others_have_other_hold_outs(tmp_path: Path, tabulate: Callable[..., None]) -> None:
    write_exam(tmp_path / "small", (100,))
    for path in tmp_path.glob("small/other/**/run.json"):
        entropies = {"docs": 3.125, "code": 3.0, "legal": 3.2}
        path.write_text(json.dumps({**json.loads(path.read_text()), "unigram_entropy": entropies}))
    for path in tmp_path.glob("small/base/**/run.json"):
        entropies = {"docs": 3.125, "code": 3.0, "legal": 3.0}
        path.write_text(json.dumps({**json.loads(path.read_text()), "unigram_entropy": entropies}))
    with pytest.raises(UserError, match=r"differ in unigram entropy of the hold-out of legal.*set --domains"):
        tabulate(tmp_path / "small", tmp_path / "out")
    tabulate(tmp_path / "small", tmp_path / "out", "--domains", "code")
    assert "legal" not in {row["domain"] for row in read_csv(tmp_path / "out/gaps.csv")}


def test_ranks_count_the_reference_as_zero_and_leave_models_out() -> None:
    gaps = {1: {"a": 0.2, "b": -0.1, "c": 0.1}, 2: {"a": 0.2, "b": 0.1, "c": -0.1, "new": 3.0}}
    gaps[1]["base-rate=2"] = gaps[2]["base-rate=2"] = -9.0
    rows = [
        {"run": run, "tokens": str(tokens), "domain": domain, "gap": str(gap * (domain == "mean"))}
        for tokens, found in gaps.items()
        for run, gap in found.items()
        for domain in ("docs", "mean")
    ]
    # a 0.2, c 0.1, base 0, b -0.1 become a, b, base, c: b and c change places, so 1 - 6 * (2² + 2²) / (4 * 15)
    assert list(ranks(rows, ["base-*"])) == [(1, 2, 3, "0.2000", 1)]


def test_models_without_a_gap_and_those_left_out_are_not_compared() -> None:
    gaps = [{"run": run, "tokens": tokens} for run, tokens in (("a", "1"), ("a", "2"), ("base-3e-3", "1"), ("c", ""))]
    assert compared(gaps, ["base-*"]) == {"a"}


def test_models_of_larger_budgets_do_not_unsettle_a_smaller_one() -> None:
    steady, moved = shifted(np.array([0.4, 0.3, 0.3, 0.3])), shifted(np.array([0.4, 0.3, 0.3, 0.9]))
    candidates = {"it": {0: steady, 1: steady, 2: moved}}
    models = FinishedModels(candidates, dict.fromkeys(range(3), shifted(0.0)), of_reference={int(TOKENS[2]): 2.0})
    assert not models.gaps()["it"].settled
    found = until(models, int(TOKENS[2])).gaps()["it"]
    assert (found.word, found.headline.tokens) == ("worse", TOKENS[2])


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
    archives = pack(exam, tmp_path / "records")
    assert [path.name for path in archives] == ["A-seed_0.tar.xz", "B-seed_1.tar.xz"]
    unpack(tmp_path / "records", tmp_path / "back")
    left = {name: data for name, data in contents(exam).items() if not name.startswith("C/")}
    kept = {name: data for name, data in left.items() if "checkpoints" not in name and "tensorboard" not in name}
    assert contents(tmp_path / "back") == kept
    assert len(kept) == 16


def test_the_same_runs_give_the_same_bytes(exam, tmp_path):
    first = [path.read_bytes() for path in pack(exam, tmp_path / "records")]
    unpack(tmp_path / "records", tmp_path / "back")
    assert [path.read_bytes() for path in pack(tmp_path / "back", tmp_path / "again")] == first


def test_a_run_that_is_there_stays_as_it_is(exam, tmp_path):
    pack(exam, tmp_path / "records")
    (exam / "A/seed_0/curves.csv").write_text("newer")
    assert unpack(tmp_path / "records", exam) == []
    assert (exam / "A/seed_0/curves.csv").read_text() == "newer"
