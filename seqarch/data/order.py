"""The order of training samples: a pure function of (seed, position).

Nothing is drawn and nothing is remembered, so a resumed run, another number of loader workers or another number of
devices sees the same samples at the same optimizer step.
"""

import functools
import hashlib
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
class SampleOrder:
    """Which sample stands at which position of the endless training stream.

    Args:
        names: domain names; they key the permutations, so that a domain's own order does not depend on its neighbours.
        sizes: samples in each domain.
        weights: share of the stream of each domain; positive, of any sum.
        seed: another seed is another order.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int

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

    def locate(self, position: int) -> tuple[int, int]:
        """(domain index, sample index) at `position`. A domain is gone through whole before it starts again."""
        round_index, slot = divmod(position, ROUND)
        domain, turn = self._round[slot]
        epoch, index = divmod(round_index * self._shares[domain] + turn, self.sizes[domain])
        return domain, permute(index, self.sizes[domain], self.seed, self.names[domain], epoch)


def _proportional(weights: Sequence[float], total: int) -> list[int]:
    """`total` cut in proportion to `weights` into whole numbers, at least one each, by largest remainder."""
    spare = total - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: spare - sum(shares)]:
        shares[i] += 1
    return [1 + share for share in shares]
