"""N-gram and position retrieval (Retrievit, arXiv 2603.02874; github.com/gpantaz/retrievit, train.py)."""

import numpy as np

from seqarch_recall.examples import IGNORED, Examples, distinct

QUERY, ANSWER = 2, 3
"""Tokens of the query and, after it in the sequence, of the answer."""
RARE = 1e-3
"""The share of sequences in which the query occurs once, at least: the others are drawn and thrown away."""
BIN = 50
QUARTERS = 4


def ngram(seed: int, n: int, *, symbols: int = 30, shortest: int = 50, longest: int = 100) -> Examples:
    """`<bos> sequence <bos> <query> q1 q2 <query> a1 a2 a3`: the three symbols after the query's only occurrence.

    Args:
        seed: of all random draws.
        n: examples.
        symbols: V, drawn independently.
        shortest: tokens of the sequence, at least.
        longest: at most; uniform between them.

    Returns:
        examples padded on the right, grouped by the length of the sequence in steps of 50.
    """
    rng = np.random.default_rng(seed)
    bos, query = symbols, symbols + 1
    kept: list[tuple[np.ndarray, ...]] = []
    while sum(len(rows) for rows, _, _ in kept) < n:
        rows = rng.integers(0, symbols, (n, longest))
        lengths = rng.integers(shortest, longest + 1, n)
        starts = rng.integers(0, lengths - QUERY - ANSWER + 1)
        pairs = rows[:, :-1] * symbols + rows[:, 1:]
        here = np.take_along_axis(pairs, starts[:, None], 1)
        inside = np.arange(longest - 1) < lengths[:, None] - 1
        if np.mean((1 - symbols**-2.0) ** lengths) < RARE:
            raise ValueError("in nearly every sequence the query would occur again: give more symbols")
        alone = ((pairs == here) & inside).sum(1) == 1
        kept.append((rows[alone], lengths[alone], starts[alone]))
    rows, lengths, starts = (np.concatenate(part)[:n] for part in zip(*kept, strict=True))
    inputs = np.full((n, longest + 4 + QUERY + ANSWER), bos)
    inputs[:, 1 : longest + 1] = np.where(np.arange(longest) < lengths[:, None], rows, bos)
    found = np.take_along_axis(rows, starts[:, None] + np.arange(QUERY + ANSWER), 1)
    tail = np.concatenate(
        [np.full((n, 1), bos), np.full((n, 1), query), found[:, :QUERY], np.full((n, 1), query), found[:, QUERY:]], 1
    )
    places = 1 + lengths[:, None] + np.arange(tail.shape[1])
    np.put_along_axis(inputs, places, tail, 1)
    targets = np.full_like(inputs, IGNORED)
    np.put_along_axis(targets, places[:, 2 + QUERY : -1], found[:, QUERY:], 1)
    return Examples(inputs, targets, lengths // BIN * BIN)


def position(seed: int, n: int, *, symbols: int = 200) -> Examples:
    """`<bos> sequence <query> s`: the token for the position of s in a permutation of all symbols.

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
    return Examples(inputs, targets, at * QUARTERS // symbols)
