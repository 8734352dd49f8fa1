"""The order of training samples: a pure function of (seed, position).

Nothing is drawn and nothing is remembered, so a resumed run, another number of loader workers or another number of
devices sees the same samples at the same optimizer step.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

ROUND = 1 << 12
"""Samples in a round of a mixture; in each, every one of n domains has its share, to n parts in 4,096."""

_FEISTEL_ROUNDS = 6


def _mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64: every input bit moves every output bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


def permute(index: np.ndarray, size: int, *key: object) -> np.ndarray:
    """Where a keyed pseudo-random permutation of `range(size)` sends each `index [n]`, without building it.

    A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains").
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    image = index.astype(np.uint64)
    outside = np.ones(len(image), bool)
    while outside.any():
        left, right = image[outside] >> half, image[outside] & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        image[outside] = left << half | right
        outside = image >= size
    return image.astype(np.int64)


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

    def __init__(self, name: str, shards: tuple[int, ...], seed: int, window: int | None = None) -> None:
        self.name, self.shards, self.seed, self.window = name, shards, seed, window
        self.size = sum(shards)
        """Samples in the domain."""
        self._group = min(window or len(shards), len(shards))
        """Shards in a group."""
        self._groups = -(-len(shards) // self._group)
        """Groups in a pass."""
        self._first_samples = np.cumsum([0, *shards])
        self._passes: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _pass(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards in the order of a pass, and how many samples of the pass come before each of them."""
        if epoch not in self._passes:
            self._passes.clear()
            order = np.arange(len(self.shards))
            if self._groups > 1:
                order = permute(order, len(order), self.seed, self.name, epoch, "shards")
            self._passes[epoch] = order, np.cumsum([0, *np.array(self.shards)[order]])
        return self._passes[epoch]

    def locate(self, turns: np.ndarray) -> np.ndarray:
        """For each of `turns [n]`, the numbers of a domain's samples in training, the sample's index in the domain."""
        indices = np.empty_like(turns)
        todo = np.ones(len(turns), bool)
        while todo.any():
            group = self.group(int(turns[todo.argmax()]))
            epoch, number = divmod(group, self._groups)
            key = (self.seed, self.name, epoch) + ((number,) if self._groups > 1 else ())
            span, (order, starts) = self.turns_of(group), self._pass(epoch)
            here = (span.start <= turns) & (turns < span.stop)
            index = span.start - epoch * self.size + permute(turns[here] - span.start, len(span), *key)
            place = np.searchsorted(starts, index, "right") - 1
            indices[here] = self._first_samples[order[place]] + index - starts[place]
            todo &= ~here
        return indices

    def group(self, turn: int) -> int:
        """Number of the group, counted from the first pass on, that the `turn`-th sample belongs to."""
        epoch, index = divmod(turn, self.size)
        place = int(np.searchsorted(self._pass(epoch)[1], index, "right")) - 1
        return epoch * self._groups + place // self._group

    def turns_of(self, group: int) -> range:
        """The turns of a group."""
        epoch, number = divmod(group, self._groups)
        starts = self._pass(epoch)[1]
        ends = (starts[min(first * self._group, len(self.shards))] for first in (number, number + 1))
        return range(*(epoch * self.size + int(end) for end in ends))

    def shards_of(self, group: int) -> list[int]:
        """The shards of a group."""
        epoch, number = divmod(group, self._groups)
        return self._pass(epoch)[0][number * self._group : (number + 1) * self._group].tolist()


class SampleOrder:
    """The sample at each position of the endless training stream.

    Args:
        domains: the order of each domain.
        weights: share of the stream of each domain; positive, of any sum.
    """

    def __init__(self, domains: tuple[DomainOrder, ...], weights: tuple[float, ...]) -> None:
        self.domains = domains
        shares = _proportional(weights, ROUND)
        self._shares = np.array(shares)
        spread = sorted(
            ((turn + 0.5) / share, domain, turn) for domain, share in enumerate(shares) for turn in range(share)
        )
        self._round = np.array([(domain, turn) for _, domain, turn in spread]).T
        """For each slot of a round its domain and the number of its sample, `[2, ROUND]`; domains are evenly spread."""

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """`[n, 3]`: for each of `positions [n]` the domain, the sample's number in its training, and its index.

        A domain is gone through whole before it starts again. Many positions at once take a tenth of the time.
        """
        rounds, slots = np.divmod(positions, ROUND)
        domains, turns = self._round[:, slots]
        turns = rounds * self._shares[domains] + turns
        indices = np.empty_like(turns)
        for domain, order in enumerate(self.domains):
            here = domains == domain
            indices[here] = order.locate(turns[here])
        return np.stack([domains, turns, indices], axis=1)


def _proportional(weights: Sequence[float], total: int) -> list[int]:
    """`total` cut in proportion to `weights` into whole numbers, at least one each, by largest remainder."""
    spare = total - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: spare - sum(shares)]:
        shares[i] += 1
    return [1 + share for share in shares]
