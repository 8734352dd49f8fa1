"""Position retrieval (Retrievit, arXiv 2603.02874; github.com/gpantaz/retrievit, train.py)."""

from __future__ import annotations

import numpy as np

from seqarch.recall.examples import IGNORED, Examples, distinct

BINS = 4


def vocabulary(*, symbols: int) -> int:
    """The symbols, a token a position, `<bos>` and `<query>`."""
    return 2 * symbols + 2


def examples(seed: int, n: int, *, symbols: int = 200) -> Examples:
    """`<bos> sequence <query> s`: the token of the position at which s stands in a permutation of all symbols.

    Args:
        seed: of all random draws.
        n: examples.
        symbols: symbols and positions, T.

    Returns:
        examples, grouped by the quarter of the sequence in which the answer lies, from 0.
    """
    rng = np.random.default_rng(seed)
    rows = distinct(rng, n, symbols, symbols)
    at = rng.integers(0, symbols, n)
    bos, query = np.full((n, 1), 2 * symbols), np.full((n, 1), 2 * symbols + 1)
    inputs = np.concatenate([bos, rows, query, np.take_along_axis(rows, at[:, None], 1)], 1)
    targets = np.full_like(inputs, IGNORED)
    targets[:, -1] = symbols + at
    return Examples(inputs, targets, at * BINS // symbols)
