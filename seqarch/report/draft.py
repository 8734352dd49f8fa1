"""The gap during training: a draft, for runs without finished models, and the gap that the paper reads off its plots.

For runs on a mix of domains without OOD domains, `y` is the loss on the hold-out of a domain, and `x` is the loss on
the held-out mix.

Let run `a` have evaluation points `(x_k, y_k)`, in-domain loss and OOD loss, and let `f_a` be the piecewise-linear
curve through them, in order of `x`. For run `a` and reference `r`, over the overlap of their in-domain losses,

    gap(a, r) = mean over the points of both runs inside the overlap of  f_a(x) - f_r(x),

in nats per token; positive means that `a` generalises worse than its in-domain loss promises. The mean is over
evaluation points, not over the axis. Training passes through high losses within a few steps. There the points lie far
apart, and a straight line between them is a poor guess.

The order of training is not used, because in-domain loss does not always fall. Points are sorted by it, and points of
equal loss are averaged. Left out are the decay of the learning rate in a run with finished models, and the first tenth
of the other tokens (`EARLY`): it is warm-up. Between them the schedule of such a run is constant.

The speed of learning is the tokens at which runs reach an in-domain loss (`convergence`).

The gap is a point estimate. Models in mid-schedule are at unequal places of their schedules, which no interval covers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqarch.errors import UserError
from seqarch.report.runs import Evaluations

EARLY = 0.1
"""The fraction of a run's tokens whose evaluations are left out of the gap and of the figures' axes."""
MIN_OVERLAP = 0.05
"""Nats of in-domain loss that two runs must share."""

Line = tuple[np.ndarray, np.ndarray]
"""A curve: in-domain losses `[n]`, rising and distinct, and the compared losses `[n, domains]`."""


@dataclass(frozen=True)
class Draft:
    """The gap during training, nats per token: of each domain and, last, of their mean."""

    gaps: dict[str, float]
    points: int
    """Evaluation points inside the overlap, of all runs together."""
    overlap: tuple[float, float]
    """The in-domain losses at which the runs were compared."""

    @property
    def overall(self) -> float:
        """The gap of the mean, or of the domain if there is only one."""
        return list(self.gaps.values())[-1]


def draft_gap(
    runs: Sequence[Evaluations], reference: Sequence[Evaluations], *, names: tuple[str, str] = ("the run", "the other")
) -> Draft:
    """The gap of a model (one run, or one per seed) during training, averaged over all pairs of a run and a reference.

    Args:
        runs: evaluation points of the candidate, one entry per seed.
        reference: the same for the reference, with the same domains.
        names: what to call the two in messages.

    Raises:
        UserError: the runs share too little in-domain loss.
    """
    sides = [late(one) for one in runs], [late(one) for one in reference]
    every = [*sides[0], *sides[1]]
    low, high = shared_losses(every)
    if high - low < MIN_OVERLAP:
        few = f"{max(high - low, 0):.3f} nats of in-domain loss, not {MIN_OVERLAP:g}"
        raise UserError(f"no gap for {names[0]} against {names[1]}: they share {few}; train the one of higher loss on")
    inside = [int(np.sum((one.in_domain >= low) & (one.in_domain <= high))) for one in every]
    curves, others = ([_curve(one) for one in side] for side in sides)
    pairs = [_distances(a, b, low, high) for a in curves for b in others]
    # where three runs share a short stretch, two of them may have no evaluation there
    values = np.mean([distances.mean(axis=0) for distances in pairs if len(distances)], axis=0)
    return Draft(dict(zip(runs[0].with_mean(), values.tolist(), strict=True)), sum(inside), (low, high))


def distance_curve(run: Evaluations, reference: Sequence[Evaluations]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The distances behind the gap, for a plot: in-domain losses `[n]` and each domain's loss less the reference's.

    The points are those of `run` only; the reference is the mean of its seeds' curves. Empty where nothing overlaps.
    """
    mine, others = late(run), [late(one) for one in reference]
    low, high = shared_losses([mine, *others])
    x, y = _curve(mine)
    kept = (x >= low) & (x <= high)
    curves = [_curve(one) for one in others]
    distance = y[kept] - np.mean([_at(x[kept], *curve) for curve in curves], axis=0)
    return x[kept], dict(zip(mine.with_mean(), distance.T, strict=True))


def late(run: Evaluations) -> Evaluations:
    """The run without its first `EARLY` fraction of tokens; the last point always stays."""
    return run.at(run.tokens >= EARLY * run.tokens.max())


def shared_losses(runs: Sequence[Evaluations]) -> tuple[float, float]:
    """The lowest and the highest in-domain loss that all runs went through; the first is larger if there is none."""
    return float(max(one.in_domain.min() for one in runs)), float(min(one.in_domain.max() for one in runs))


def _curve(run: Evaluations) -> Line:
    """The curve through a run's points; those of equal in-domain loss are averaged."""
    losses = np.stack(list(run.with_mean().values()), axis=1)
    x, where, counts = np.unique(run.in_domain, return_inverse=True, return_counts=True)
    y = np.zeros((len(x), losses.shape[1]))
    np.add.at(y, where, losses)
    return x, y / counts[:, None]


def _at(x: np.ndarray, nodes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Piecewise-linear curves `values [n, domains]` over `nodes [n]`, at `x [m]`: `[m, domains]`."""
    return np.stack([np.interp(x, nodes, column) for column in values.T], axis=1)


def _distances(run: Line, reference: Line, low: float, high: float) -> np.ndarray:
    """The distances `[n, domains]` at both runs' points inside the overlap, in order of in-domain loss."""
    (x_run, y_run), (x_ref, y_ref) = run, reference
    x = np.sort(np.concatenate([x_run, x_ref]))
    x = x[(x >= low) & (x <= high)]
    return _at(x, x_run, y_run) - _at(x, x_ref, y_ref)


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
