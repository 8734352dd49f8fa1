"""Finished models of run folders, and what a report says of the gap between them."""

from __future__ import annotations

import csv
import re

import pytest

from seqarch.errors import UserError
from seqarch.report import compare
from seqarch.report.findings import Findings
from seqarch.report.page import render
from seqarch.report.runs import load_run
from seqarch.report.tables import standings
from seqarch.runs.folder import branch_path
from tests.report.runs_for_tests import write_branched, write_run


def test_finished_models_are_the_ends_of_the_branches_and_of_the_run(tmp_path):
    run = write_branched(tmp_path / "it", "it", (200, 100))
    write_run(branch_path(run, 300), "it", steps=300, facts={"status": "stopped"})
    found = load_run(run).finished_models()
    assert found is not None
    assert found.step.tolist() == [100, 200, 400]
    branch = load_run(branch_path(run, 200)).evaluations
    assert found.in_domain[1] == branch.in_domain[-1]
    assert found.losses["code"][1] == branch.losses["code"][-1]


def test_a_run_whose_last_evaluation_is_not_finite_is_no_finished_model(tmp_path):
    run = write_branched(tmp_path / "it", "it", (200, 100))
    table = branch_path(run, 200) / "curves.csv"
    head, *rows = table.read_text().splitlines()
    last = dict(zip(head.split(","), rows[-1].split(","), strict=True)) | {"loss/ood/code": "nan"}
    table.write_text("\n".join([head, *rows[:-1], ",".join(last.values())]) + "\n")
    found = load_run(run).finished_models()
    assert found is not None
    assert found.step.tolist() == [100, 400]


def test_a_run_under_way_without_a_finished_branch_has_no_finished_model(tmp_path):
    run = write_run(tmp_path / "it", "it", facts={"status": "running"})
    assert load_run(run).finished_models() is None


def test_a_branch_with_other_domains_is_named(tmp_path):
    run = write_run(tmp_path / "it", "it")
    write_run(branch_path(run, 100), "it", steps=100, domains=("code", "other"))
    with pytest.raises(UserError, match=r"branches/step_00000100\) cannot be compared, they differ in OOD domains"):
        load_run(run).finished_models()


def with_branches(folder, name, *, copying: float | str = 2.0, **facts):
    """Run folders of two seeds, finished at a quarter, a half and all of 400 steps; the trunk ends last."""
    for seed in (0, 1):
        run = write_branched(folder / name / f"seed_{seed}", name, seed=seed, noise=0.0, **facts)
        table = (run / "curves.csv").read_text().splitlines()
        lines = [f"{table[0]},copying/gain", *(f"{line}," for line in table[1:-1]), f"{table[-1]},{copying}"]
        (run / "curves.csv").write_text("\n".join(lines) + "\n")
        yield run


def test_the_gap_between_finished_models_is_the_verdict_of_a_report(tmp_path):
    runs = [*with_branches(tmp_path, "base"), *with_branches(tmp_path, "other", gap=0.2)]
    found = Findings.read(runs, "base")
    gap = found.comparisons["other"].finished
    assert gap is not None
    assert [each.tokens for each in gap.budgets] == [100 * 4096, 200 * 4096, 400 * 4096]
    assert gap.copied == 2.0
    assert gap.settled
    assert gap.headline.domains == pytest.approx({"code": 0.2, "legal": 0.26}, abs=1e-3)
    assert found.comparisons["other"].sentence.startswith("other is worse than base: +0.2")


def test_a_column_of_copying_without_a_value_is_no_measurement(tmp_path):
    runs = [*with_branches(tmp_path, "base", copying=""), *with_branches(tmp_path, "other", gap=0.2)]
    gap = Findings.read(runs, "base").comparisons["other"].finished
    assert gap is not None
    assert gap.copied is None


def test_a_model_without_branches_has_a_draft_and_no_verdict(tmp_path):
    runs = [*with_branches(tmp_path, "base"), write_run(tmp_path / "bare", "bare", gap=0.2)]
    found = Findings.read(runs, "base")
    assert found.comparisons["bare"].finished is None
    sentence = found.comparisons["bare"].sentence
    assert sentence.startswith("bare against base, a draft: +0.2")
    assert not re.search("worse|better|difference|verdict", sentence)
    assert "no gap for bare: it has a finished model at one budget" in found.unfinished["bare"]
    assert sentence.endswith(f"It has no interval; {found.unfinished['bare']}.")
    assert found.only(["base", "bare"]).comparisons["bare"].sentence == sentence


def test_a_model_with_other_branches_is_left_out_and_the_others_keep_their_gaps(tmp_path):
    runs = [*with_branches(tmp_path, "base"), *with_branches(tmp_path, "other", gap=0.2)]
    odd = write_branched(tmp_path / "odd", "odd", (120,), gap=0.2, steps=440)
    found = compare([*runs, odd]).findings
    assert list(found.finished) == ["other"]
    assert found.unfinished["odd"].startswith("finished models of 492k, 1.8M and of ")


def test_the_gap_between_finished_models_leads_the_table(tmp_path):
    runs = [*with_branches(tmp_path, "base"), *with_branches(tmp_path, "other", gap=0.2)]
    comparison = compare([*runs, write_run(tmp_path / "bare", "bare", gap=0.1)], "base")
    _, head, *rows = comparison.table.splitlines()
    cells = {row.split()[0]: re.split(r"\s{2,}", row) for row in (head, *rows)}
    assert cells["run"][4:] == ["gap, finished models [95 % interval]", "code", "legal", "during training"]
    last = comparison.findings.finished["other"].headline
    by_domain = [f"{last.domains[domain]:+.3f}" for domain in ("code", "legal")]
    assert cells["other"][4:7] == [str(last.raw), "worse at 1.64M", by_domain[0]]
    assert cells["other"][7] == by_domain[1]
    assert cells["bare"][4] == "not finished"
    assert cells["bare"][5].startswith("+0.1")
    assert cells["base"][4:] == ["reference"]
    assert f'<td class="number">{last.raw}</td>' in comparison._repr_html_()


def test_a_report_without_branches_speaks_of_no_finished_models(tmp_path):
    found = Findings.read([write_run(tmp_path / name, name) for name in ("base", "other")], "base")
    assert found.finished == found.unfinished == {}


@pytest.mark.usefixtures("unpainted")
def test_the_table_of_finished_models_has_each_budget_and_domain(tmp_path):
    runs = [*with_branches(tmp_path, "base"), *with_branches(tmp_path, "other", gap=0.2)]
    bare = write_run(tmp_path / "bare", "bare")
    compare([*runs, bare], "base").write(tmp_path / "report")
    with (tmp_path / "report" / "finished.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["tokens"], row["domain"]) for row in rows[:5]] == [
        *(("409600", domain) for domain in ("code", "legal", "mean", "mean, raw")),
        ("819200", "code"),
    ]
    code, legal, mean, raw = (row for row in rows if row["tokens"] == str(400 * 4096))
    assert float(raw["gap"]) == pytest.approx((float(code["gap"]) + float(legal["gap"])) / 2)
    assert (float(mean["low"]) + float(mean["high"])) / 2 == pytest.approx(float(mean["gap"]))
    assert rows[-1]["run"] == "bare"
    assert "no gap for bare: it has a finished model at one budget" in rows[-1]["verdict"]


@pytest.mark.parametrize(("models", "tables"), [(2, "<details open>"), (3, "<details>")])
def test_the_page_says_where_finished_models_are_compared_and_folds_many_tables(tmp_path, models, tables):
    runs = [run for k in range(models + 1) for run in with_branches(tmp_path, f"model_{k}", gap=0.1 * k)]
    page = render(Findings.read(runs, "model_0"), {})
    assert "at the lowest in-domain loss that the finished models of both reach" in " ".join(page.split())
    assert page.count(f"{tables}<summary>model_") == models


def test_the_page_of_runs_without_branches_says_how_they_are_compared(tmp_path):
    found = Findings.read([write_run(tmp_path / name, name) for name in ("base", "other")], "base")
    page = render(found, {})
    assert "Finished models" not in page
    assert "a draft, the mean OOD loss above base at every in-domain loss that both went through" in " ".join(
        page.split()
    )


@pytest.mark.usefixtures("unpainted")
def test_the_standings_have_one_estimator_and_every_column(tmp_path):
    runs = [
        run for k, name in enumerate(("base", "worst", "best")) for run in with_branches(tmp_path, name, gap=0.1 * k)
    ]
    found = Findings.read([*runs[:2], *runs[4:], *runs[2:4]], "base")
    head, rows = standings(found)
    best, worst = (dict(zip(head, row, strict=True)) for row in rows)
    assert (worst["run"], best["run"]) == ("best", "worst")  # by their gaps
    assert (best["rank, code"], worst["rank, code"]) == (1, 2)
    gap = found.finished["best"]
    assert worst["gap"] == gap.headline.raw.value
    assert worst["standardised"] == gap.headline.standardised.value
    assert worst["gap_at_highest_loss"] == pytest.approx(0.23, abs=1e-3)
    assert worst["gap_during_training"] == pytest.approx(0.23, abs=1e-3)
    assert worst["tokens_ratio"] == pytest.approx(worst["effective_tokens"] / worst["reference_effective_tokens"])
    assert worst["time_ratio"] == pytest.approx(worst["tokens_ratio"])  # both at 21,000 tokens per second
    assert {row[2] for row in standings(found, 200 * 4096)[1]} == {200 * 4096}


def test_the_gap_during_training_leaves_out_the_decay(tmp_path):
    run = write_branched(tmp_path / "it", "it", (200,))
    assert load_run(run).steady.step.max() == 400  # of a run whose schedule is not known
    (run / "config.yaml").write_text("seed_everything: 0\nmodel: {decay_share: 0.2}\n")
    assert load_run(run).steady.step.max() == 320
