import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from seqarch.data.order import ROUND, DomainOrder, SampleOrder, _proportional, permute


def mixture(names: tuple[str, ...], sizes: tuple[int, ...], weights: tuple[float, ...], seed: int) -> SampleOrder:
    """Domains of one shard each."""
    return SampleOrder(
        tuple(DomainOrder(*each, seed) for each in zip(names, ((n,) for n in sizes), strict=True)), weights
    )


def permutation(size: int, *key: object) -> list[int]:
    return permute(np.arange(size), size, *key).tolist()


def located(order: SampleOrder, positions: Iterable[int]) -> list[tuple[int, int]]:
    """(domain, index) at each position."""
    return [(domain, index) for domain, _, index in order.locate(np.array(positions)).tolist()]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_permute_sends_a_range_onto_itself(size: int) -> None:
    assert sorted(permutation(size, 7, "web", 0)) == list(range(size))


def test_another_key_is_another_permutation() -> None:
    keys = [(7, "web", 0), (8, "web", 0), (7, "code", 0), (7, "web", 1)]
    permutations = [permutation(500, *key) for key in keys]
    for one, other in itertools.combinations(permutations, 2):
        fixed = sum(a == b for a, b in zip(one, other, strict=True))
        assert fixed < 10


def test_permute_leaves_no_trend() -> None:
    size = 4096
    image = permutation(size, "seed")
    neighbours = [abs(a - b) for a, b in itertools.pairwise(image)]
    # Two independent uniform numbers are a third of the range apart on average.
    assert sum(neighbours) / len(neighbours) == pytest.approx(size / 3, rel=0.03)


def test_the_order_never_changes() -> None:
    """The same seed must mean the same samples on every machine and in every later version."""
    order = mixture(("web", "code"), (1000, 300), (0.7, 0.3), seed=1)
    assert located(order, [0, 1, 2, 3, 4095, 4096, 123_456_789]) == GOLDEN
    sevenths = mixture(("web", "code"), (1000, 300), (5.0, 2.0), seed=1)  # a round has no whole sevenths
    assert located(sevenths, [4095, 4096, 5001, 123_456_789]) == GOLDEN_SEVENTHS


GOLDEN_SEVENTHS = [(0, 332), (0, 417), (0, 424), (1, 234)]
GOLDEN = [(0, 305), (1, 228), (0, 333), (0, 497), (0, 203), (0, 252), (0, 408)]


def test_one_domain_is_passed_through_whole() -> None:
    order = mixture(("web",), (37,), (2.0,), seed=0)
    first, second = ([index for _, index in located(order, range(start, start + 37))] for start in (0, 37))
    assert sorted(first) == sorted(second) == list(range(37))
    assert first != second


def test_each_domain_of_a_mixture_is_passed_through_whole() -> None:
    order = mixture(("web", "code"), (50, 7), (3.0, 1.0), seed=0)
    found = located(order, range(2 * ROUND))
    for domain, size in enumerate((50, 7)):
        samples = [index for number, index in found if number == domain]
        for start in range(0, len(samples) - size, size):
            assert sorted(samples[start : start + size]) == list(range(size))


def test_any_stretch_holds_the_weights() -> None:
    weights = (0.52, 0.33, 0.15)
    order = mixture(("a", "b", "c"), (999, 999, 999), weights, seed=0)
    domains = [domain for domain, _ in located(order, range(2 * ROUND))]
    for start in range(0, 2 * ROUND - 100, 613):
        counts = Counter(domains[start : start + 100])
        assert [counts[domain] for domain in range(3)] == pytest.approx([100 * weight for weight in weights], abs=2)


def test_a_domain_keeps_its_order_whatever_stands_beside_it() -> None:
    alone = mixture(("code",), (80,), (1.0,), seed=3)
    both = mixture(("web", "code"), (500, 80), (5.0, 1.0), seed=3)
    found = [index for domain, index in located(both, range(2000)) if domain == 1]
    assert found == [index for _, index in located(alone, range(len(found)))]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (0.999, 0.001), (1e9, 1e-9), (0.2, 0.5, 0.3)])
def test_proportional_shares(weights: tuple[float, ...]) -> None:
    shares = _proportional(weights, 1000)
    assert sum(shares) == 1000
    assert min(shares) >= 1
    exact = [1000 * weight / sum(weights) for weight in weights]
    assert shares == pytest.approx(exact, abs=len(weights))


SHARDS = (9, 4, 0, 12, 7, 5, 11, 2)
"""Samples in the shards of a domain."""


@pytest.mark.parametrize("window", [None, len(SHARDS), 100])
def test_a_window_of_the_whole_domain_is_the_order_of_old(window: int | None) -> None:
    """Runs that began before there were windows repeat their curves bit for bit."""
    order = DomainOrder("web", (400_000, 600_000, 3), 7, window)
    turns = [0, 1, 2, 1_000_002, 1_000_003, 5 * 10**9]
    assert order.locate(np.array(turns)).tolist() == [478332, 983780, 220372, 902279, 67640, 821745]


@pytest.mark.parametrize("window", [1, 2, 3, 7])
def test_a_pass_goes_through_the_domain_window_by_window(window: int) -> None:
    order = DomainOrder("web", SHARDS, 1, window)
    shard_of = [shard for shard, n in enumerate(SHARDS) for _ in range(n)]
    passes = [order.locate(start + np.arange(order.size)).tolist() for start in (0, 2 * order.size)]
    assert passes[0] != passes[1]
    for number, samples in zip((0, 2), passes, strict=True):
        assert sorted(samples) == list(range(order.size))
        groups = [order.group(number * order.size + index) for index in range(order.size)]
        assert groups == sorted(groups)
        for group in set(groups):
            turns = [number * order.size + index for index, of in enumerate(groups) if of == group]
            assert list(order.turns_of(group)) == turns
            members = [sample for sample, of in zip(samples, groups, strict=True) if of == group]
            shards = order.shards_of(group)
            assert len(shards) <= window
            assert {shard_of[sample] for sample in members} == {shard for shard in shards if SHARDS[shard]}
            assert len(members) == sum(SHARDS[shard] for shard in shards)
            assert len(members) < 9 or members != sorted(members)


@pytest.mark.parametrize(
    ("window", "samples"),
    [(2, [17, 20, 19, 42, 45, 47, 12]), (4, [19, 36, 17, 2, 9, 47, 25])],
    ids=["four groups", "two groups"],
)
def test_the_order_within_windows_never_changes(window: int, samples: list[int]) -> None:
    order = DomainOrder("web", SHARDS, 1, window)
    turns = [0, 1, 2, 49, 50, 51, 10**9]
    assert order.locate(np.array(turns)).tolist() == samples


def test_windows_of_another_pass_and_seed_hold_other_shards() -> None:
    first = DomainOrder("web", (5,) * 30, 1, 5)
    groups = [first.shards_of(group) for group in range(12)]
    for one_pass in (groups[:6], groups[6:]):
        assert sorted(itertools.chain(*one_pass)) == list(range(30))
    assert groups[:6] != groups[6:]
    assert groups[:6] != [DomainOrder("web", (5,) * 30, 2, 5).shards_of(group) for group in range(6)]
