"""The speed of learning: the tokens at which runs reach an in-domain loss."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqarch.report.draft import late, shared_losses
from seqarch.report.runs import Evaluations


class Level(NamedTuple):
    """Tokens, averaged over the seeds, at which a model and the reference reach an in-domain loss."""

    loss: float
    tokens: float
    reference: float
    ratio: float
    """Tokens for each token of the reference; below 1 is faster."""


def convergence(runs: Sequence[Evaluations], reference: Sequence[Evaluations]) -> list[Level]:
    """The tokens to reach four in-domain losses, evenly spaced over those that all runs went through.

    The last is the loss at which the slowest run ends. Empty if there is no such loss.
    """
    sides = [[late(one) for one in side] for side in (runs, reference)]
    low, high = shared_losses([one for side in sides for one in side])
    if not low < high:
        return []
    losses = np.linspace(high, low, 5)[1:]
    means = [np.mean([tokens_to_reach(one, losses) for one in side], axis=0) for side in sides]
    return [Level(*map(float, row)) for row in zip(losses, *means, np.divide(*means), strict=True)]


def tokens_to_reach(run: Evaluations, losses: np.ndarray) -> np.ndarray:
    """The tokens at which each of some in-domain losses is reached for the first time, `inf` if never.

    Between two new lows of the loss it is a straight line in the logarithm of the tokens.
    """
    lows, first = np.unique(np.minimum.accumulate(run.in_domain), return_index=True)
    return np.exp(np.interp(losses, lows, np.log(run.tokens[first]), left=np.inf))
