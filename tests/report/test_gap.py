"""The gap between finished models: its definition, what it is averaged over, and when it counts as settled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.report.documents import DocumentLosses
from seqarch.report.estimates import COPIES, TOLERANCE, Gap, half_width
from seqarch.report.gap import CURVATURE, FinishedModels, fixed_weights, pair_gaps, seed_pairs, tokens_at
from seqarch.report.runs import Evaluations
from seqarch.runs.results import NORMAL

TOKENS = np.array([10e6, 20e6, 40e6, 80e6])
IN_DOMAIN = np.array([4.0, 3.8, 3.6, 3.5])


def models(in_domain=IN_DOMAIN, *, documents: DocumentLosses | None = None, **losses) -> Evaluations:
    return Evaluations(TOKENS[: len(in_domain)], np.array(in_domain), losses, documents=documents)


def shifted(gap, in_domain=IN_DOMAIN) -> Evaluations:
    """Models on the line `ood = 2 * in_domain`, shifted up by `gap`."""
    return models(in_domain, code=2 * np.array(in_domain) + gap)


def gaps_of(candidates, reference, **options) -> dict[str, Gap]:
    return FinishedModels(candidates, reference, **options).gaps()


def test_the_gap_is_taken_at_the_lowest_loss_that_both_have_reached():
    slow = shifted(0.1, IN_DOMAIN + 0.1)
    assert pair_gaps(slow, slow)[:, 0] == pytest.approx(0)
    bent = models(code=np.array([8.0, 7.0, 5.0, 4.0]))
    late = models(IN_DOMAIN + 0.1, code=np.array([8.0, 7.5, 6.5, 6.0]))
    # 3.7 lies between 3.8 and 3.6 of the faster model, whose loss is a line in exp(CURVATURE x)
    ends = np.exp(CURVATURE * np.array([3.6, 3.7, 3.8]))
    share = (ends[1] - ends[0]) / (ends[2] - ends[0])
    assert pair_gaps(late, bent)[2, 0] == pytest.approx(6.5 - 5.0 - share * 2.0)
    assert pair_gaps(bent, late)[1:] == pytest.approx(-pair_gaps(late, bent)[1:])


def test_models_on_one_bent_curve_have_no_gap_however_fast_they_learn():
    """The losses of Transformer++ at 43M to 340M tokens, within 0.002 nats of this curve. Lines are 0.03 nats off."""

    def curve(x):
        return 3.3 + 1.278 * np.exp(1.337 * (x - 3.4))

    slow = np.array([3.790, 3.476, 3.274, 3.131])
    for lead in (0.05, 0.085, 0.12, 0.15):
        fast = slow - lead
        assert np.abs(pair_gaps(models(fast, code=curve(fast)), models(slow, code=curve(slow)))[1:]).max() < 0.001


def test_a_later_budget_changes_no_earlier_gap():
    fast, slow = models(IN_DOMAIN - 0.05, code=IN_DOMAIN**2), models(code=IN_DOMAIN**2 - 1)
    two = np.array([1, 2])
    assert pair_gaps(fast.at(two), slow.at(two))[1] == pytest.approx(pair_gaps(fast, slow)[2])


def test_a_seed_that_stopped_early_counts_at_the_budgets_that_it_has():
    whole, part = shifted(0.3), shifted(0.1, IN_DOMAIN[:3])
    found = gaps_of({"it": {0: whole, 1: whole, 2: part}}, dict.fromkeys(range(3), shifted(0.0)))["it"]
    assert [each.pairs for each in found.budgets] == [3, 3, 3, 2]
    assert found.budgets[2].raw.value == pytest.approx(0.7 / 3)
    assert found.headline.raw.value == pytest.approx(0.3)


def test_a_seed_at_other_budgets_leaves_the_gap_of_the_others():
    other = Evaluations(TOKENS * 16, IN_DOMAIN, {"code": IN_DOMAIN})
    pairs, reference = {0: shifted(0.1), 1: shifted(0.3)}, dict.fromkeys(range(3), shifted(0.0))
    found = gaps_of({"it": {**pairs, 2: other}}, reference, parts={"all": ({"it": {0: other}}, reference)})["it"]
    assert found == gaps_of({"it": pairs}, reference)["it"]
    assert found.seeds == (0, 1)
    assert found.headline.raw.value == pytest.approx(0.2)


def test_seeds_of_the_reference_count_at_the_budgets_that_they_have():
    def model(gap):
        return models(code=2 * IN_DOMAIN + gap, documents=documents(np.full(4, gap)))

    candidate = {seed: model(0.1 + 0.2 * seed) for seed in range(3)}
    kept = {0: np.array([0, 1, 3]), 1: np.array([0, 1, 2]), 2: np.arange(4)}
    reference = {seed: model(0.0).at(rows) for seed, rows in kept.items()}
    parts = {"other": ({"it": candidate}, reference)}
    found = gaps_of({"it": candidate}, reference, parts=parts)["it"]
    assert [each.tokens for each in found.budgets] == TOKENS.tolist()
    assert [each.pairs for each in found.budgets] == [3, 3, 2, 2]
    means = [0.3, 0.3, 0.4, 0.3]  # of the seeds 1 and 2 at the third budget, of 0 and 2 at the last
    assert [each.raw.value for each in found.budgets] == pytest.approx(means)
    assert [each.in_domain for each in found.budgets] == pytest.approx(IN_DOMAIN)
    assert [each.parts["other"].value for each in found.budgets] == pytest.approx(means)


def test_parts_of_the_tokens_have_gaps_of_their_own_where_they_were_measured():
    reference = {0: shifted(0.0), 1: shifted(0.0)}
    parts = {"recallable": ({"it": {1: shifted(0.4)}}, {1: shifted(0.0)}), "other": ({"it": {}}, {})}
    found = gaps_of({"it": {0: shifted(0.1), 1: shifted(0.1)}}, reference, parts=parts)["it"].headline
    assert {part: (gap.value, gap.half_width) for part, gap in found.parts.items()} == {
        "recallable": (pytest.approx(0.4), float("inf"))
    }
    assert found.raw.value == pytest.approx(0.1)
    three = {seed: shifted(0.4 + 0.1 * seed) for seed in (-1, 0, 1)}
    parts = {"other": ({"it": three}, dict.fromkeys(three, shifted(0.0)))}
    found = gaps_of({"it": three}, dict.fromkeys(three, shifted(0.0)), parts=parts)["it"].headline
    assert found.parts["other"].value == pytest.approx(found.raw.value)
    assert found.parts["other"].half_width == pytest.approx(found.raw.half_width)


def test_each_budget_has_the_interval_of_its_own_deviation():
    spread = np.array([0.01, 0.01, 0.04, 0.02])
    each = {seed: shifted(0.1 + seed * spread) for seed in (-1, 0, 1)}
    found = gaps_of({"it": each}, dict.fromkeys(each, shifted(0.0)))["it"]
    widths = np.array([at.raw.half_width for at in found.budgets])
    assert widths / widths[-1] == pytest.approx(spread / spread[-1])


def test_where_the_faster_model_was_never_so_high_there_is_no_gap():
    gaps = pair_gaps(shifted(0.0, IN_DOMAIN + 0.15), shifted(0.0))
    assert np.isnan(gaps[0, 0])
    assert np.isfinite(gaps[1:, 0]).all()
    far = gaps_of({"far": {0: shifted(0.0, IN_DOMAIN + 0.15)}}, {0: shifted(0.0)})["far"]
    assert [each.tokens for each in far.budgets] == TOKENS[1:].tolist()


def test_a_model_that_a_larger_budget_made_worse_does_not_raise_the_floor():
    worse = np.array([4.0, 3.8, 3.6, 3.7])
    assert pair_gaps(shifted(0.1, worse), shifted(0.0))[:, 0] == pytest.approx(0.1)
    bent = models(code=np.array([8.0, 7.0, 5.0, 4.0]))
    assert pair_gaps(models(worse, code=2 * worse), bent)[3, 0] == pytest.approx(7.2 - 5.0)


def test_only_seeds_of_both_are_paired():
    seeds = {0: shifted(0.1), 1: shifted(0.3), 2: shifted(9.0)}
    found = gaps_of({"it": seeds}, {0: shifted(0.0), 1: shifted(0.0), 5: shifted(-9.0)})["it"]
    assert found.seeds == (0, 1)
    assert found.headline.raw.value == pytest.approx(0.2)


def test_a_pair_stands_at_its_seed_of_the_reference():
    """Deviations of two models are compared seed by seed, also if one lacks the first seed."""
    reference = {seed: shifted(0.0) for seed in range(3)}
    pairs = seed_pairs("it", {2: shifted(0.2), 1: shifted(0.1)}, reference)[:, -1, 0]
    assert pairs == pytest.approx([np.nan, 0.1, 0.2], nan_ok=True)


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
    without = gaps_of({"it": bare}, reference)["it"].headline.raw.half_width
    with_documents = gaps_of(candidates, reference)["it"].headline.raw.half_width
    # of four draws of four documents the last comes up k times, k binomial with variance 4 * 1/4 * 3/4
    of_documents = 0.4 * (4 * 0.25 * 0.75) ** 0.5 / 4
    assert (with_documents**2 - without**2) ** 0.5 == pytest.approx(NORMAL * of_documents, rel=0.1)


def test_more_pairs_narrow_only_their_part_of_the_interval():
    gap = np.array([0.0, 0.0, 0.02, 0.06])
    candidates = {
        "it": {s: models(code=2 * IN_DOMAIN + 0.5 * gap * (s - 1), documents=documents(gap)) for s in range(3)}
    }
    reference = {s: models(code=2 * IN_DOMAIN, documents=documents(0 * gap)) for s in range(3)}
    change = gaps_of(candidates, reference)["it"].change
    assert change is not None
    assert change.documents == pytest.approx(NORMAL * 0.04 * (4 * 0.25 * 0.75) ** 0.5 / 4, rel=0.1)

    def half(pairs: int) -> float:
        return np.hypot(half_width(change.variance, change.prior + pairs - 1, pairs), change.documents)

    assert change.half_width == pytest.approx(half(3))
    needed = next(pairs for pairs in range(4, 21) if abs(change.value) + half(pairs) <= TOLERANCE)
    assert change.pairs_needed == needed > (replace(change, documents=0.0).pairs_needed or 0)
    assert replace(change, documents=TOLERANCE).pairs_needed is None


def test_a_candidate_that_is_not_yet_through_is_compared_at_the_budgets_it_has():
    half = {0: shifted(0.1, IN_DOMAIN[:3]), 1: shifted(0.1, IN_DOMAIN[:3])}
    candidates = {"whole": {0: shifted(0.2), 1: shifted(0.2)}, "half": half}
    found = gaps_of(candidates, {0: shifted(0.0), 1: shifted(0.0)})
    assert [each.tokens for each in found["half"].budgets] == TOKENS[:3].tolist()
    assert found["half"].headline.raw.value == pytest.approx(0.1)
    assert [each.tokens for each in found["whole"].budgets] == TOKENS.tolist()


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UserError, match="it and the reference have no seed in common"):
        gaps_of({"it": {1: shifted(0.0)}}, {0: shifted(0.0)})
    with pytest.raises(UserError, match="no gap for it: at no budget do it and the reference"):
        gaps_of({"it": {0: shifted(0.0, IN_DOMAIN + 9)}}, {0: shifted(0.0)})
    other = Evaluations(TOKENS * 16, IN_DOMAIN, {"code": IN_DOMAIN})
    with pytest.raises(UserError, match=r"160M, 320M, 640M, 1\.28B and of 10M, 20M, 40M, 80M tokens"):
        gaps_of({"it": {0: other}}, {0: shifted(0.0)})


def test_neither_mean_depends_on_the_other_models_of_an_exam():
    random = np.random.default_rng(0)

    def model():
        return {
            seed: models(arxiv=2 * IN_DOMAIN + random.normal(), wiki=IN_DOMAIN + random.normal()) for seed in range(3)
        }

    one, other, reference = model(), model(), model()
    alone, both = gaps_of({"it": one}, reference)["it"], gaps_of({"it": one, "other": other}, reference)["it"]
    assert alone.headline.raw.value == both.headline.raw.value
    assert alone.headline.standardised.value == both.headline.standardised.value
    assert alone.headline.standardised.half_width != both.headline.standardised.half_width
    weights = np.array([0.0651, 0.3457])
    domains = np.array([alone.headline.domains[name] for name in ("arxiv", "wiki")])
    assert alone.headline.standardised.value == pytest.approx(domains @ weights / weights.sum())
    assert alone.headline.raw.value == pytest.approx(domains.mean())


def test_domains_without_a_published_weight_weigh_the_same():
    assert fixed_weights(["arxiv", "law"]).tolist() == [0.5, 0.5]


def test_the_tokens_at_which_both_have_the_compared_loss():
    fast = shifted(0.0, IN_DOMAIN - 0.1)
    mine, reference = gaps_of({"it": {0: fast}}, {0: shifted(0.0)})["it"].headline.effective
    # 3.5 is the last loss of the slower model, and that of the faster one at 40M tokens
    assert (mine, reference) == (pytest.approx(40e6), pytest.approx(80e6))
    half_way = tokens_at(fast, np.array([3.6]))
    assert half_way == pytest.approx((20e6 * 40e6) ** 0.5)


def test_the_gap_at_the_highest_shared_loss_is_the_other_end_of_the_range():
    moving = shifted(np.array([0.4, 0.3, 0.2, 0.1]))
    assert gaps_of({"it": {0: moving}}, {0: shifted(0.0)})["it"].highest == pytest.approx(0.4)


def verdict(gap, *, copied: float | None = 2.0, spread: float = 0.005, pairs: int = 3, **options) -> Gap:
    """The gap of a model whose pairs differ by `spread` (and a fifth of it in the change), next to an equal one."""
    grows = 1 + 0.2 * np.arange(4)
    seeds = range(pairs)
    models_of = {
        name: {s: shifted(np.array(gap) + spread * (s - (n - 1) / 2) * grows) for s in range(n)}
        for name, n in (("it", pairs), ("other", 3))
    }
    gains = {} if copied is None else {int(TOKENS[-1]): copied}
    reference = dict.fromkeys(range(max(3, len(seeds))), shifted(0.0))
    return gaps_of(models_of, reference, of_reference=gains, **options)["it"]


def test_a_gap_that_stays_is_settled_and_its_sign_said():
    gap = verdict([0.4, 0.3, 0.2, 0.21])
    assert gap.settled
    last = gap.headline.raw
    assert gap.sentence("it", "base") == (
        f"it is worse than base: +0.210 [{last.low:+.3f}, {last.high:+.3f}] nats per token at 80M tokens; "
        f"standardised +0.210 [{last.low:+.3f}, {last.high:+.3f}]"
    )
    assert verdict([-0.4, -0.3, -0.2, -0.21]).sentence("it", "base").startswith("it is better than base: -0.210")
    assert verdict([0.4, 0.3, 0.0, 0.0]).sentence("it", "base").startswith("it shows no difference from base: ")


def test_a_gap_that_moves_is_not_called_better():
    moving = verdict([-0.8, -0.4, -0.2, -0.1])
    assert not moving.settled
    assert moving.change is not None
    assert moving.change.value == pytest.approx(0.1)
    assert moving.sentence("it", "base") == (
        "it against base is not settled: -0.800 at 10M, -0.400 at 20M, -0.200 at 40M, -0.100 at 80M tokens; "
        "still moving by +0.100 per doubling of the tokens (allowed: 0.03), so train to about 160M tokens"
    )


def test_a_change_must_be_shown_to_be_small():
    """0.02 with an interval of 0.0085 is within the tolerance, and with one of 0.034 it is not."""
    assert verdict([0.5, 0.2, 0.22, 0.2], spread=0.01).settled
    wide = verdict([0.5, 0.2, 0.22, 0.2], spread=0.04)
    assert wide.change is not None
    assert abs(wide.change.value) < TOLERANCE < abs(wide.change.value) + wide.change.half_width
    assert not wide.settled
    assert "3 pairs of seeds are too few; about " in wide.sentence("it", "base")
    more = wide.change.pairs_needed
    assert more is not None
    assert verdict([0.5, 0.2, 0.2, 0.2], spread=0.04 / more, pairs=more).settled


def test_a_drift_over_three_budgets_is_not_settled():
    assert verdict([0.3, 0.2, 0.185, 0.17]).unsettled.startswith("it drifts over three budgets, so train to about 160M")
    assert verdict([0.3, 0.2, 0.185, 0.2]).settled
    assert verdict([0.3, 0.2, 0.199, 0.198]).settled
    both = verdict([0.3, 0.2, 0.185, 0.17], spread=0.008)  # by more than half of the interval, each change by less
    assert 0.015 < both.headline.standardised.half_width < 0.03
    assert both.unsettled.startswith("it drifts")


def test_a_gap_at_one_budget_is_not_settled():
    fast = dict.fromkeys(range(2), shifted(0.0, IN_DOMAIN[:2]))
    found = gaps_of({"it": dict.fromkeys(range(2), shifted(0.2, IN_DOMAIN[:2] + 0.05))}, fast)["it"]
    assert (len(found.budgets), found.change) == (1, None)
    assert found.sentence("it", "base").endswith("finish models at two budgets or more")


def test_one_pair_settles_nothing_and_says_how_many_would():
    one = verdict([0.5, 0.2, 0.2, 0.2], pairs=1)
    assert np.isfinite(one.headline.raw.half_width)
    assert not one.settled
    assert one.sentence("it", "base").endswith(
        "one pair of seeds settles nothing; about 2 would settle this gap if it stays as it is"
    )
    alone = gaps_of({"it": {0: shifted(0.2)}}, {0: shifted(0.0)}, of_reference={80_000_000: 2.0})["it"]
    assert alone.sentence("it", "base").endswith("one pair of seeds settles nothing, so train more")


@pytest.mark.parametrize(
    ("copied", "word"),
    [(None, "measure copying"), (COPIES - 0.01, "saves only 0.99 nats"), (-0.001, "saves only 0.00 nats")],
)
def test_nothing_is_settled_before_the_reference_copies(copied, word):
    found = verdict([0.2, 0.2, 0.2, 0.2], copied=copied)
    assert not found.settled
    assert word in found.sentence("it", "base")


def test_better_and_worse_must_exceed_the_floor():
    for floor, word in ((0.1, "worse"), (0.205, "no difference")):
        candidates = {
            "it": {s: shifted(0.2 + 0.001 * s) for s in range(3)},
            "base at another rate": {0: shifted(-floor)},
        }
        reference = dict.fromkeys(range(3), shifted(0.0))
        options = {"of_reference": {80_000_000: 2.0}, "neighbour": "base at another rate"}
        found = gaps_of(candidates, reference, **options)["it"]
        assert found.floor == pytest.approx(floor)
        assert found.word == word


def test_runs_that_can_settle_nothing_say_so_first():
    small = verdict([0.2, 0.2, 0.2, 0.2], limits="A tiny exam settles nothing")
    assert not small.settled
    assert small.sentence("it", "base").startswith("A tiny exam settles nothing: it is above base: +0.200")
    zero = verdict([0.2, 0.2, 0.0, 0.0], limits="A tiny exam settles nothing")
    assert ": it cannot be told apart from base: +0.000" in zero.sentence("it", "base")
