"""The gap between finished models: its definition, its interval under simulation, and when it counts as settled."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.report.cubic import monotone_cubic
from seqarch.report.documents import DocumentLosses
from seqarch.report.finished import COPIES, NORMAL, SHARED, finished_gaps, half_widths, pair_gaps, pool, seed_pairs
from seqarch.report.gap import student
from seqarch.report.runs import Evaluations

PAGE = Path(__file__).parents[2] / "docs/exam.md"
TOKENS = np.array([10e6, 20e6, 40e6, 80e6])
IN_DOMAIN = np.array([4.0, 3.8, 3.6, 3.5])


def models(in_domain=IN_DOMAIN, *, documents: DocumentLosses | None = None, **losses) -> Evaluations:
    return Evaluations(TOKENS[: len(in_domain)], np.array(in_domain), losses, documents=documents)


def shifted(gap, in_domain=IN_DOMAIN) -> Evaluations:
    """Models on the line `ood = 2 * in_domain`, shifted up by `gap`."""
    return models(in_domain, code=2 * np.array(in_domain) + gap)


def test_the_gap_is_taken_at_the_lowest_loss_that_both_have_reached():
    slow = shifted(0.1, IN_DOMAIN + 0.1)
    assert pair_gaps(slow, shifted(0.0))[1:, 0] == pytest.approx(0.1)
    # 3.7 lies half-way between 3.8 and 3.6 of the faster model. Its curve is bent: the slope is 10 at 3.6, and at 3.8
    # the harmonic mean of 10 and 5, so it lies 0.2 / 8 times their difference above the line.
    bent = models(code=np.array([8.0, 7.0, 5.0, 4.0]))
    late = models(IN_DOMAIN + 0.1, code=np.array([8.0, 7.5, 6.5, 6.0]))
    assert pair_gaps(late, bent)[2, 0] == pytest.approx(6.5 - 6.0 - 0.2 / 8 * (10 - 20 / 3))
    assert pair_gaps(bent, late)[1:] == pytest.approx(-pair_gaps(late, bent)[1:])


def test_models_on_one_bent_curve_have_no_gap_however_fast_they_learn():
    """The losses of Transformer++ at 43M to 340M tokens, within 0.002 nats of this curve. Lines are 0.03 nats off."""

    def curve(x):
        return 3.3 + 1.278 * np.exp(1.337 * (x - 3.4))

    slow = np.array([3.790, 3.476, 3.274, 3.131])
    for lead in (0.05, 0.085, 0.12, 0.15):
        fast = slow - lead
        gaps = pair_gaps(models(fast, code=curve(fast)), models(slow, code=curve(slow)))[1:]
        assert np.abs(gaps).max() < 0.005
        assert np.abs(gaps[1:]).max() < 0.001


def test_the_curve_is_monotone_and_goes_through_its_points():
    random = np.random.default_rng(0)
    for _ in range(50):
        nodes, values = np.cumsum(random.random(5)), np.cumsum(random.standard_exponential((5, 2)), axis=0)
        fine = np.linspace(nodes[0], nodes[-1], 101)
        assert (np.diff(monotone_cubic(nodes, values, fine), axis=0) >= -1e-12).all()
        assert monotone_cubic(nodes, values, nodes) == pytest.approx(values)
    assert np.isnan(monotone_cubic(nodes, values, np.array([nodes[0] - 1, nodes[-1] + 1]))).all()


def test_no_curve_leaves_the_range_of_two_points_that_follow_each_other():
    """The first case's end slopes, of the parabola through three points, would overshoot if they were not limited."""
    random = np.random.default_rng(0)
    cases = [np.array([0.0, 1.0, -10.0, 1.0, 0.0]), *random.normal(size=(50, 5))]
    nodes = np.arange(5.0)
    for values in cases:
        for left in range(4):
            inside = monotone_cubic(nodes, values[:, None], np.linspace(left, left + 1, 101))
            low, high = sorted(values[left : left + 2])
            assert (inside >= low - 1e-12).all()
            assert (inside <= high + 1e-12).all()


def test_a_seed_that_stopped_early_counts_at_the_budgets_that_it_has():
    whole, part = shifted(0.3), shifted(0.1, IN_DOMAIN[:3])
    found = finished_gaps({"it": {0: whole, 1: whole, 2: part}}, dict.fromkeys(range(3), shifted(0.0)))["it"]
    assert [each.seeds for each in found.budgets] == [3, 3, 3, 2]
    assert found.budgets[2].mean == pytest.approx(0.7 / 3)
    assert found.headline.mean == pytest.approx(0.3)


def test_seeds_of_the_reference_count_at_the_budgets_that_they_have():
    def model(gap):
        return models(code=2 * IN_DOMAIN + gap, documents=documents(np.full(4, gap)))

    candidate = {seed: model(0.1 + 0.2 * seed) for seed in range(3)}
    kept = {0: np.array([0, 1, 3]), 1: np.array([0, 1, 2]), 2: np.arange(4)}
    reference = {seed: model(0.0).at(rows) for seed, rows in kept.items()}
    parts = {"other": ({"it": candidate}, reference)}
    found = finished_gaps({"it": candidate}, reference, parts=parts)["it"]
    assert [each.tokens for each in found.budgets] == TOKENS.tolist()
    assert [each.seeds for each in found.budgets] == [3, 3, 2, 2]
    means = [0.3, 0.3, 0.4, 0.3]  # of the seeds 1 and 2 at the third budget, of 0 and 2 at the last
    assert [each.mean for each in found.budgets] == pytest.approx(means)
    assert [each.in_domain for each in found.budgets] == pytest.approx(IN_DOMAIN)
    assert [each.parts["other"][0] for each in found.budgets] == pytest.approx(means)


def test_parts_of_the_tokens_have_gaps_of_their_own_where_they_were_measured():
    reference = {0: shifted(0.0), 1: shifted(0.0)}
    parts = {"recallable": ({"it": {1: shifted(0.4)}}, {1: shifted(0.0)}), "other": ({"it": {}}, {})}
    found = finished_gaps({"it": {0: shifted(0.1), 1: shifted(0.1)}}, reference, parts=parts)["it"].headline
    assert found.parts == {"recallable": (pytest.approx(0.4), float("inf"))}
    assert found.mean == pytest.approx(0.1)
    three = {seed: shifted(0.4 + 0.1 * seed) for seed in (-1, 0, 1)}
    parts = {"other": ({"it": three}, dict.fromkeys(three, shifted(0.0)))}
    found = finished_gaps({"it": three}, dict.fromkeys(three, shifted(0.0)), parts=parts)["it"].headline
    assert found.parts["other"] == pytest.approx((found.mean, found.half_width))


def test_parts_of_the_tokens_have_the_weights_of_the_headline():
    candidates, reference = exam(np.random.default_rng(0), np.zeros(4), 3, 3)
    lifted = {
        seed: models(arxiv=each.losses["arxiv"] + 0.4, code=each.losses["code"])
        for seed, each in candidates["it"].items()
    }
    parts = {"other": ({**candidates, "it": lifted}, reference)}
    found = finished_gaps(candidates, reference, parts=parts)["it"]
    above = found.headline.parts["other"][0] - found.headline.mean
    assert above == pytest.approx(0.4 * found.weights["arxiv"])
    assert found.weights["arxiv"] < 0.3


def test_each_budget_has_the_interval_of_its_own_deviation():
    spread = np.array([0.01, 0.01, 0.04, 0.02])
    each = {seed: shifted(0.1 + seed * spread) for seed in (-1, 0, 1)}
    found = finished_gaps({"it": each}, dict.fromkeys(each, shifted(0.0)))["it"]
    widths = np.array([at.half_width for at in found.budgets])
    assert widths / widths[-1] == pytest.approx(spread / spread[-1])


def test_where_the_faster_model_was_never_so_high_there_is_no_gap():
    gaps = pair_gaps(shifted(0.0, IN_DOMAIN + 0.15), shifted(0.0))
    assert np.isnan(gaps[0, 0])
    assert np.isfinite(gaps[1:, 0]).all()
    far = finished_gaps({"far": {0: shifted(0.0, IN_DOMAIN + 0.15)}}, {0: shifted(0.0)})["far"]
    assert [each.tokens for each in far.budgets] == TOKENS[1:].tolist()


def test_a_model_that_a_larger_budget_made_worse_does_not_raise_the_floor():
    worse = np.array([4.0, 3.8, 3.6, 3.7])
    assert pair_gaps(shifted(0.1, worse), shifted(0.0))[:, 0] == pytest.approx(0.1)
    bent = models(code=np.array([8.0, 7.0, 5.0, 4.0]))
    assert pair_gaps(models(worse, code=2 * worse), bent)[3, 0] == pytest.approx(7.2 - 5.0)


def test_only_seeds_of_both_are_paired():
    seeds = {0: shifted(0.1), 1: shifted(0.3), 2: shifted(9.0)}
    found = finished_gaps({"it": seeds}, {0: shifted(0.0), 1: shifted(0.0), 5: shifted(-9.0)})["it"]
    assert found.seeds == (0, 1)
    assert found.headline.mean == pytest.approx(0.2)


def test_a_pair_stands_at_its_seed_of_the_reference():
    """Deviations of two models are compared seed by seed, also if one lacks the first seed."""
    reference = {seed: shifted(0.0) for seed in range(3)}
    pairs = seed_pairs("it", {2: shifted(0.2), 1: shifted(0.1)}, reference)[:, -1, 0]
    assert pairs == pytest.approx([np.nan, 0.1, 0.2], nan_ok=True)


def test_the_pooled_deviation_is_that_within_models():
    deviation, freedom = pool(
        [np.array([3.0, 1.0, np.nan]), np.array([10.0, 14.0, 12.0]), np.array([7.0, np.nan, np.nan])]
    )
    assert deviation == pytest.approx(((2 + 8) / 3) ** 0.5)
    assert freedom == pytest.approx(3 / (1 + 0.5**2))  # the residuals oppose each other: the least correlation counts
    assert pool([np.array([1.0])]) == (float("inf"), 0.0)


def test_deviations_that_all_models_share_count_once():
    common = np.array([0.0, 1.0, 5.0])
    assert pool([common, common + 3, common - 1])[1] == pytest.approx(2)


def test_deviations_are_compared_by_seed():
    shared, lacks_the_first = np.array([3.0, 0.0, 1.0, 4.0]), np.array([np.nan, 1.0, 0.0, 3.0])
    both = [shared - shared.mean(), lacks_the_first - 4 / 3]
    variance = sum(np.nansum(each**2) for each in both) / 5
    correlation = np.nansum(both[0] * both[1]) / 2 / variance
    assert pool([shared, lacks_the_first])[1] == pytest.approx(5 / (1 + correlation**2))
    assert 0.5 < correlation < 1


@pytest.mark.parametrize("freedom", [1, 1.25, 1.6, 2, 2.5, 3, 5, 10, 14.4, 30, 300])
def test_students_factor(freedom):
    t = np.linspace(0, NORMAL * student(freedom), 200_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / (freedom * math.pi) ** 0.5
    inside = 2 * np.trapezoid(scale * (1 + t**2 / freedom) ** (-(freedom + 1) / 2), t)
    assert inside == pytest.approx(0.95, abs=2e-5)


def exam(random: np.random.Generator, gap: np.ndarray, seeds: int, others: int, candidates: int = 3):
    """An exam of some candidates; the first has `seeds`, the rest and the reference `others`.

    A seed shifts all models together and each one separately, three times as far on arxiv as on code. The gap has a
    trend.
    """
    common = 0.05 * random.standard_normal(max(seeds, others))

    def model(seed: int, above, deviation: float) -> Evaluations:
        chance = common[seed] + deviation * random.standard_normal()
        return models(arxiv=2 * IN_DOMAIN + above + chance, code=2 * IN_DOMAIN + above + 0.3 * chance)

    reference = {seed: model(seed, 0.0, 0.08) for seed in range(max(seeds, others))}
    models_of = {"it": {seed: model(seed, gap, 0.05) for seed in range(seeds)}}
    for number in range(candidates - 1):
        models_of[f"other {number}"] = {seed: model(seed, 0.1 * number, 0.05) for seed in range(others)}
    return models_of, reference


def simulate(seeds: int, others: int, times: int = 200, candidates: int = 3) -> tuple[float, float]:
    """How often the interval holds the true gap at the last budget, and its mean half-width."""
    random, gap = np.random.default_rng(seeds + 10 * others), np.array([-0.4, -0.2, -0.1, -0.05])
    found = [finished_gaps(*exam(random, gap, seeds, others, candidates))["it"].headline for _ in range(times)]
    held = [abs(each.mean - gap[-1]) <= each.half_width for each in found]
    return float(np.mean(held)), float(np.mean([each.half_width for each in found]))


@pytest.mark.parametrize(
    ("seeds", "others", "candidates", "words"),
    [
        (3, 3, 3, "three candidates and three pairs each held the true gap in"),
        (1, 3, 3, "one pair of the candidate and three of the others it was"),
        (1, 3, 6, "three of the others it was [0-9.]+ %, and"),
        (2, 3, 3, "With two pairs of the candidate it was"),
        (3, 3, 6, "Six candidates of three pairs each had"),
        (3, 3, 1, "and one candidate had"),
        (1, 2, 3, "others have two pairs and the candidate has one, it was"),
    ],
)
def test_the_interval_holds_the_gap_as_often_as_the_page_says(seeds: int, others: int, candidates: int, words: str):
    """The page has the shares of 10,000 exams (`simulate(seeds, others, 10_000, candidates)`)."""
    said = re.search(rf"{words} (\d\d\.\d) %", " ".join(PAGE.read_text(encoding="utf-8").split()))
    assert said, words
    share = float(said[1]) / 100
    assert 0.93 <= share <= (0.97 if others > 2 else 0.98)
    held, _ = simulate(seeds, others, 300, candidates)
    assert abs(held - share) < 3 * (share * (1 - share) / 300) ** 0.5


def test_more_seeds_never_widen_the_interval():
    widths = [simulate(seeds, others, 30)[1] for seeds, others in ((1, 1), (1, 2), (1, 3), (2, 3), (3, 3), (5, 5))]
    assert np.isinf(widths[0])  # one seed of every model says nothing about another seed
    assert all(wide >= narrow for wide, narrow in itertools.pairwise(widths))


def pairs_of(random: np.random.Generator, of_reference: float, seeds: int, others: int, models: int, exams: int):
    """Deviations of pairs `[exams, models, seeds]` whose first model has `seeds`; variance one, `of_reference` of it.

    The correlation between two models is that share of the reference.
    """
    own = (1 - of_reference) ** 0.5 * random.standard_normal((exams, models, max(seeds, others)))
    found = own - of_reference**0.5 * random.standard_normal((exams, 1, max(seeds, others)))
    found[:, 0, seeds:] = np.nan
    found[:, 1:, others:] = np.nan
    return found


@pytest.mark.parametrize("correlation", [0.25, 0.5, 0.7])
@pytest.mark.parametrize("models", [2, 3, 6])
def test_a_model_with_one_pair_has_an_interval_of_95_percent(models: int, correlation: float):
    exams = pairs_of(np.random.default_rng(0), correlation, 1, 3, models, 3000)
    held = np.mean([abs(each[0, 0]) <= half_widths(each)[0] for each in exams])
    assert 0.93 < held < 0.97 + 2 * (0.95 * 0.05 / 3000) ** 0.5


@pytest.mark.parametrize("correlation", [0.25, 0.5, 0.9, 1.0])
def test_more_pairs_narrow_the_interval_at_any_correlation(correlation: float):
    mixes = ((1, 2), (1, 3), (2, 3), (3, 3), (3, 5), (5, 5))
    widths = []
    for seeds, others in mixes:
        exams = pairs_of(np.random.default_rng(0), correlation, seeds, others, 3, 1000)
        widths.append(np.mean([half_widths(each)[0] for each in exams]))
    assert all(wide > narrow for wide, narrow in itertools.pairwise(widths)), widths


def test_what_grows_with_the_deviation_needs_no_students_t():
    """One pair of three in the mean: of each other model's deviations, 1 - 1/3 of the variance at its seed is left."""
    others = [np.array([0.0, 2.0, 4.0]), np.array([1.0, 0.0, 2.0])]
    samples = np.array([[7.0, np.nan, np.nan], *others])
    deviation, freedom = pool(samples)
    t, share = NORMAL * student(freedom), 2 * (1 - 1 / 3) * SHARED**2 / (1 + SHARED**2)
    first, *rest = half_widths(samples)
    assert first == pytest.approx(deviation * ((1 - share) * t**2 + share * NORMAL**2) ** 0.5)
    assert rest == pytest.approx([deviation * t / 3**0.5] * 2)  # all seeds are in these means: nothing is shared
    assert np.isinf(half_widths(samples[:1])).all()


def test_a_restless_domain_weighs_less_once_its_deviation_is_known():
    candidates, reference = exam(np.random.default_rng(0), np.zeros(4), 3, 3)
    weights = finished_gaps(candidates, reference)["it"].weights
    assert weights["code"] / weights["arxiv"] == pytest.approx(1 / 0.3, rel=0.01)
    alone = finished_gaps({"it": candidates["it"]}, reference)["it"].weights
    assert alone == {"arxiv": 0.5, "code": 0.5}  # two degrees of freedom are too few to weigh by
    two = {name: candidates[name] for name in ("it", "other 0")}
    assert finished_gaps(two, reference)["it"].weights["arxiv"] < 0.3


def test_weights_come_from_the_deviation_at_the_last_two_budgets():
    def model(seed: int, number: int) -> Evaluations:
        off = (seed - 1) * (1 + number)
        return models(arxiv=2 * IN_DOMAIN + off * np.array([9, 9, 0.3, 0.1]), code=2 * IN_DOMAIN + off * 0.1)

    candidates = {name: {seed: model(seed, n) for seed in range(3)} for n, name in enumerate(("one", "other"))}
    weights = finished_gaps(candidates, dict.fromkeys(range(3), models(arxiv=2 * IN_DOMAIN, code=2 * IN_DOMAIN)))
    found = weights["one"].weights
    assert found["code"] / found["arxiv"] == pytest.approx(((0.3**2 + 0.1**2) / (2 * 0.1**2)) ** 0.5)


def documents(gap: np.ndarray) -> DocumentLosses:
    """Three in-domain documents and four of code. The first is hard for all models; the last has the `gap`."""
    inside = np.repeat(IN_DOMAIN[:, None], 3, axis=1)
    code = np.repeat(2 * IN_DOMAIN[:, None], 4, axis=1)
    code[:, 0] += 3
    code[:, -1] += gap
    counts = {"in_domain/docs": np.ones(3), "ood/code": np.ones(4)}
    names = {name: np.arange(len(each)) for name, each in counts.items()}
    return DocumentLosses({"in_domain/docs": inside, "ood/code": code}, counts, names, {"docs": 1.0})


def test_documents_widen_the_interval_by_the_deviation_of_the_paired_difference():
    gap = np.full(4, 0.4)
    candidates = {"it": {s: models(code=2 * IN_DOMAIN + 0.1 + 0.06 * s, documents=documents(gap)) for s in range(3)}}
    reference = {s: models(code=2 * IN_DOMAIN, documents=documents(0 * gap)) for s in range(3)}
    bare = {s: models(code=each.losses["code"]) for s, each in candidates["it"].items()}
    without = finished_gaps({"it": bare}, reference)["it"].headline.half_width
    with_documents = finished_gaps(candidates, reference)["it"].headline.half_width
    # of three draws of four documents the last comes up k times, k binomial with variance 3 * 1/4 * 3/4
    of_documents = 0.4 * (3 * 0.25 * 0.75) ** 0.5 / 3
    assert (with_documents**2 - without**2) ** 0.5 == pytest.approx(NORMAL * of_documents, rel=0.1)


def verdict(gap, *, copied: float | None = 2.0, spread: float = 0.01):
    candidates = {"it": {s: shifted(np.array(gap) + spread * s) for s in (-1, 0, 1)}}
    gains = {} if copied is None else {int(TOKENS[-1]): copied}
    return finished_gaps(candidates, {s: shifted(0.0) for s in (-1, 0, 1)}, of_reference=gains)["it"]


def test_a_gap_that_stays_is_settled_and_its_sign_said():
    assert verdict([0.4, 0.3, 0.21, 0.2]).sentence() == "worse: +0.200 nats per token [+0.175, +0.225] at 80M tokens"
    assert verdict([-0.4, -0.3, -0.21, -0.2]).sentence().startswith("better: -0.200")
    assert verdict([0.4, 0.3, 0.01, 0.0]).sentence().startswith("no difference: ")


def test_a_gap_that_moves_is_not_called_better():
    moving = verdict([-0.8, -0.4, -0.2, -0.1])
    assert not moving.settled
    assert not verdict([0.4, 0.3, 0.24, 0.2]).settled  # 0.04 is more than the half-width of 0.025, and less than twice
    assert moving.slope == pytest.approx(0.1)
    # changes halve from 0.1 on; the third from here, 0.0125, is the first within the interval of 0.025
    assert moving.sentence() == (
        "not settled: -0.800 at 10M, -0.400 at 20M, -0.200 at 40M, -0.100 at 80M tokens; "
        "still moving, so train to about 640M tokens"
    )


@pytest.mark.parametrize(
    ("copied", "word"),
    [(None, "measure copying"), (COPIES - 0.01, "saves only 0.99 nats"), (-0.001, "saves only 0.00 nats")],
)
def test_nothing_is_settled_before_the_reference_copies(copied, word):
    found = verdict([0.2, 0.2, 0.2, 0.2], copied=copied)
    assert not found.settled
    assert word in found.sentence()


def test_a_wide_interval_settles_only_a_gap_of_twice_its_half():
    wide = verdict([0.1, 0.08, 0.07, 0.06], spread=0.06)
    assert wide.headline.half_width == pytest.approx(0.149, abs=0.001)
    assert not wide.settled
    assert wide.sentence().endswith("; an interval of ±0.149 is too wide, so train more seeds")
    assert verdict([0.4, 0.35, 0.32, 0.3], spread=0.06).sentence().startswith("worse: +0.300")
    assert not verdict([0.3, 0.25, 0.22, 0.2], spread=0.06).settled
    assert verdict([0.1, 0.08, 0.07, 0.06], spread=0.04).sentence().startswith("no difference: ")


def test_one_seed_of_everything_is_never_settled():
    found = finished_gaps({"it": {0: shifted(0.2)}}, {0: shifted(0.0)}, of_reference={80_000_000: 2.0})["it"]
    assert not found.settled
    assert "train another seed" in found.sentence()


def test_a_candidate_that_is_not_yet_through_is_compared_at_the_budgets_it_has():
    half = {0: shifted(0.1, IN_DOMAIN[:3]), 1: shifted(0.1, IN_DOMAIN[:3])}
    candidates = {"whole": {0: shifted(0.2), 1: shifted(0.2)}, "half": half}
    found = finished_gaps(candidates, {0: shifted(0.0), 1: shifted(0.0)})
    assert [each.tokens for each in found["half"].budgets] == TOKENS[:3].tolist()
    assert found["half"].headline.mean == pytest.approx(0.1)
    assert [each.tokens for each in found["whole"].budgets] == TOKENS.tolist()


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UserError, match="it and the reference have no seed in common"):
        finished_gaps({"it": {1: shifted(0.0)}}, {0: shifted(0.0)})
    with pytest.raises(UserError, match="no gap for it: at no budget"):
        finished_gaps({"it": {0: shifted(0.0, IN_DOMAIN + 9)}}, {0: shifted(0.0)})
    other = Evaluations(TOKENS * 16, IN_DOMAIN, {"code": IN_DOMAIN})
    with pytest.raises(UserError, match=r"160M, 320M, 640M, 1\.28B and 10M, 20M, 40M, 80M tokens"):
        finished_gaps({"it": {0: other}}, {0: shifted(0.0)})
