"""The properties that make the base-capability gap a measure, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.report.gap import (
    EARLY,
    MIN_OVERLAP,
    OverlapError,
    _blocks,
    _freedom,
    base_capability_gap,
    distance_curve,
    readable,
)
from seqarch.report.runs import Evaluations
from seqarch.runs.tags import MEAN


def course(
    seed: int, *, points: int = 24, gap: float = 0.0, noise: float = 0.01, speed: float = 1.0, offset: float = 0.0
) -> Evaluations:
    """A run whose losses fall as a power of its tokens, with noise that makes the in-domain loss rise at times."""
    random = np.random.default_rng(seed)
    tokens = np.arange(1, points + 1) * 1_000_000
    falling = 3.2 + 3.0 * (speed * tokens / 1e6) ** -0.5
    return Evaluations(
        tokens=tokens,
        in_domain=falling + random.normal(size=points) * noise,
        losses={
            "arxiv": 0.9 + 0.85 * falling + gap + offset + random.normal(size=points) * noise,
            "code": 0.4 + 1.1 * falling + 2 * gap + offset + random.normal(size=points) * noise,
        },
    )


def values(*args, **options) -> np.ndarray:
    return np.array([gap.value for gap in base_capability_gap(*args, **options)])


SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_gap_of_a_run_against_itself_is_zero_with_an_empty_interval(seed):
    run = course(seed)
    for gap in base_capability_gap([run], [run]):
        assert gap.value == gap.low == gap.high == 0.0


@SEEDS
def test_gap_of_seeds_against_themselves_is_zero(seed):
    runs = [course(10 * seed + i) for i in range(3)]
    assert values(runs, runs) == pytest.approx(np.zeros(3), abs=1e-12)


@SEEDS
def test_gap_moves_with_a_shift_of_the_run_and_against_a_shift_of_the_reference(seed):
    run, reference = course(seed), course(seed + 100, speed=1.3)
    shift = {"arxiv": 0.25, "code": -0.125}
    moved = dataclasses.replace(run, losses={name: loss + shift[name] for name, loss in run.losses.items()})
    before = base_capability_gap([run], [reference])
    after = base_capability_gap([moved], [reference])
    for old, new, by in zip(before, after, (0.25, -0.125, 0.0625), strict=True):
        assert (new.value, new.low, new.high) == pytest.approx((old.value + by, old.low + by, old.high + by), abs=1e-9)
    mirrored = values([reference], [moved])
    assert mirrored == pytest.approx(values([reference], [run]) - np.array([0.25, -0.125, 0.0625]), abs=1e-9)


@SEEDS
def test_gap_is_unchanged_when_both_in_domain_losses_shift(seed):
    pair = [course(seed), course(seed + 100, speed=1.3)]
    moved = [dataclasses.replace(one, in_domain=one.in_domain + 0.5) for one in pair]
    assert values([moved[0]], [moved[1]]) == pytest.approx(values([pair[0]], [pair[1]]), abs=1e-9)


@SEEDS
@pytest.mark.parametrize("counts", [(1, 1), (2, 3)])
def test_gap_is_antisymmetric(seed, counts):
    runs = [course(seed + 10 * i, gap=0.03) for i in range(counts[0])]
    references = [course(seed + 100 + 10 * i, points=17) for i in range(counts[1])]
    assert values(runs, references) == pytest.approx(-values(references, runs), abs=1e-12)


@SEEDS
def test_gap_does_not_depend_on_the_order_of_points(seed):
    run, reference = course(seed, noise=0.05), course(seed + 100)
    order = np.random.default_rng(seed).permutation(len(run.tokens))
    shuffled = Evaluations(
        run.tokens[order], run.in_domain[order], {name: loss[order] for name, loss in run.losses.items()}
    )
    assert base_capability_gap([shuffled], [reference]) == base_capability_gap([run], [reference])


def test_gap_does_not_depend_on_the_order_of_seeds_or_of_domains_of_the_mean():
    runs, references = [course(i) for i in range(3)], [course(10 + i) for i in range(2)]
    assert values(runs[::-1], references[::-1]) == pytest.approx(values(runs, references), abs=1e-12)


def test_gap_is_the_vertical_distance_of_two_lines():
    x = np.linspace(5.0, 3.0, 12)
    tokens = np.arange(1, 13)
    run = Evaluations(tokens, x, {"arxiv": 2 * x + 0.3})
    reference = Evaluations(tokens, x - 0.1, {"arxiv": 2 * (x - 0.1)})
    (gap,) = base_capability_gap([run], [reference], early=0.0)
    assert (gap.domain, gap.value, gap.low, gap.high) == ("arxiv", *[pytest.approx(0.3, abs=1e-12)] * 3)
    assert gap.overlap == (3.0, pytest.approx(4.9))
    assert gap.points == 22


def test_gap_weighs_evaluations_and_not_nats():
    """Ten points at distance 1 within a tenth of a nat outweigh two points at distance 0 that span a nat."""
    x = np.array([4.0, 3.5, *np.linspace(3.0, 2.9, 10)])
    zero = Evaluations(np.arange(1, 13), x, {"arxiv": np.zeros(12)})
    one = dataclasses.replace(zero, losses={"arxiv": np.array([0.0, 0.0, *np.ones(10)])})
    (gap,) = base_capability_gap([one], [zero], early=0.0)
    assert gap.value == pytest.approx(10 / 12)


def test_points_of_equal_in_domain_loss_are_averaged():
    x = np.array([4.0, 3.8, 3.8, 3.6, 3.4])
    run = Evaluations(np.arange(1, 6), x, {"arxiv": np.array([1.0, 0.5, 1.5, 1.0, 1.0])})
    flat = dataclasses.replace(run, losses={"arxiv": np.ones(5)})
    assert values([run], [flat], early=0.0) == pytest.approx([0.0], abs=1e-12)


def test_mean_is_the_mean_of_the_domains_and_a_single_domain_has_none():
    gaps = base_capability_gap([course(0, gap=0.05)], [course(1)])
    assert [gap.domain for gap in gaps] == ["arxiv", "code", MEAN]
    assert gaps[2].value == pytest.approx((gaps[0].value + gaps[1].value) / 2)
    alone = [dataclasses.replace(course(seed), losses={"code": course(seed).losses["code"]}) for seed in (0, 1)]
    assert [gap.domain for gap in base_capability_gap([alone[0]], [alone[1]])] == ["code"]


def test_early_training_is_left_out():
    run, reference = course(0), course(1)
    spoilt = run.losses["arxiv"].copy()
    spoilt[run.tokens < EARLY * run.tokens.max()] += 100
    spoilt_run = dataclasses.replace(run, losses={**run.losses, "arxiv": spoilt})
    assert values([spoilt_run], [reference]) == pytest.approx(values([run], [reference]))
    assert values([spoilt_run], [run], early=0.0)[0] > 1


def test_a_known_gap_is_recovered_inside_its_interval():
    gaps = base_capability_gap([course(0, gap=0.05, speed=0.9)], [course(1)])
    for gap, truth in zip(gaps, (0.05, 0.1, 0.075), strict=True):
        assert gap.low < truth < gap.high
        assert 0 < gap.high - gap.low < 0.04


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """300 pairs of runs whose evaluation noise is independent: 95 % of the intervals should hold the true gap."""
    hits = 0
    for trial in range(300):
        run, reference = course(2 * trial, gap=0.02), course(2 * trial + 1, speed=1.03)
        gap = base_capability_gap([run], [reference])[0]
        hits += gap.low <= 0.02 <= gap.high
    assert 0.91 <= hits / 300 <= 0.99


def test_several_seeds_widen_the_interval_by_how_much_they_differ():
    offsets = (-0.05, 0.0, 0.05)
    runs = [course(i, noise=0.001, gap=0.02, offset=offset) for i, offset in enumerate(offsets)]
    references = [course(10 + i, noise=0.001, offset=offset) for i, offset in enumerate(offsets)]
    one = base_capability_gap(runs[1:2], references[1:2])[0]
    three = base_capability_gap(runs, references)[0]
    assert one.high - one.low < 0.01
    # Student's interval for two means of three: 2.776 * sqrt(2/3) * 0.05 on either side
    assert three.high - three.low == pytest.approx(2 * 2.776 * np.sqrt(2 / 3) * 0.05, rel=0.2)
    assert three.value == pytest.approx(0.02, abs=0.005)
    assert three.seeds == (3, 3)


def test_interval_is_the_same_each_time():
    pair = [course(0)], [course(1)]
    assert base_capability_gap(*pair) == base_capability_gap(*pair)


def behind(by: float) -> Evaluations:
    """A run that starts `by` nats above the end of `course`, still falling."""
    run = course(0, noise=0.0)
    return dataclasses.replace(run, in_domain=run.in_domain - run.in_domain.min() + course(1).in_domain.max() - by)


def test_too_small_an_overlap_is_refused_with_how_much_more_training():
    early = dataclasses.replace(course(0, noise=0.0), in_domain=course(0, noise=0.0).in_domain + 2)
    with pytest.raises(OverlapError) as caught:
        base_capability_gap([early], [course(1, noise=0.0)], names=("'slow'", "'fast'"))
    said = str(caught.value)
    assert said.startswith("no gap for 'slow' against 'fast': their in-domain losses overlap nowhere (needed: 0.1 nats")
    assert "'slow' has to come down from 5.812 to" in said
    assert "more tokens" in said
    assert "'fast' has to" not in said


def test_the_training_asked_for_is_enough():
    """A run's loss falls by 0.4 nats per e-fold of tokens. The message says how many tokens lead to the overlap."""
    tokens = np.arange(1, 25) * 1_000_000
    reference = Evaluations(tokens, np.linspace(3.5, 3.0, 24), {"arxiv": np.linspace(4.5, 4.0, 24)})

    def slow(tokens: np.ndarray) -> Evaluations:
        inside = 5.0 - 0.4 * np.log(tokens / 1e6)
        return Evaluations(tokens, inside, {"arxiv": inside + 1})

    with pytest.raises(OverlapError) as caught:
        base_capability_gap([slow(tokens)], [reference], names=("'slow'", "'fast'"), early=0.0)
    factor = float(str(caught.value).split(" tokens (")[1].split(" times")[0])
    expected = np.exp((5.0 - 0.4 * np.log(24) - 3.4) / 0.4)
    assert factor == pytest.approx(expected, rel=0.05)
    longer = slow(np.linspace(1, 24 * expected * 1.05, 240) * 1e6)
    assert base_capability_gap([longer], [reference], early=0.0)[0].overlap[1] > 3.4


def test_the_reference_may_be_the_one_that_is_behind():
    late = dataclasses.replace(course(0), in_domain=course(0).in_domain + 2)
    with pytest.raises(OverlapError, match="'reference' has to come down"):
        base_capability_gap([course(1)], [late], names=("'run'", "'reference'"))


def test_an_overlap_with_too_few_points_is_refused():
    tokens = np.arange(1, 11)
    dense = Evaluations(tokens, np.linspace(4, 3, 10), {"arxiv": np.linspace(5, 4, 10)})
    sparse = Evaluations(tokens[:4], np.array([4.2, 4.1, 3.5, 3.0]), {"arxiv": np.array([5.2, 5.1, 4.5, 4.0])})
    with pytest.raises(OverlapError, match=r"with 2 points of one run inside .* evaluate more often"):
        base_capability_gap([sparse], [dense], early=0.0)
    lone = dataclasses.replace(sparse, in_domain=np.array([4.4, 4.3, 4.2, 3.5]))
    with pytest.raises(OverlapError, match=r"with 1 point of one run inside"):
        base_capability_gap([lone], [dense], early=0.0)
    with pytest.raises(OverlapError, match="the reference has fewer than 3 evaluations"):
        base_capability_gap([dense], [_first(sparse, 2)], early=0.0)


def _first(run: Evaluations, count: int) -> Evaluations:
    return Evaluations(run.tokens[:count], run.in_domain[:count], {k: v[:count] for k, v in run.losses.items()})


def test_a_run_that_no_longer_falls_is_said_to():
    stuck = Evaluations(np.arange(1, 11), np.linspace(5.0, 5.1, 10), {"arxiv": np.full(10, 6.0)})
    ahead = Evaluations(np.arange(1, 11), np.linspace(3.5, 3.0, 10), {"arxiv": np.full(10, 4.0)})
    with pytest.raises(OverlapError, match="but its loss no longer falls"):
        base_capability_gap([stuck], [ahead])


def test_the_threshold_of_the_overlap_binds():
    for overlap, enough in ((MIN_OVERLAP + 0.001, True), (MIN_OVERLAP - 0.001, False)):
        reference = Evaluations(np.arange(1, 51), np.linspace(4, 3, 50), {"arxiv": np.linspace(5, 4, 50)})
        run = dataclasses.replace(reference, in_domain=reference.in_domain + 1 - overlap)
        if enough:
            assert base_capability_gap([run], [reference], early=0.0)
        else:
            with pytest.raises(OverlapError):
                base_capability_gap([run], [reference], early=0.0)


def test_different_domains_are_refused():
    other = Evaluations(course(0).tokens, course(0).in_domain, {"law": course(0).losses["code"]})
    with pytest.raises(UserError, match="losses of different domains"):
        base_capability_gap([other], [course(1)])


def test_distance_curve_is_what_the_gap_averages():
    run, reference = course(0, gap=0.05), course(1)
    x, distance = distance_curve(run, [reference])
    back_x, back = distance_curve(reference, [run])
    assert np.all(np.diff(x) > 0)
    both = np.concatenate([distance["arxiv"], -back["arxiv"]])
    (gap, *_) = base_capability_gap([run], [reference])
    assert gap.points == len(x) + len(back_x)
    assert both.mean() == pytest.approx(gap.value)
    higher = dataclasses.replace(reference, losses={name: loss + 0.1 for name, loss in reference.losses.items()})
    assert distance_curve(run, [reference, higher])[1]["arxiv"] == pytest.approx(distance["arxiv"] - 0.05)


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12"), (1_650, "1.65k"), (999_960, "1M"), (12_340_000, "12.3M"), (1e11, "100B")]
)
def test_readable(count, text):
    assert readable(count) == text


def test_several_seeds_on_one_side_decide_the_degrees_of_freedom():
    curve = np.zeros((40, 1))
    assert _freedom([[curve, curve]]) == 1
    assert _freedom([[curve], [curve]]) == 1
    assert _freedom([[curve, curve, curve]] * 3) == 4
    assert _freedom([[curve]]) == _blocks(40)[1] - 1 > 1
