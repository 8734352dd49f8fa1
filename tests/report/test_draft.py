"""The properties of the gap during training, and what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.report.draft import MIN_OVERLAP, distance_curve, draft_gap
from seqarch.report.runs import Evaluations
from seqarch.runs.tags import MEAN
from seqarch.tables import readable


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


def values(*args) -> np.ndarray:
    return np.array(list(draft_gap(*args).gaps.values()))


SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_gap_of_seeds_against_themselves_is_zero(seed):
    runs = [course(10 * seed + i) for i in range(3)]
    assert values(runs, runs) == pytest.approx(np.zeros(3), abs=1e-12)


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


def test_gap_does_not_depend_on_the_order_of_seeds_or_of_domains_of_the_mean():
    runs, references = [course(i) for i in range(3)], [course(10 + i) for i in range(2)]
    assert values(runs[::-1], references[::-1]) == pytest.approx(values(runs, references), abs=1e-12)


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12"), (1_650, "1.65k"), (999_960, "1M"), (12_340_000, "12.3M"), (1e11, "100B")]
)
def test_readable(count, text):
    assert readable(count) == text


@SEEDS
def test_gap_moves_with_a_shift_of_the_run(seed):
    run, reference = course(seed), course(seed + 100, speed=1.3)
    shift = {"arxiv": 0.25, "code": -0.125}
    moved = dataclasses.replace(run, losses={name: loss + shift[name] for name, loss in run.losses.items()})
    by = np.array([0.25, -0.125, 0.0625])
    assert values([moved], [reference]) - values([run], [reference]) == pytest.approx(by, abs=1e-9)


@SEEDS
def test_gap_does_not_depend_on_the_order_of_points(seed):
    run, reference = course(seed, noise=0.05), course(seed + 100)
    shuffled = run.at(np.random.default_rng(seed).permutation(len(run.tokens)))
    assert draft_gap([shuffled], [reference]) == draft_gap([run], [reference])


def test_gap_is_the_vertical_distance_of_two_lines():
    x, tokens = np.linspace(5.0, 3.0, 12), np.full(12, 1)
    run = Evaluations(tokens, x, {"arxiv": 2 * x + 0.3})
    gap = draft_gap([run], [Evaluations(tokens, x - 0.1, {"arxiv": 2 * (x - 0.1)})])
    assert gap.gaps == {"arxiv": pytest.approx(0.3, abs=1e-12)}
    assert gap.overlap == (3.0, pytest.approx(4.9))
    assert gap.points == 22


def test_gap_weighs_evaluations_and_not_nats():
    """Ten points at distance 1 within a tenth of a nat outweigh two points at distance 0 that span a nat."""
    x = np.array([4.0, 3.5, *np.linspace(3.0, 2.9, 10)])
    zero = Evaluations(np.full(12, 1), x, {"arxiv": np.zeros(12)})
    one = dataclasses.replace(zero, losses={"arxiv": np.array([0.0, 0.0, *np.ones(10)])})
    assert values([one], [zero]) == pytest.approx([10 / 12])


def test_a_pair_without_a_point_in_the_losses_that_all_share_does_not_count():
    """The third run ends where the pair of the first two has no evaluation."""
    level = {"arxiv": np.zeros(2)}
    sparse, ends = Evaluations(np.ones(2), np.array([5.0, 3.0]), level), np.array([4.5, 4.2])
    other = dataclasses.replace(sparse, losses={"arxiv": np.ones(2)})
    third = Evaluations(np.ones(2), ends, {"arxiv": np.full(2, 0.25)})
    assert values([sparse, third], [other]) == pytest.approx([-0.75])


def test_points_of_equal_in_domain_loss_are_averaged():
    x = np.array([4.0, 3.8, 3.8, 3.6, 3.4])
    run = Evaluations(np.full(5, 1), x, {"arxiv": np.array([1.0, 0.5, 1.5, 1.0, 1.0])})
    level = dataclasses.replace(run.at(np.array([0, 1, 3, 4])), losses={"arxiv": np.ones(4)})
    assert values([run], [level]) == pytest.approx([0.0], abs=1e-12)


def test_mean_is_the_mean_of_the_domains_and_a_single_domain_has_none():
    gaps = draft_gap([course(0, gap=0.05)], [course(1)]).gaps
    assert list(gaps) == ["arxiv", "code", MEAN]
    assert gaps[MEAN] == pytest.approx((gaps["arxiv"] + gaps["code"]) / 2)
    alone = [dataclasses.replace(course(seed), losses={"code": course(seed).losses["code"]}) for seed in (0, 1)]
    assert list(draft_gap([alone[0]], [alone[1]]).gaps) == ["code"]


def test_early_training_is_left_out():
    run, reference = course(0), course(1)
    for points, counts in ((2, False), (3, True)):  # of 24
        spoilt = run.losses["arxiv"] + 100 * (np.arange(24) < points)
        spoilt_run = dataclasses.replace(run, losses={**run.losses, "arxiv": spoilt})
        assert (values([spoilt_run], [reference])[0] > 1) == counts


def test_too_small_an_overlap_is_refused():
    for overlap in (MIN_OVERLAP + 0.001, MIN_OVERLAP - 0.001):
        reference = Evaluations(np.full(50, 1), np.linspace(4, 3, 50), {"arxiv": np.linspace(5, 4, 50)})
        run = dataclasses.replace(reference, in_domain=reference.in_domain + 1 - overlap)
        if overlap > MIN_OVERLAP:
            assert draft_gap([run], [reference])
        else:
            with pytest.raises(UserError, match=r"no gap for 'a' against 'b': they share 0.049 nats of in-domain loss"):
                draft_gap([run], [reference], names=("'a'", "'b'"))


def test_distance_curve_is_what_the_gap_averages():
    run, reference = course(0, gap=0.05), course(1)
    x, distance = distance_curve(run, [reference])
    back_x, back = distance_curve(reference, [run])
    assert np.all(np.diff(x) > 0)
    both = np.concatenate([distance["arxiv"], -back["arxiv"]])
    gap = draft_gap([run], [reference])
    assert gap.points == len(x) + len(back_x)
    assert both.mean() == pytest.approx(gap.gaps["arxiv"])
    higher = dataclasses.replace(reference, losses={name: loss + 0.1 for name, loss in reference.losses.items()})
    assert distance_curve(run, [reference, higher])[1]["arxiv"] == pytest.approx(distance["arxiv"] - 0.05)
