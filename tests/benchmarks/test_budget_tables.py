"""The tables of finished models: made by their script, and said on the results page as they are."""

from __future__ import annotations

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest

from seqarch.runs.layout import branch_path
from tests.report.runs_for_tests import write_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Finished models at four budgets")[2].partition("\n## ")[0]
ROUNDED = 0.00056
"""How far three digits may lie from the four of the CSV, which are rounded already."""
BUDGETS = ("42532864", "85065728", "170065920", "340131840")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def published(name: str) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of a published table by run and tokens."""
    return {(row["run"], row["tokens"]): row for row in rows(ROOT / f"docs/results/budgets/{name}.csv")}


def cells(head: str) -> list[list[str]]:
    """The body of the table of the section whose head begins so."""
    lines = SECTION[SECTION.index(head) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]


def test_losses_on_the_page_are_those_of_the_csv():
    finished = published("finished")
    for model, rate, *said in cells("| model | rate | 43M"):
        for tokens, cell in zip(BUDGETS, said, strict=True):
            row = finished.get((f"{model}/rate_{float(rate):.2e}", tokens))
            if row is None:
                assert cell.startswith("not finished")
            else:
                exact = [float(row["in_domain"]), float(row["ood"])]
                assert [float(part) for part in cell.split(" / ")] == pytest.approx(exact, abs=ROUNDED)


def test_gaps_on_the_page_are_those_of_the_csv():
    gaps = published("gaps")
    rates = {model: rate for model, rate, *_ in reversed(cells("| model | rate | 43M"))}
    for model, *said, _ in cells("| model | 85M"):
        name, _, rate = model.partition("` at ")
        run = f"{name}/rate_{float(rate or rates[name]):.2e}"
        for tokens, cell in zip(BUDGETS[1:], said, strict=True):
            row = gaps.get((run, tokens))
            assert cell == "-" if row is None else float(cell) == pytest.approx(float(row["mean"]), abs=ROUNDED)


def test_the_script_tabulates_finished_models_and_their_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, gap in (("base", 0.0), ("other", 0.2)):
        run = write_run(tmp_path / "runs" / name / "rate_1.00e-03", name, gap=gap, noise=0.0)
        for steps in (100, 200):
            write_run(branch_path(run, steps), name, gap=gap, steps=steps, noise=0.0)
    out = tmp_path / "tables"
    arguments = [str(tmp_path / "runs"), str(out), "--reference", "base/rate_1.00e-03"]
    monkeypatch.setattr(sys, "argv", ["budget_tables.py", *arguments])
    runpy.run_path(str(ROOT / "benchmarks/budget_tables.py"), run_name="__main__")
    assert [row["tokens"] for row in rows(out / "finished.csv") if row["run"].startswith("other")] == [
        str(steps * 4096) for steps in (100, 200, 400)
    ]
    assert len(rows(out / "ladder.csv")) == 2
    last = rows(out / "gaps.csv")[-1]
    assert last["run"] == "other/rate_1.00e-03"
    assert float(last["code"]) == pytest.approx(0.2, abs=2e-3)
    assert re.fullmatch(r"\+0\.23\d\d", last["mean"])  # code 0.2, legal 0.26
