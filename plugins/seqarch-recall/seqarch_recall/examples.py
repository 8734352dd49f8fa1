"""The interface of every recall task: token ids, answers, groups and the score of answers."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""Target of positions without a question."""


class Examples(NamedTuple):
    """Examples of one segment.

    `inputs [n, T]` are token ids; `targets [n, T]` the answers, `IGNORED` elsewhere; `groups [n]` the slice of the
    results that an example belongs to. `truth [n, T, S]`, where answers are distributions, is the true probability of
    each of the first S tokens.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    groups: NDArray[np.int64]
    truth: NDArray[np.float32] | None = None


class Questions(NamedTuple):
    """The positions with a question, `places [n, Q]`, and their `answers [n, Q]`; rows with fewer end in `IGNORED`."""

    places: NDArray[np.int64]
    answers: NDArray[np.int64]


def questions(examples: Examples) -> Questions:
    """The questions of each row, in order."""
    asked = examples.targets != IGNORED
    most = int(asked.sum(1).max())
    places = np.argsort(~asked, axis=1, kind="stable")[:, :most]
    return Questions(places, np.take_along_axis(examples.targets, places, 1))


def distinct(rng: np.random.Generator, n: int, k: int, size: int) -> NDArray[np.int64]:
    """`[n, k]`: for each row k different numbers of 0..size-1 in random order, by Floyd's algorithm."""
    chosen = np.full((n, k), -1, dtype=np.int64)
    for i, last in enumerate(range(size - k, size)):
        drawn = rng.integers(0, last + 1, n)
        chosen[:, i] = np.where((chosen[:, :i] == drawn[:, None]).any(1), last, drawn)
    return rng.permuted(chosen, axis=1)
