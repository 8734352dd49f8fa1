"""The n-gram baseline of in-context language learning (arXiv 2401.12973; github.com/berlino/seq_icl, ngram.py)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def backoff(tokens: Sequence[int], symbols: int, order: int = 3) -> NDArray[np.float64]:
    """The in-context n-gram with back-off: the distribution of the token after each one, `[T, S]`.

    A symbol that followed the last `order - 1` symbols of its string before has its share of their occurrences, the
    present one included. The other symbols seen so far get the rest, in the proportions of the next shorter context.
    Rows add up to one; the authors leave out what is missing where every symbol has followed.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    result = np.zeros((len(tokens), symbols))
    start = [-1] * (order - 1)
    string: list[int] = []
    for place, token in enumerate(tokens):
        if token > symbols:  # padding
            break
        if not string:
            counts.update({tuple(start[:size]): order - size for size in range(1, order)})
            string = start
        if token == symbols:
            string = start
            counts.update({tuple(start[:size]): order - size for size in range(1, order)})
        else:
            string = [*string, token]
            counts.update(tuple(string[-size:]) for size in range(1, order + 1))
        chances = _after(tuple(string[1 - order :]), counts, symbols)
        result[place] = chances / max(chances.sum(), 1e-12)
    return result


def _after(context: tuple[int, ...], counts: Counter[tuple[int, ...]], symbols: int) -> NDArray[np.float64]:
    """Shares of the symbols after a context; those that never followed divide the rest by the next shorter one."""
    follow = np.array([counts[(*context, symbol)] for symbol in range(symbols)], dtype=np.float64)
    if not context:
        return follow / max(follow.sum(), 1)
    shares = follow / max(counts[context], 1)
    rest = np.where(follow > 0, 0, _after(context[1:], counts, symbols))
    return shares + (1 - shares.sum()) * rest / rest.sum() if rest.sum() > 0 else shares
