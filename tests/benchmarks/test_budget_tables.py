"""The script makes the tables of finished models, and the results page quotes them correctly."""

from __future__ import annotations

import csv
import itertools
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.budget_tables import compared, ranks
from seqarch.errors import UserError
from seqarch.runs.layout import branch_path
from tests.report.runs_for_tests import write_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Finished models, three seeds")[2].partition("\n## ")[0]
ROUNDED = 0.00056
"""How far a number of three digits may be from the CSV's number, which is rounded to at least four."""
BUDGETS = ("42532864", "85065728", "170065920", "340131840")
LONGEST = "1020395520"
FLOOR = "transformer_pp-learning_rate=0.0033"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def published(name: str, folder: str = "budgets") -> list[dict[str, str]]:
    return rows(ROOT / f"docs/results/{folder}/{name}.csv")


def cells(head: str) -> list[list[str]]:
    """The body of the table in the section whose heading begins with `head`."""
    lines = SECTION[SECTION.index(head) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]


def gap(model: str, tokens: str, domain: str, folder: str = "budgets") -> dict[str, str] | None:
    wanted = model, tokens, domain
    return next(
        (row for row in published("gaps", folder) if (row["run"], row["tokens"], row["domain"]) == wanted), None
    )


def same(said: str, row: dict[str, str] | None) -> bool:
    """Whether a cell or a claim such as "+0.044 ± 0.031" agrees with the CSV."""
    if row is None:
        return said == "-"
    value, _, wide = said.partition(" ± ")
    exact = (float(row["high"]) - float(row["low"])) / 2 if row["low"] else 0.0
    return abs(float(value) - float(row["gap"])) < ROUNDED and abs(float(wide or 0) - exact) < ROUNDED


def test_losses_on_the_page_are_those_of_the_csv():
    losses = published("losses")
    for model, rate, *said in cells("| model | rate | 43M"):
        for tokens, cell in zip(BUDGETS, said, strict=True):
            found = [
                row for row in losses if row["model"].partition("-learning")[0] == model and row["tokens"] == tokens
            ]
            found = [row for row in found if float(row["rate"]) == float(rate)]
            if not found:
                assert cell == "not finished"
                continue
            exact = [np.mean([float(row[part]) for row in found]) for part in ("in_domain", "ood")]
            assert [float(part) for part in cell.split(" / ")] == pytest.approx(exact, abs=ROUNDED)


def test_gaps_on_the_page_are_those_of_the_csv():
    for model, pairs, *said in cells("| model | seed pairs"):
        name = FLOOR if "floor" in model else model
        wanted = [*((tokens, "mean") for tokens in BUDGETS[1:]), (BUDGETS[3], "mean, raw")]
        wanted += [(BUDGETS[3], f"mean, {part} tokens") for part in ("recallable", "other")]
        found = [gap(name, tokens, domain) for tokens, domain in wanted]
        assert all(map(same, said, found)), (model, said)
        assert [row["pairs"] for row in found[:3] if row][-1] == pairs


@pytest.mark.parametrize(
    ("claim", "model", "domain"),
    [
        (r"DeltaNet generalises worse\*\*: (\S+ ± [\d.]+)", "delta_net", "mean"),
        (r"no difference\*\* to full attention: (\S+ ± [\d.]+\d)", "top1_chunk", "mean"),
        (r"RWKV-7 shows no difference\*\*: (\S+ ± [\d.]+)", "rwkv7", "mean"),
        (r"need no recall\*\*: (\S+ ± [\d.]+\d)", "rwkv7", "mean, other tokens"),
        (r"seeds are behind, (\S+ ± [\d.]+\d)", "rwkv7", "mean, recallable tokens"),
        (r"recallable tokens only\*\*: (\S+ ± [\d.]+),", "delta_net", "mean, recallable tokens"),
        (r"± 0.141, and (\S+ ± [\d.]+) on the others", "delta_net", "mean, other tokens"),
    ],
)
def test_findings_on_the_page_are_those_of_the_csv(claim: str, model: str, domain: str):
    said = re.search(claim, " ".join(SECTION.split()))
    assert said, claim
    row = gap(model, BUDGETS[3], domain)
    assert row is not None
    assert same(said[1].rstrip("."), row)


@pytest.mark.parametrize(
    ("model", "claim"),
    [("delta_net", "DeltaNet after 340M tokens"), ("top1_chunk", "Exact Top-1"), ("rwkv7", "RWKV-7")],
)
def test_numbers_in_the_readme_are_those_of_the_csv(model: str, claim: str):
    said = re.search(rf"{claim}: (\S+ ± [\d.]*\d)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert said, claim
    assert same(said[1], gap(model, BUDGETS[3], "mean"))


def test_the_readme_says_what_three_times_the_training_changes():
    (kept,) = published("ranks", "three_times")
    assert (kept["models"], kept["same_sign"]) == ("7", "7")
    found = [gap("mamba2", tokens, "mean", "three_times") for tokens in (BUDGETS[3], LONGEST)]
    ends = [f"{float(row['gap']):+.3f}" for row in found if row is not None]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "Seven models, RWKV-7 not among them, keep the sign of their gaps in [three times the training]" in text
    assert "Mamba-2's falls from {} to {}.".format(*ends) in text


def test_bounds_and_signs_on_the_page_follow_from_the_csv():
    text = " ".join(SECTION.split())
    for model, end, words in (
        ("delta_net", "low", "ends at +"),
        ("top1_chunk", "high", "to full attention: +0.020 ± 0.031. This agrees with the paper. A gap above "),
        ("rwkv7", "high", "(two pairs). The paper finds it worse. A gap above "),
    ):
        row = gap(model, BUDGETS[3], "mean")
        assert row is not None
        assert words + f"{float(row[end]):.3f}" in text
    domains = ("arxiv", "github", "speech", "stack", "wiki")
    above = [gap("delta_net", BUDGETS[3], domain) for domain in domains]
    assert all(row is not None and float(row["gap"]) > 0 for row in above)
    assert [float(row["gap"]) for row in published("gaps") if row["run"] == FLOOR and row["domain"] == "mean"] == (
        pytest.approx([-0.019, -0.011], abs=6e-4)
    )


def test_settled_findings_and_copying_are_those_of_the_csv():
    settled = SECTION[SECTION.index("**Settled.**") : SECTION.index("**What still moves")]
    for model, words in (("delta_net", "worse"), ("top1_chunk", "no difference"), ("rwkv7", "no difference")):
        row = gap(model, BUDGETS[3], "mean")
        assert row is not None
        assert row["settled"] == "True"
        assert row["verdict"].startswith(f"{words}: ")
        assert {"worse": "DeltaNet generalises worse", "no difference": "no difference"}[words] in settled
    copying = [float(row["copying"]) for row in published("losses") if row["copying"]]
    said = re.search(
        r"saves (\S+) nats.*?tokens, (\S+) after 85M, (\S+) after 170M and (\S+) after", " ".join(SECTION.split())
    )
    assert said
    assert [float(each) for each in said.groups()] == pytest.approx(copying, abs=0.0051)


def test_the_best_rate_of_each_finished_model_is_that_of_its_ladder():
    rungs = published("ladder")
    for model, rate, *_ in cells("| model | rate | 43M"):
        own = [row for row in rungs if row["model"] == model]
        best = min(own, key=lambda row: float(row["in_domain"]))
        assert float(best["rate"]) == float(rate) or (model, rate) == ("transformer_pp", "3.30e-3")


TWO = "budgets_two_domains"


def test_gaps_on_two_domains_are_those_of_the_csv():
    for model, pairs, *said in cells("| model on two domains"):
        wanted = [*((tokens, "mean") for tokens in BUDGETS[1:])]
        wanted += [(BUDGETS[3], f"mean, {part} tokens") for part in ("recallable", "other")]
        found = [gap(model, tokens, domain, TWO) for tokens, domain in wanted]
        assert None not in found
        assert all(map(same, said, found)), (model, said)
        assert [row["pairs"] for row in found if row][2] == pairs
    assert {row["domain"] for row in published("gaps", TWO)} & {"arxiv", "github", "wiki"} == set()


@pytest.mark.parametrize(
    ("claim", "model", "domain", "verdict"),
    [
        (r"64 keys generalises worse\*\*: (\S+ ± [\d.]+\d)", "window_64", "mean", "worse"),
        (r"lies in recallable tokens \((\S+ ± [\d.]+\d)", "window_64", "mean, recallable tokens", ""),
        (r"Top-1 selection generalises worse\*\*: (\S+ ± [\d.]+\d)", "top1_chunk_approx", "mean", "worse"),
        (r"exact selection shows no difference \((\S+ ± [\d.]+\d)", "top1_chunk", "mean", "no difference"),
        (r"recallable tokens only \((\S+ ± [\d.]+\d)", "top1_chunk_approx", "mean, recallable tokens", ""),
        (r"no difference at 340M tokens\*\*: (\S+ ± [\d.]+\d)", "mamba2", "mean", "no difference"),
    ],
)
def test_findings_on_two_domains_are_those_of_the_csv(claim: str, model: str, domain: str, verdict: str):
    said = re.search(claim, " ".join(SECTION.split()))
    row = gap(model, BUDGETS[3], domain, TWO)
    assert said, claim
    assert row is not None
    assert same(said[1], row)
    assert row["verdict"].startswith(verdict)


def test_checks_on_two_domains_follow_from_the_csv():
    """The gap against each seed of the reference, by straight lines; copying."""
    text, losses = " ".join(SECTION.split()), published("losses", TWO)
    weights = [float(row["weight"]) for name in ("speech", "stack") if (row := gap("mamba2", BUDGETS[3], name, TWO))]

    def lines(model: str, seed: str) -> np.ndarray:
        own = (row for row in losses if (row["model"], row["seed"]) == (model, seed))
        return np.array([[float(row[each]) for each in ("in_domain", "speech", "stack")] for row in own])[::-1]

    for model, words in (("window_64", "(window)"), ("top1_chunk_approx", "(approximate"), ("mamba2", "(Mamba-2)")):
        one, found = lines(model, "0"), []
        for seed in "012":
            other = lines("transformer_pp", seed)
            floor = max(one[0, 0], other[0, 0])
            mine, its = (np.array([np.interp(floor, each[:, 0], each[:, k]) for k in (1, 2)]) for each in (one, other))
            found.append(float(np.dot(weights, mine - its)))
        assert f"{min(found):+.3f} to {max(found):+.3f} {words}" in text
        signs = [
            float(row["gap"]) > 0
            for row in published("gaps", TWO)
            if row["run"] == model and row["tokens"] == BUDGETS[3]
        ]
        assert all(signs[:2])  # speech and stack
    saved = {row["model"]: row["copying"] for row in losses if row["tokens"] == BUDGETS[3] and row["copying"]}
    assert [f"{float(saved[model]):.2f}" in text for model in ("mamba2", "top1_chunk_approx", "window_64")] == [
        True
    ] * 3


def test_rank_correlations_on_the_page_follow_from_the_gaps():
    for folder in ("budgets", TWO):
        found = list(ranks(published("gaps", folder), "transformer_pp"))
        assert [list(row.values()) for row in published("ranks", folder)] == [
            [str(cell) for cell in row] for row in found
        ]
    far, near = (row["rank_correlation"] for row in published("ranks", TWO))
    said = f"is {float(near):.2f} between 170M and 340M tokens and {float(far):.2f} between 85M and 340M"
    assert said in " ".join(SECTION.split())


def test_ranks_count_the_reference_as_zero_and_leave_out_its_other_rates():
    gaps = {1: {"a": 0.2, "b": -0.1, "c": 0.1}, 2: {"a": 0.2, "b": 0.1, "c": -0.1, "new": 3.0}}
    gaps[1]["base-rate=2"] = gaps[2]["base-rate=2"] = -9.0
    rows = [
        {"run": run, "tokens": str(tokens), "domain": domain, "gap": str(gap * (domain == "mean"))}
        for tokens, found in gaps.items()
        for run, gap in found.items()
        for domain in ("docs", "mean")
    ]
    # a 0.2, c 0.1, base 0, b -0.1 become a, b, base, c: b and c change places, so 1 - 6 * (2² + 2²) / (4 * 15)
    assert list(ranks(rows, "base")) == [(1, 2, 3, "0.2000", 1)]


def test_models_without_a_gap_and_the_reference_at_other_rates_are_not_compared():
    gaps = [{"run": run, "tokens": tokens} for run, tokens in (("a", "1"), ("a", "2"), ("base-3e-3", "1"), ("c", ""))]
    assert compared(gaps, "base") == {"a"}


@pytest.fixture
def tabulate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the script on an exam's folder."""

    def run(exam: Path, out: Path, reference: str, *options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["budget_tables.py", str(exam), str(out), "--reference", reference, *options])
        runpy.run_path(str(ROOT / "benchmarks/budget_tables.py"), run_name="__main__")

    return run


def test_the_script_tabulates_finished_models_and_their_gaps(tmp_path: Path, tabulate: Callable[..., None]):
    exam = tmp_path / "small"
    for name, above in (("base", 0.0), ("other", 0.2)):
        run = write_run(exam / name / "seed_0", name, gap=above, noise=0.0)
        write_run(exam / name / "ladder/rate_1.00e-03/seed_0", "rate_1.00e-03", steps=100)
        for steps in (100, 200):
            write_run(branch_path(run, steps), name, gap=above, steps=steps, noise=0.0)
        for config in exam.rglob("config.yaml"):
            config.write_text("model: {d_model: 8, learning_rate: 0.001}\n")
    out = tmp_path / "tables"
    tabulate(exam, out, "base")
    assert [row["tokens"] for row in rows(out / "losses.csv") if row["model"] == "other"] == [
        str(steps * 4096) for steps in (100, 200, 400)
    ]
    assert [(row["model"], row["rate"]) for row in rows(out / "ladder.csv")] == [
        ("base", "1.00e-03"),
        ("other", "1.00e-03"),
    ]
    gaps = {row["domain"]: float(row["gap"]) for row in rows(out / "gaps.csv") if row["tokens"] == str(400 * 4096)}
    assert gaps["code"] == pytest.approx(0.2, abs=2e-3)
    assert gaps["mean"] == pytest.approx(0.23, abs=2e-3)  # code 0.2, legal 0.26
    found = [(row["earlier"], row["later"], row["same_sign"]) for row in rows(out / "ranks.csv")]
    assert found == [(str(steps * 4096), str(400 * 4096), "1") for steps in (100, 200)]
    assert all((out / f"{name}.png").is_file() for name in ("budgets", "scatter"))


def test_records_of_longer_runs_give_the_published_tables(tmp_path: Path, tabulate: Callable[..., None]):
    records = runpy.run_path(str(ROOT / "benchmarks/exam_records.py"))
    records["unpack"](ROOT / "benchmarks/exam_x3", tmp_path / "exam")
    tabulate(tmp_path / "exam", tmp_path / "tables", "transformer_pp")
    for name in ("gaps", "losses", "ranks"):
        assert rows(tmp_path / f"tables/{name}.csv") == published(name, "three_times")
    assert not (tmp_path / "tables/ladder.csv").exists()
    rungs = {(row["model"], row["rate"]): row for row in published("ladder")}
    for name, rate in (
        *(("transformer", rate) for rate in ("1.5e-3", "2.25e-3", "3.3e-3", "4.95e-3", "7.43e-3")),
        ("gated_delta_net", "7.43e-3"),
        *(("window_256", rate) for rate in ("1.5e-3", "2.25e-3", "3.3e-3", "4.95e-3")),
        *(("hybrid_gated_delta_net_attention", rate) for rate in ("2.25e-3", "3.3e-3", "4.95e-3", "7.43e-3")),
        *(("mamba1", rate) for rate in ("2.25e-3", "4.95e-3", "7.5e-3")),
        *itertools.product(("based", "rwkv5", "rwkv6", "top1_element"), ("1.5e-3", "2.25e-3", "3.3e-3")),
    ):
        (row,) = (row for row in published("losses", "three_times") if row["model"] == f"{name}-{rate}")
        assert rungs[name, row["rate"]]["in_domain"] == f"{float(row['in_domain']):.4f}"


def test_gaps_with_three_times_the_tokens_are_those_of_the_csv():
    for model, *said in cells("| model on five domains, raw means"):
        wanted = [*((tokens, "mean, raw") for tokens in (BUDGETS[3], LONGEST))]
        wanted += [(LONGEST, f"mean, {part} tokens") for part in ("recallable", "other")]
        found = [gap(model, tokens, domain, "three_times") for tokens, domain in wanted]
        assert all(same(cell, row and {**row, "low": ""}) for cell, row in zip(said, found, strict=True)), model


def test_the_script_compares_some_domains(tmp_path: Path, tabulate: Callable[..., None]):
    """Other domains may have other hold-outs. A comparison of all domains then refuses."""
    exam = tmp_path / "small"
    for name, above in (("base", 0.0), ("other", 0.2)):
        run = write_run(exam / name / "seed_0", name, gap=above, noise=0.0)
        write_run(branch_path(run, 100), name, gap=above, steps=100, noise=0.0)
        entropies = {"docs": 3.125, "code": 3.0, "legal": 3.0 + above}
        for path in exam.glob(f"{name}/**/run.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "unigram_entropy": entropies}))
        for config in exam.rglob("config.yaml"):
            config.write_text("model: {d_model: 8, learning_rate: 0.001}\n")
    with pytest.raises(UserError, match=r"hold-outs of 'legal' differ.*set --domains to the others"):
        tabulate(exam, tmp_path / "out", "base")
    tabulate(exam, tmp_path / "out", "base", "--domains", "code")
    assert "legal" not in {row["domain"] for row in rows(tmp_path / "out/gaps.csv")}
    assert list(rows(tmp_path / "out/losses.csv")[0])[-1] == "code"
