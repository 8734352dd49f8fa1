"""What a gap says: its estimates at each budget, and whether it is settled.

**Settled** means that the standardised gap is shown to change little between the last two budgets. The change and half
of its interval are together at most `TOLERANCE` per doubling of the tokens. The candidate needs two pairs. The
last three budgets must not drift in one direction by more than half of the gap's interval. The reference must have
learned to copy. Wide intervals, and so fewer pairs, settle less.

**Intervals** are of means over pairs of seeds, where models have few pairs and unequal noise. The variance between a
model's pairs is shrunk towards the one pooled over all models (the moderated t of limma, Smyth 2004). With `d` degrees
of freedom of its own and the variance `s^2`, and the pooled variance `s0^2`,

    v = (d0 s0^2 + d s^2) / (d0 + d)    with    d0 + d    degrees of freedom.

A model with one pair has the pooled variance. `d0` is fixed (`PRIOR`). limma estimates it from the spread of the
variances, but a few variances of two degrees of freedom do not show it (docs/exam.md has the figures).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqarch.tables import readable

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


TOLERANCE = 0.03
"""Nats per token and doubling of the training tokens: a smaller change counts as none."""
COPIES = 1.0
"""A reference copies if it saves this many nats per token on random tokens that it reads again."""
MOST_PAIRS = 20
"""The largest number of pairs that a verdict recommends."""


@dataclass(frozen=True)
class Estimate:
    """A gap with half of its 95 % interval, nats per token; the half is infinite where nothing shows it."""

    value: float
    half_width: float = float("inf")

    @property
    def low(self) -> float:
        return self.value - self.half_width

    @property
    def high(self) -> float:
        return self.value + self.half_width

    def __str__(self) -> str:
        interval = f" [{self.low:+.3f}, {self.high:+.3f}]" if np.isfinite(self.half_width) else ""
        return f"{self.value:+.3f}{interval}"


@dataclass(frozen=True)
class Change(Estimate):
    """The change of the standardised gap between the last two budgets, per doubling of the tokens."""

    pairs: int = 1
    """Pairs of seeds that have both budgets."""
    variance: float = float("inf")
    """The variance of one pair."""
    prior: float = 0.0
    """Degrees of freedom of the variance without those of the candidate's pairs."""
    documents: float = 0.0
    """The part of the half width that comes from documents, added in quadrature; more pairs do not narrow it."""

    @property
    def small(self) -> bool:
        """Whether it is shown to be at most `TOLERANCE`."""
        return self.pairs > 1 and abs(self.value) + self.half_width <= TOLERANCE

    @property
    def pairs_needed(self) -> int | None:
        """The pairs with which this change would be shown to be small; `None` if not known or over `MOST_PAIRS`."""
        for pairs in range(self.pairs + 1, MOST_PAIRS + 1):
            seeds = half_width(self.variance, self.prior + pairs - 1, pairs)
            if abs(self.value) + np.hypot(seeds, self.documents) <= TOLERANCE:
                return pairs
        return None


@dataclass(frozen=True)
class BudgetGap:
    """The gap at one budget, nats per token."""

    tokens: int
    in_domain: float
    """The in-domain loss at which the models are compared, averaged over the seeds."""
    domains: dict[str, float]
    raw: Estimate
    """The mean of the domains: the headline."""
    standardised: Estimate
    """The mean with the fixed weights: the test of zero."""
    pairs: int = 1
    """The number of pairs of seeds that reach this budget."""
    parts: dict[str, Estimate] = field(default_factory=dict)
    """The raw mean for the loss on "recallable" and on "other" tokens, where measured; intervals over seeds only."""
    effective: tuple[float, float] = (float("nan"), float("nan"))
    """The training tokens at which candidate and reference have the in-domain loss at which they are compared."""
    copying: tuple[float | None, float | None] = (None, None)
    """Nats per token that candidate and reference save by copying after this budget; `None` where not measured."""


@dataclass(frozen=True)
class Gap:
    """The gap of a candidate at each budget at which it can be taken; the last one is the headline."""

    weights: dict[str, float]
    """Each domain's weight in the standardised mean."""
    budgets: tuple[BudgetGap, ...]
    seeds: tuple[int, ...]
    change: Change | None = None
    """`None` if no pair has two budgets."""
    highest: float = float("nan")
    """The raw gap at the highest in-domain loss that the finished models of both share: the other end of the range."""
    floor: float = 0.0
    """The standardised gap of the reference at its second-best rate to itself; a smaller gap may come from a rate."""
    limits: str = ""
    """Why these runs can settle nothing, as a clause; empty if they can."""

    @property
    def headline(self) -> BudgetGap:
        return self.budgets[-1]

    @property
    def copied(self) -> float | None:
        """Nats per token that the reference saves by copying; `None` where that was not measured."""
        return self.headline.copying[1]

    @property
    def settled(self) -> bool:
        """Whether the change is shown to be small, with two pairs or more, without drift, and the reference copies."""
        return not (self.limits or self.unsettled)

    @property
    def unsettled(self) -> str:
        """What the gap needs to be settled, empty if nothing."""
        if self.change is None:
            return "finish models at two budgets or more"
        if not self.change.small:
            return _advice(self.change, self.headline.tokens)
        if self._drifts():
            return f"it drifts over three budgets, so train to about {readable(2 * self.headline.tokens)} tokens"
        if self.copied is None:
            return "measure copying, to know whether the reference has learned it"
        if self.copied < COPIES:
            return f"the reference saves only {self.copied:z.2f} nats by copying (needed: {COPIES:g}), so train longer"
        return ""

    def _drifts(self) -> bool:
        changes = np.diff([each.standardised.value for each in self.budgets[-3:]])
        one_way = len(changes) == 2 and changes[0] * changes[1] > 0
        return one_way and abs(changes.sum()) > self.headline.standardised.half_width

    @property
    def word(self) -> str:
        """better, worse, no difference or not settled."""
        if not self.settled:
            return "not settled"
        test = self.headline.standardised
        return "worse" if test.low > self.floor else "better" if test.high < -self.floor else "no difference"

    def sentence(self, name: str, reference: str) -> str:
        """The verdict: better, worse or no difference if the gap is settled, else how it moves and what to do."""
        last = self.headline
        gap = f"{last.raw} nats per token at {readable(last.tokens)} tokens; standardised {last.standardised}"
        if self.settled:
            words = {"no difference": "shows no difference from"}.get(self.word, f"is {self.word} than")
            return f"{name} {words} {reference}: {gap}"
        if self.limits:
            zero = not np.isfinite(last.raw.half_width) or abs(last.raw.value) <= last.raw.half_width
            words = "cannot be told apart from" if zero else f"is {'above' if last.raw.value > 0 else 'below'}"
            return f"{self.limits}: {name} {words} {reference}: {gap}"
        course = ", ".join(f"{each.raw.value:+.3f} at {readable(each.tokens)}" for each in self.budgets)
        return f"{name} against {reference} is not settled: {course} tokens; {self.unsettled}"


def _advice(change: Change, tokens: int) -> str:
    """What would show that a change is small."""
    if abs(change.value) >= TOLERANCE:
        moves = f"still moving by {change.value:+.3f} per doubling of the tokens (allowed: {TOLERANCE:g})"
        return f"{moves}, so train to about {readable(2 * tokens)} tokens"
    few = "one pair of seeds settles nothing" if change.pairs == 1 else f"{change.pairs} pairs of seeds are too few"
    if (needed := change.pairs_needed) is None:
        return f"{few}, so train more"
    return f"{few}; about {needed} would settle this gap if it stays as it is"
