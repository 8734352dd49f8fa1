"""A verdict takes its interval from all models of the exam, and says so."""

import json
import shutil
from dataclasses import replace

import pytest

from seqarch.exam.plan import Entrant, Exam
from seqarch.exam.verdict import compared, judge
from seqarch.report import compare
from tests.report.conftest import undrawn  # noqa: F401  (a fixture)
from tests.report.test_finished_runs import with_branches

pytestmark = pytest.mark.usefixtures("undrawn")

RECIPE = {"model": {"learning_rate": 1e-3}}


@pytest.fixture
def exam(tmp_path):
    """An exam of a model with one finished seed and of another with two, and its runs."""
    runs = [
        run
        for name, gap in (("base", 0.0), ("it", 0.2), ("other", 0.1))
        for run in with_branches(tmp_path, name, gap=gap)
    ]
    shutil.rmtree(runs.pop(3))
    shares = {"base": 1.0, "it": 0.25, "other": 0.5}
    models = [Entrant(name, RECIPE, 1, "code", state_share=share) for name, share in shares.items()]
    return Exam(tmp_path, "small", models[0], models[1:], 2, {}), runs


def verdict(exam, number):
    folder = judge(exam, exam.candidates[number], {}, compared(exam)).folder
    return json.loads((folder / "verdict.json").read_text()), (folder / "verdict.md").read_text()


def test_a_model_with_one_seed_has_the_interval_of_the_others(exam):
    exam, runs = exam
    plain, said = verdict(exam, 0)
    expected = compare(runs, "base").findings.finished["it"]
    last = plain["finished"]["budgets"][-1]
    assert last["raw"]["half_width"] == pytest.approx(expected.headline.raw.half_width)
    assert plain["finished"]["weights"] == expected.weights
    assert "one pair of seeds settles nothing" in said
    assert not any("other" in line for line in (exam.folder / "it/against_base/finished.csv").read_text().splitlines())
    assert "one pair" not in verdict(exam, 1)[1]


def test_the_tokens_are_what_both_models_have_seen_at_least(exam):
    exam, runs = exam
    assert verdict(exam, 0)[0]["data"]["tokens"] == 400 * 4096
    path = runs[2] / "curves.csv"  # the only run of the candidate
    facts = json.loads((runs[2] / "run.json").read_text())
    (runs[2] / "run.json").write_text(json.dumps({**facts, "max_steps": 200}))
    path.write_text("".join(line for line in path.read_text().splitlines(True)[:51]))
    assert verdict(exam, 0)[0]["data"]["tokens"] == 200 * 4096


def test_each_verdict_has_the_state_of_its_own_two_models(exam):
    exam, _ = exam
    for number, share in enumerate((0.25, 0.5)):
        plain, said = verdict(exam, number)
        assert plain["state_share"] == {"candidate": share, "reference": 1.0}
        assert f"| state, share of a key/value cache | {share:.1%} | 100.0% |" in " ".join(said.split())


def test_alone_a_model_with_one_seed_has_no_interval(exam):
    exam, _ = exam
    alone = Exam(exam.folder, "small", exam.reference, exam.candidates[:1], 2, {})
    plain, said = verdict(alone, 0)
    assert plain["finished"]["budgets"][-1]["raw"]["half_width"] is None
    assert "one pair of seeds settles nothing, so train more" in said


def test_a_verdict_against_another_reference_replaces_none(exam):
    exam, _ = exam
    for reference in ("transformer_pp", "base", "other"):
        judge(replace(exam, reference=replace(exam.reference, name=reference)), exam.candidates[0], {}, None)
    found = {path.parent: json.loads(path.read_text()) for path in exam.folder.glob("it/**/verdict.json")}
    assert {str(path.relative_to(exam.folder)): each["reference"] for path, each in found.items()} == {
        "it": "transformer_pp",
        "it/against_base": "base",
        "it/against_other": "other",
    }
