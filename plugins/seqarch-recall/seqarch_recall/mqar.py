"""Multi-query associative recall (Zoology, arXiv 2312.04927; github.com/HazyResearch/zoology, multiquery_ar.py)."""

import numpy as np
from numpy.typing import NDArray

from seqarch.errors import UserError
from seqarch_recall.examples import IGNORED, Examples, distinct


def examples(
    seed: int, n: int, *, vocab_size: int, length: int, pairs: int, power: float = 0.01, noise: bool = True
) -> Examples:
    """Pairs of a key and a value, then each key once more: its value is the answer.

    Args:
        seed: of all random draws.
        n: examples.
        vocab_size: V; keys are 1..V/2-1, values V/2..V-1, each at most once in an example.
        length: tokens of an example, T.
        pairs: key-value pairs, at most T/4.
        power: a; a key is asked again i places of two tokens after the pairs with `p ~ a * i^(a-1)`, i from 1.
        noise: whether places without a pair or a question hold random tokens instead of 0.

    Returns:
        examples, grouped by the number of pairs.
    """
    if length % 2 or 4 * pairs > length:
        raise UserError(f"an MQAR example of {pairs} pairs needs an even length of at least {4 * pairs}, not {length}")
    rng = np.random.default_rng(seed)
    half = vocab_size // 2
    keys = 1 + distinct(rng, n, pairs, half - 1)
    values = half + distinct(rng, n, pairs, vocab_size - half)
    inputs = np.zeros((n, length), dtype=np.int64)
    inputs[:, 0 : 2 * pairs : 2] = keys
    inputs[:, 1 : 2 * pairs : 2] = values
    asked = 2 * pairs + 2 * gaps(rng, n, pairs, (length - 2 * pairs) // 2, power)
    np.put_along_axis(inputs, asked, keys, 1)
    targets = np.full_like(inputs, IGNORED)
    np.put_along_axis(targets, asked, values, 1)
    if noise:
        inputs = np.where(inputs == 0, rng.integers(0, vocab_size, inputs.shape), inputs)
    return Examples(inputs, targets, np.full(n, pairs))


def gaps(rng: np.random.Generator, n: int, k: int, places: int, power: float) -> NDArray[np.int64]:
    """`[n, k]`: k different places from 0 on, drawn one after the other by `p ~ a * (place + 1)^(a-1)`.

    The largest sums of log-probability and Gumbel noise, in their order, are such draws without replacement.
    """
    log_p = (power - 1) * np.log(np.arange(1, places + 1))
    return np.argsort(-(log_p + rng.gumbel(size=(n, places))), axis=1)[:, :k]
