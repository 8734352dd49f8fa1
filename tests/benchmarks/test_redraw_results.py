"""The figures of the results are drawn from the CSV files next to them."""

from __future__ import annotations

import csv
import runpy
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
SCRIPT = runpy.run_path(str(ROOT / "benchmarks/redraw_results.py"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["relation", "figure_1a"])
def test_findings_are_those_of_the_tables(name: str):
    found = SCRIPT["findings"](RESULTS / name)
    gaps = {(row["run"], row["domain"]): row for row in rows(RESULTS / name / "gap.csv")}
    assert len(gaps) == sum(len(one.gaps) for one in found.comparisons.values()) > 0
    for model, one in found.comparisons.items():
        for gap in one.gaps:
            row = gaps[model, gap.domain]
            assert (gap.value, gap.low, gap.high) == tuple(float(row[key]) for key in ("gap", "low", "high"))
    points = rows(RESULTS / name / "scatter.csv")
    for group in found.groups:
        for run in group.runs:
            own = [row for row in points if (row["run"], row["seed"]) == (run.name, str(run.seed))]
            assert run.evaluations.with_mean().keys() == {row["domain"] for row in own}
            for domain, losses in run.evaluations.with_mean().items():
                table = [row for row in own if row["domain"] == domain]
                assert [float(row["in_domain_loss"]) for row in table] == run.evaluations.in_domain.tolist()
                loss = "ood_loss" if "ood_loss" in table[0] else "holdout_loss"
                assert [float(row[loss]) for row in table] == pytest.approx(losses.tolist(), abs=1e-9)


@pytest.mark.parametrize("folder", ["budgets", "budgets_two_domains"])
def test_finished_models_are_those_of_the_table(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(RESULTS / folder, tmp_path / "budgets")
    for name in ("budgets", "scatter"):
        (tmp_path / f"budgets/{name}.png").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["redraw_results.py", str(tmp_path)])
    SCRIPT["main"]()
    assert (tmp_path / "budgets/budgets.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "budgets/scatter.png").read_bytes()
    found = SCRIPT["finished"](tmp_path / "budgets")
    table = [row for row in rows(RESULTS / folder / "gaps.csv") if row["domain"] == "mean"]
    drawn = [(name, at.tokens, at.mean, at.half_width) for name, one in found.finished.items() for at in one.budgets]
    assert len(drawn) == len(table)
    for (name, tokens, mean, half), row in zip(drawn, table, strict=True):
        assert (name, tokens, mean) == (row["run"], int(row["tokens"]), float(row["gap"]))
        assert half == pytest.approx((float(row["high"]) - float(row["low"])) / 2)
        assert found.finished[name].settled == (row["settled"] == "True")


def test_recall_is_that_of_the_points_and_the_page_has_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    shutil.copytree(RESULTS / "recall", tmp_path / "recall")
    (tmp_path / "recall/mqar.png").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["redraw_results.py", str(tmp_path)])
    SCRIPT["main"]()
    assert (tmp_path / "recall/mqar.png").read_bytes().startswith(b"\x89PNG")
    *table, _ = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 13
    assert "\n".join(table) in (RESULTS / "README.md").read_text(encoding="utf-8")


def cells(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables whose first cell is a metric, by metric."""
    lines = [line.strip("| ").split(" | ") for line in (ROOT / page).read_text(encoding="utf-8").splitlines()]
    return {first.strip("`"): rest for first, *rest in lines if first.startswith("`") and "/" in first and rest}


def test_the_pages_have_the_results_of_the_evaluated_models():
    values: dict[str, dict[str, str]] = {}
    for row in rows(RESULTS / "capabilities.csv"):
        digits = 1 if row["metric"].endswith("/log_likelihood") else 3
        value, low, high = (f"{float(row[key]):.{digits}f}" for key in ("value", "low", "high"))
        values.setdefault(row["metric"], {})[row["run"]] = f"{value} [{low}, {high}]"
    page = cells("docs/evaluation.md")
    shown = {metric: each for metric, each in values.items() if not metric.endswith("/contains")}
    for metric, each in shown.items():
        assert page[metric][-2:] == [each["transformer_pp_2k"], each.get("shell_100k", "-")]
    assert len(shown) == 22
    short = {metric: rest[0] for metric, rest in cells("README.md").items() if metric in values}
    assert len(short) == 3
    assert short == {metric: values[metric]["transformer_pp_2k"] for metric in short}


def test_the_page_has_the_results_of_retrieval():
    page = cells("docs/evaluation.md")
    table = [row for row in rows(RESULTS / "retrieval.csv") if "_v0" not in row["metric"]]
    for row in table:
        digits = 1 if row["metric"].endswith("/log_likelihood") else 3
        value, low, high = (f"{float(row[key]):.{digits}f}" for key in ("value", "low", "high"))
        column = ["transformer_pp_2k_short", "shell_100k_short"].index(row["run"])
        assert page[row["metric"]][1:][column] == f"{value} [{low}, {high}]"
    assert len(table) == 12
    twins = {(row["metric"].replace("_v0", ""), row["run"], row["value"]) for row in rows(RESULTS / "retrieval.csv")}
    assert len(twins) == 12


def test_the_page_has_the_tasks_that_only_the_third_model_took():
    page = cells("docs/evaluation.md")
    table = {row["metric"]: row for row in rows(RESULTS / "all_tasks.csv")}
    shown = [metric for metric in table if metric.startswith(("mmlu", "repeat_gain", "loss_by_position"))]
    for metric in shown:
        digits = {"mmlu": 3, "repeat_gain": 4, "loss_by_position": 2}[metric.split("/")[0]]
        value, low, high = (f"{float(table[metric][key]):.{digits}f}" for key in ("value", "low", "high"))
        assert page[metric][::2] == [table[metric]["samples"], f"{value} [{low}, {high}]"]
    assert len(shown) == 10
    few_shot = [row for metric, row in table.items() if metric.endswith(("/acc", "/acc_norm")) and metric != "mmlu/acc"]
    assert (len(few_shot), sum(row["at_chance"] == "True" for row in few_shot)) == (17, 10)
