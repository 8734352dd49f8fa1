"""Intervals of means over pairs of seeds, where models have few pairs and unequal noise.

The variance between a model's pairs is shrunk towards the one pooled over all models (the moderated t of limma, Smyth
2004). With `d` degrees of freedom of its own and the variance `s^2`, and the pooled variance `s0^2`,

    v = (d0 s0^2 + d s^2) / (d0 + d)    with    d0 + d    degrees of freedom.

A model with one pair has the pooled variance. `d0` is fixed (`PRIOR`). limma estimates it from the spread of the
variances, but a few variances of two degrees of freedom do not show it (docs/exam.md has the figures).
"""

from typing import Any

import numpy as np

PRIOR = 1.25
"""Degrees of freedom of the pooled variance in each model's variance (`d0`), at most those that it has."""


def over_pairs(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """The mean over the pairs that have a value; nan where none has."""
    known = np.isfinite(values)
    count = known.sum(axis=axis)
    return np.where(known, values, 0).sum(axis=axis) / np.where(count, count, np.nan)


def moderated(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The variance between pairs and its degrees of freedom, `[..., models]` both, from `[..., models, pairs]`.

    A pair that a model lacks is nan. The variance is infinite if no model has two pairs.
    """
    own = np.maximum(np.isfinite(samples).sum(axis=-1) - 1, 0)
    squares = np.nansum((samples - over_pairs(samples, -1)[..., None]) ** 2, axis=-1)
    total = own.sum(axis=-1, keepdims=True)
    prior = np.minimum(PRIOR, total)
    pooled = squares.sum(axis=-1, keepdims=True) / np.maximum(total, 1)
    freedom = prior + own
    variance = (prior * pooled + squares) / np.maximum(freedom, 1)
    return np.where(total, variance, np.inf), freedom


def half_widths(samples: np.ndarray) -> np.ndarray:
    """Half of the 95 % interval of each model's mean over its pairs, `[..., models]`; `samples` as in `moderated`."""
    pairs = np.isfinite(samples).sum(axis=-1)
    return half_width(*moderated(samples), np.maximum(pairs, 1))


def half_width(variance: Any, freedom: Any, pairs: Any) -> Any:
    """Half of the 95 % interval of a mean over some pairs, numbers or arrays; infinite if the variance is."""
    from scipy.special import stdtrit

    return stdtrit(np.maximum(freedom, 1), 0.975) * np.sqrt(variance / pairs)
