"""What a verdict says in words."""

from dataclasses import replace
from pathlib import Path

import pytest

from seqarch.exam.plan import Entrant, Rung
from seqarch.exam.verdict import Floor, Verdict, verdict_text
from seqarch.report.costs import Costs
from seqarch.report.draft import Draft, Level
from seqarch.report.estimates import BudgetGap, Change, Estimate, Gap

COSTS = Costs(1000.0, None, 1.5, 2.0, "1 x H200", ["a"], "torch 2.11.0")
FINISHED = Gap(
    weights={"code": 0.25, "legal": 0.75},
    budgets=(
        BudgetGap(28_000_000, 3.912, {"code": -0.4, "legal": -0.2}, Estimate(-0.3), Estimate(-0.25, 0.03), pairs=2),
        BudgetGap(
            57_000_000,
            3.701,
            {"code": -0.1, "legal": 0.02},
            raw=Estimate(-0.04, 0.05),
            standardised=Estimate(-0.01),
            pairs=2,
            parts={"recallable": Estimate(-0.071, 0.0201), "other": Estimate(0.013)},
            effective=(30e6, 57e6),
            copying=(0.5, -0.001),
        ),
    ),
    seeds=(0, 1),
    change=Change(0.24, 0.02, pairs=2),
)
RECIPE = {"model": {"learning_rate": 1e-3}}
VERDICT = Verdict(
    Entrant("mine", RECIPE, 105, "code", 0.0625),
    Entrant("other", RECIPE, 100, "code", 1.0),
    "small",
    Path("out"),
    conclusion="mine is worse than other: ...",
    finished=FINISHED,
    draft=Draft({"code": 0.02}, 40, (2.0, 3.0)),
    final={"candidate": {"in_domain": 2.0, "code": 3.0}, "reference": {"in_domain": 2.1, "code": 3.1}},
    convergence=[Level(2.5, 1e6, 2e6, 0.5)],
    costs={"candidate": replace(COSTS, tokens_per_second=500.0), "reference": COSTS},
    train={"web": 1.0},
    ood=["code"],
    tokenizer="mixtral",
    tokens=10**8,
)


def changed(verdict: Verdict = VERDICT, **changes) -> str:
    """The words of a verdict in which fields have other values, in single blanks."""
    return " ".join(verdict_text(replace(verdict, **changes)).split())


def test_every_number_is_in_its_table():
    said = verdict_text(VERDICT)
    assert said.startswith("# mine against other (small)\n\nmine is worse than other: ...\n")
    said = " ".join(said.split())
    for cells in (
        "| OOD, code | 3.000 | 3.100 | +0.020 |",
        "| mine | 1M |",
        "| ratio | 0.50 |",
        "| parameters | 105 | 100 | 1.05 |",
        "| state, share of a key/value cache | 6.2% | 100.0% | |",
        "| tokens/s, training | 500 | 1,000 | 0.50 |",
        "| peak memory, GiB | 1.50 | 1.50 | 1.00 |",
        "| tokens to equal loss | 30M | 57M | 0.53 |",
        "| minutes of training steps to equal loss | 1000.0 | 950.0 | 1.05 |",
        "| finished models after | 28M | 57M |",
        "| pairs of seeds | 2 | 2 |",
        "| compared at an in-domain loss of | 3.912 | 3.701 |",
        "| gap, mean of the domains | -0.300 | -0.040 ±0.050 |",
        "| gap, recallable tokens | | -0.071 ±0.020 |",
        "| gap, other tokens | | +0.013 |",
        "| gap, legal | -0.200 | +0.020 |",
        "| gap, standardised mean | -0.250 ±0.030 | -0.010 |",
        "| saved by copying, model | | 0.50 |",
        "| saved by copying, reference | | 0.00 |",
        "It last changed by +0.240 [+0.220, +0.260] per doubling of tokens; 0.03 with its interval is allowed.",
        "fixed weights (code 0.25, legal 0.75; seqarch/report/weights.csv)",
    ):
        assert cells in said, cells
    assert "Warning" not in said


@pytest.mark.parametrize(("parameters", "words"), [(125, "25% more"), (75, "25% fewer")])
def test_models_of_unequal_size_are_warned_of(parameters, words):
    verdict = replace(VERDICT, candidate=replace(VERDICT.candidate, parameters=parameters))
    assert f"Warning: mine has {words} parameters than other" in verdict_text(verdict)


def test_what_limits_a_verdict_is_said():
    missing = [{"run": "out/mine/seed_1", "why": "not trained"}]
    assert "Missing: out/mine/seed_1: not trained" in verdict_text(replace(VERDICT, missing=missing))
    for costs, words in (
        (replace(COSTS, hardware="8 x A100"), "Speeds do not compare: 1 x H200 and 8 x A100."),
        (replace(COSTS, versions="torch 2.14.1"), "Speeds do not compare: torch 2.11.0 and torch 2.14.1."),
        (replace(COSTS, commits=["b"]), "different commits of seqarch: a, b."),
    ):
        assert words in changed(costs={"candidate": COSTS, "reference": costs})
        assert words not in changed()


def test_without_runs_there_is_no_verdict():
    assert "There is no verdict yet" in verdict_text(
        Verdict(VERDICT.candidate, VERDICT.reference, "small", Path("out"))
    )


def test_the_rates_of_the_seeds_are_bold_and_the_floor_is_said():
    rungs = [Rung(factor, factor * 1e-3, 3.0 + factor, 4.0) for factor in (1.0, 1.5, 2.2)]
    verdict = replace(VERDICT, candidate=replace(VERDICT.candidate, near_best=(1e-3, 1.5e-3)))
    said = changed(verdict, rates={"candidate": rungs, "reference": rungs}, floor=Floor(1.5e-3, FINISHED))
    assert "| mine | **4.000 / 4.000** | **4.500 / 4.000** | 5.200 / 4.000 |" in said
    assert "| other | **4.000 / 4.000** | 4.500 / 4.000 | 5.200 / 4.000 |" in said
    assert (
        "Floor: the standardised gap of other at 0.0015 to itself is -0.250 at 28M tokens, -0.010 at 57M tokens."
        in said
    )
    assert ", each at its own learning rate." in said
    assert "at its own learning rate" not in changed()


def test_what_was_not_measured_is_left_out():
    side = replace(COSTS, peak_gib=None, tokens_per_second=None)
    said = changed(costs={"candidate": side, "reference": COSTS}, finished=None, draft=None, convergence=[])
    for words in ("peak memory", "tokens/s", "finished models", "Gap during training", "to equal loss"):
        assert words not in said
    unknown = replace(VERDICT, candidate=replace(VERDICT.candidate, state_share=None))
    assert "| state, share of a key/value cache | not known | 100.0% |" in changed(unknown)


def test_the_json_has_no_infinity_and_names_what_was_chosen():
    rates = {"candidate": [Rung(1.0, 1e-3, float("inf"), float("inf"))]}
    plain = replace(VERDICT, rates=rates).plain()
    assert plain["rates"]["candidate"] == [
        {"factor": 1.0, "rate": 1e-3, "in_domain": None, "compared": None, "chosen": True}
    ]
    assert plain["finished"]["budgets"][0]["raw"] == {"value": -0.3, "half_width": None}
    assert (plain["finished"]["word"], plain["finished"]["settled"]) == ("not settled", False)
    assert plain["convergence"] == [{"loss": 2.5, "tokens": 1e6, "reference": 2e6, "ratio": 0.5}]
    assert plain["parameters"] == {"candidate": 105, "reference": 100, "ratio": 1.05}
