"""What a verdict says in words."""

import copy

import pytest

from seqarch.exam.verdict_text import verdict_text

GAP = {"domain": "code", "value": 0.02, "low": 0.01, "high": 0.03, "points": 40, "overlap": (2.0, 3.0)}
GAP |= {"seeds": (2, 3), "documents": 7}
COSTS = {"tokens_per_second": 1000.0, "peak_gib": 1.5, "minutes_a_run": 2.0, "hardware": "1 x H200", "commits": ["a"]}
VERDICT = {
    "candidate": "mine",
    "reference": "other",
    "size": "small",
    "missing": [],
    "parameters": {"candidate": 105, "reference": 100, "ratio": 1.05},
    "conclusion": "mine is worse: ...",
    "seeds": {"candidate": [0, 1], "reference": [0, 1, 2]},
    "gaps": [GAP],
    "final": {"candidate": {"in_domain": 2.0, "code": 3.0}, "reference": {"in_domain": 2.1, "code": 3.1}},
    "convergence": [{"loss": 2.5, "tokens": 1e6, "reference": 2e6, "ratio": 0.5}],
    "costs": {"candidate": {**COSTS, "tokens_per_second": 500.0}, "reference": COSTS},
    "data": {"train": {"web": 1.0}, "ood": ["code"], "tokenizer": "mixtral", "tokens": 10**8},
}


def changed(**changes):
    verdict = copy.deepcopy(VERDICT)
    for key, value in changes.items():
        first, _, rest = key.partition("__")
        if rest:
            verdict[first] = {**verdict[first], rest: value}
        else:
            verdict[first] = value
    return verdict_text(verdict)


def test_every_number_is_in_its_table():
    said = verdict_text(VERDICT)
    assert said.startswith("# mine against other (small)\n\nmine is worse: ...\n")
    for cells in (
        "| OOD, code            | 3.000 | 3.100 | +0.020 [+0.010, +0.030]     |",
        "| mine                           | 1M   |",
        "| ratio                          | 0.50 |",
        "| parameters         | 105  | 100   | 1.05  |",
        "| tokens/s, training | 500  | 1,000 | 0.50  |",
        "| peak memory, GiB   | 1.50 | 1.50  | 1.00  |",
    ):
        assert cells in said
    assert "resampled over 2 and 3 seeds, evaluations and 7 evaluation documents." in said
    assert "Warning" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parameters__ratio": 1.25}, "Warning: mine has 25% more parameters than other"),
        ({"parameters__ratio": 0.75}, "Warning: mine has 25% fewer parameters than other"),
        ({"seeds__candidate": [0]}, "With one seed the interval does not say what another seed would give."),
        ({"costs__reference": {**COSTS, "hardware": "8 x A100"}}, "Speeds do not compare: 1 x H200 and 8 x A100."),
        ({"costs__reference": {**COSTS, "commits": ["b"]}}, "different commits of seqarch: a, b."),
        ({"missing": [{"run": "out/mine/seed_1", "why": "not trained"}]}, "Missing: out/mine/seed_1: not trained"),
    ],
)
def test_what_limits_a_verdict_is_said(changes, said):
    assert said in changed(**changes)
    assert said not in verdict_text(VERDICT)


def test_without_runs_there_is_no_verdict():
    bare = {key: VERDICT[key] for key in ("candidate", "reference", "size", "missing", "parameters")}
    assert "There is no verdict yet" in verdict_text(bare)


def test_models_at_their_own_rates_are_said_to_be():
    rung = {"factor": 1.0, "rate": 1e-3, "in_domain": 3.0, "compared": 4.0, "chosen": True}
    said = ", each at its own learning rate."
    assert said in changed(rates={"candidate": [rung], "reference": [rung]})
    assert said not in verdict_text(VERDICT)


def test_the_share_of_the_cache_is_printed():
    assert "| state, share of a key/value cache | 6.2% | 100.0% |" in " ".join(
        changed(state_share={"candidate": 0.0625, "reference": 1.0}).split()
    )


def test_a_share_that_is_not_known_is_not_called_none():
    text = " ".join(changed(state_share={"candidate": None, "reference": 1.0}).split())
    assert "| state, share of a key/value cache | not known | 100.0% |" in text


def test_memory_is_left_out_where_it_was_not_measured():
    assert "peak memory" not in changed(costs__candidate={**COSTS, "peak_gib": None})


FINISHED = {
    "weights": {"code": 0.25, "legal": 0.75},
    "budgets": [
        {
            "tokens": 28_000_000,
            "in_domain": 3.912,
            "domains": {"code": -0.4, "legal": -0.2},
            "mean": -0.25,
            "half_width": 0.03,
            "raw": -0.3,
            "seeds": 2,
            "parts": {},
            "copying": [0.3, None],
        },
        {
            "tokens": 57_000_000,
            "in_domain": 3.701,
            "domains": {"code": -0.1, "legal": 0.02},
            "mean": -0.01,
            "half_width": None,
            "raw": -0.04,
            "seeds": 2,
            "parts": {"recallable": [-0.071, 0.0201], "other": [0.013, None]},
            "copying": [0.5, 0.41],
        },
    ],
    "seeds": [0, 1],
    "copied": 0.41,
    "slope": 0.24,
    "settled": False,
}


def test_the_gap_between_finished_models_stands_first_with_every_budget():
    said = verdict_text({**VERDICT, "finished": FINISHED})
    assert said.index("finished models after") < said.index("loss, nats per token")
    for part in (
        "28M",
        "57M",
        "3.912",
        "3.701",
        "-0.250 ±0.030",
        "-0.010 ",
        "gap, code (weight 0.25)",
        "+0.020",
        "-0.040",
    ):
        assert part in said
    lines = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:4]]
        for line in said.splitlines()
        if "|" in line
    }
    assert lines["gap, recallable tokens"] == ["", "-0.071 ±0.020"]
    assert lines["gap, other tokens"] == ["", "+0.013"]
    assert lines["saved by copying, model"] == ["0.30", "0.50"]
    assert lines["saved by copying, reference"] == ["", "0.41"]
    assert "The gap is not settled. The gap last moved by +0.240 per doubling of tokens." in said
    assert "The reference saves 0.41 nats per token by copying." in said


def test_a_small_loss_by_copying_is_no_negative_zero():
    last = {**FINISHED["budgets"][1], "copying": [-0.003, -0.001]}
    said = verdict_text({**VERDICT, "finished": {**FINISHED, "budgets": [last], "copied": -0.001}})
    assert "The reference saves 0.00 nats per token by copying." in said
    assert "-0.00 " not in said


def test_one_budget_has_no_slope_and_copying_may_be_unknown():
    said = verdict_text({**VERDICT, "finished": {**FINISHED, "slope": None, "copied": None, "settled": True}})
    assert "The gap is settled." in said
    assert "last moved" not in said
    assert "per token by copying" not in said
