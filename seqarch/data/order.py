"""The order of training samples: a pure function of (seed, position).

Nothing is drawn and nothing is remembered, so a resumed run, another number of loader workers or another number of
devices sees the same samples at the same optimizer step.
"""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

ROUND = 1 << 12
"""Samples in a round of a mixture; in each, every domain has its share, to one part in 4,096."""

_FEISTEL_ROUNDS = 6
_MASK64 = (1 << 64) - 1


@functools.lru_cache(maxsize=4096)
def _keys(*parts: object) -> tuple[int, ...]:
    """One 64-bit key a Feistel round, from whatever names the permutation."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def permute(index: int, size: int, *key: object) -> int:
    """Where a keyed pseudo-random permutation of `range(size)` sends `index`, without building the permutation.

    A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = _keys(*key)
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


@dataclass(frozen=True)
class DomainOrder:
    """The order of one domain's samples: pass after pass over the whole domain, each in another order.

    With a window, a pass permutes the shards and takes them in groups. It goes through all samples of a group, in
    random order, before it begins the next group. Without one, it permutes all samples of the domain.

    Args:
        name: keys the permutations, so that the order does not depend on the other domains of a mixture.
        shards: samples in each shard.
        seed: another seed is another order.
        window: shards in a group; `None`, or as many as there are, for the whole domain.
    """

    name: str
    shards: tuple[int, ...]
    seed: int
    window: int | None = None

    @functools.cached_property
    def size(self) -> int:
        """Samples in the domain."""
        return sum(self.shards)

    @functools.cached_property
    def _group(self) -> int:
        """Shards in a group."""
        return min(self.window or len(self.shards), len(self.shards))

    @functools.cached_property
    def _first_samples(self) -> list[int]:
        return list(itertools.accumulate(self.shards, initial=0))

    @functools.cached_property
    def _passes(self) -> dict[int, tuple[list[int], list[int]]]:
        return {}

    def _pass(self, epoch: int) -> tuple[list[int], list[int]]:
        """The shards in the order of a pass, and how many samples of the pass come before each of them."""
        if epoch not in self._passes:
            self._passes.clear()
            n = len(self.shards)
            order = [permute(i, n, self.seed, self.name, epoch, "shards") for i in range(n)]
            starts = list(itertools.accumulate((self.shards[shard] for shard in order), initial=0))
            self._passes[epoch] = order, starts
        return self._passes[epoch]

    def locate(self, turn: int) -> int:
        """Index in the domain of its `turn`-th sample of training."""
        epoch, index = divmod(turn, self.size)
        if self._group == len(self.shards):
            return permute(index, self.size, self.seed, self.name, epoch)
        order, starts = self._pass(epoch)
        group = (bisect.bisect_right(starts, index) - 1) // self._group
        first, stop = starts[group * self._group], starts[min((group + 1) * self._group, len(order))]
        index = first + permute(index - first, stop - first, self.seed, self.name, epoch, group)
        place = bisect.bisect_right(starts, index) - 1
        return self._first_samples[order[place]] + index - starts[place]

    def group(self, turn: int) -> int:
        """Number of the group, counted from the first pass on, that the `turn`-th sample belongs to."""
        epoch, index = divmod(turn, self.size)
        place = 0 if self._group == len(self.shards) else bisect.bisect_right(self._pass(epoch)[1], index) - 1
        return epoch * -(-len(self.shards) // self._group) + place // self._group

    def turns_of(self, group: int) -> range:
        """The turns of a group."""
        epoch, number = divmod(group, -(-len(self.shards) // self._group))
        starts = self._pass(epoch)[1]
        ends = (starts[min(first * self._group, len(self.shards))] for first in (number, number + 1))
        return range(*(epoch * self.size + end for end in ends))

    def shards_of(self, group: int) -> list[int]:
        """The shards of a group."""
        epoch, number = divmod(group, -(-len(self.shards) // self._group))
        return self._pass(epoch)[0][number * self._group : (number + 1) * self._group]


@dataclass(frozen=True)
class SampleOrder:
    """The sample at each position of the endless training stream.

    Args:
        domains: the order of each domain.
        weights: share of the stream of each domain; positive, of any sum.
    """

    domains: tuple[DomainOrder, ...]
    weights: tuple[float, ...]

    @functools.cached_property
    def _shares(self) -> list[int]:
        return _proportional(self.weights, ROUND)

    @functools.cached_property
    def _round(self) -> list[tuple[int, int]]:
        """(domain, which of its samples of this round) for each slot of a round, every domain evenly spread."""
        spread = sorted(
            ((turn + 0.5) / share, domain, turn) for domain, share in enumerate(self._shares) for turn in range(share)
        )
        return [(domain, turn) for _, domain, turn in spread]

    def turn(self, position: int) -> tuple[int, int]:
        """(domain index, which of its samples, counted from the start of training) at `position`."""
        round_index, slot = divmod(position, ROUND)
        domain, turn = self._round[slot]
        return domain, round_index * self._shares[domain] + turn

    def locate(self, position: int) -> tuple[int, int]:
        """(domain index, sample index) at `position`. A domain is gone through whole before it starts again."""
        domain, turn = self.turn(position)
        return domain, self.domains[domain].locate(turn)


def _proportional(weights: Sequence[float], total: int) -> list[int]:
    """`total` cut in proportion to `weights` into whole numbers, at least one each, by largest remainder."""
    spare = total - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: spare - sum(shares)]:
        shares[i] += 1
    return [1 + share for share in shares]
