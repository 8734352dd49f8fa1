"""How often intervals hold, and how often `settled` is wrong, in simulated exams of models with unequal noise."""

from itertools import pairwise

import numpy as np
import pytest

from seqarch.report.estimates import PRIOR, TOLERANCE, half_widths, moderated, over_pairs

EXAMS = 20_000
ERROR = 3 * (0.95 * 0.05 / EXAMS) ** 0.5
UNEQUAL = (2.0, 0.7, 0.5)
THREE_TIMES = (3.0, 1.0, 1.0, 1.0)


def simulated(noise, pairs, *, rate=0.0, near=2, seed=0) -> np.ndarray:
    """Gaps of pairs `[exams, models, seeds]` without a true gap, in units of the deviation of a pair of equal noise.

    Half of the variance of such a pair comes from the runs of the reference, which all models share. `noise` is each
    model's own deviation. `rate` is that between learning rates, of which the seeds take `near` in turn.
    """
    random, seeds = np.random.default_rng(seed), max(pairs)
    own = np.array(noise)[:, None] * random.standard_normal((EXAMS, len(noise), seeds))
    gaps = 0.5**0.5 * (own - random.standard_normal((EXAMS, 1, seeds)))
    gaps += rate * random.standard_normal((EXAMS, len(noise), near))[..., np.arange(seeds) % near]
    for model, count in enumerate(pairs):
        gaps[:, model, count:] = np.nan
    return gaps


def held(gaps: np.ndarray) -> np.ndarray:
    """The share of the intervals that hold zero, by model."""
    return np.mean(np.abs(over_pairs(gaps, -1)) <= half_widths(gaps), axis=0)


@pytest.mark.parametrize(
    ("noise", "pairs"),
    [
        ((1.0, 1.0, 1.0), (3, 3, 3)),
        (UNEQUAL, (3, 3, 3)),
        (UNEQUAL, (3, 3, 2)),
        (UNEQUAL, (2, 2, 2)),
        (THREE_TIMES, (3, 3, 3, 3)),
        (THREE_TIMES, (2, 3, 3, 3)),
        (THREE_TIMES, (1, 3, 3, 3)),
    ],
)
def test_intervals_hold_the_gap_whatever_the_noise_of_each_model(noise, pairs):
    """On average over the models; the noisiest has the least (docs/exam.md)."""
    shares = held(simulated(noise, pairs))
    assert 0.93 <= np.mean(shares) <= 0.97
    assert min(shares) > 0.895


def test_one_pair_of_a_model_with_three_times_the_noise_has_an_interval():
    assert held(simulated(THREE_TIMES, (1, 3, 3, 3)))[0] > 0.93


@pytest.mark.parametrize(("noise", "pairs"), [((1.0,) * 3, (2, 2, 2)), ((1.0,) * 3, (3, 3, 3)), (UNEQUAL, (3, 3, 3))])
def test_seeds_at_near_rates_cover_the_choice_of_the_rate(noise, pairs):
    """0.015 nats next to 0.0176 between pairs, as measured at `small`. Seeds at one rate would hold 0.83."""
    spread = np.mean(held(simulated(noise, pairs, rate=0.015 / 0.0176)))
    one_rate = np.mean(held(simulated(noise, pairs, rate=0.015 / 0.0176, near=1)))
    assert 0.93 <= spread <= 0.97
    assert one_rate < 0.9


def test_more_pairs_narrow_the_interval():
    widths = [np.median(half_widths(simulated((1.0,) * 3, (pairs, 3, 3)))[:, 0]) for pairs in (1, 2, 3, 5)]
    assert all(one > more for one, more in pairwise(widths))


def test_the_variance_lies_between_the_own_and_the_pooled_one():
    samples = np.array([[0.0, 2.0, 4.0], [0.0, 1.0, np.nan], [7.0, np.nan, np.nan]])
    variance, freedom = moderated(samples)
    pooled = (8 + 0.5) / 3
    assert freedom == pytest.approx([PRIOR + 2, PRIOR + 1, PRIOR])
    assert variance == pytest.approx([(PRIOR * pooled + 8) / (PRIOR + 2), (PRIOR * pooled + 0.5) / (PRIOR + 1), pooled])
    assert np.isinf(half_widths(samples[2:])).all()


DEVIATION = 0.012
"""Nats between pairs of the change per doubling, as measured at `small`."""


def settled(drift: float, pairs: int, others: int, noise=(1.0, 1.0, 1.0, 1.0)) -> float:
    """How often the change of the first model is called small."""
    gaps = drift + DEVIATION * simulated(noise, (pairs, *[others] * (len(noise) - 1)), seed=1)
    small = np.abs(over_pairs(gaps, -1)) + half_widths(gaps) <= TOLERANCE
    return float(np.mean(small[:, 0]))


@pytest.mark.parametrize("noise", [(1.0,) * 4, (2.0, 0.7, 0.5), THREE_TIMES])
@pytest.mark.parametrize("pairs", [2, 3, 5, 8])
def test_a_drift_of_the_tolerance_is_rarely_settled(pairs, noise):
    assert settled(-TOLERANCE, pairs, 3, noise) <= 0.05


@pytest.mark.parametrize("drift", [0.0, -0.01, -0.02])
def test_fewer_pairs_never_settle_more(drift):
    shares = [settled(drift, pairs, 3) for pairs in (2, 3, 5)]
    assert all(few <= more + ERROR for few, more in pairwise(shares))


def test_three_pairs_settle_a_gap_that_stays():
    assert settled(0.0, 3, 3) > 0.6
