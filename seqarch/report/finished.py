"""The gap between finished models: its value at each training budget, and whether it still moves.

A finished model is one whose learning rate has decayed to zero. A run with decay branches (`branches` of `seqarch fit`)
gives several of them, at growing budgets of training tokens. For one seed, let the finished models of candidate `c` and
reference `r` have in-domain losses `x` and OOD losses `y`. Let `f_c`, `f_r` be the monotone cubics through them
(`monotone_cubic`); straight lines would lie above the curves, which bend. The gap at budget `k` is

    gap_k = f_c(x_k) - f_r(x_k)   with   x_k = max(min(x_c[1..k]), min(x_r[1..k])),

in nats per token, at the lowest in-domain loss that both have reached. Positive means that the candidate generalises
worse than its in-domain loss promises. The headline is the gap at the last budget. The smallest budget has a gap only
if both models end it with the same loss, because the faster model was never measured at the loss of the slower one.

**Pairs.** A seed gives all models one embedding and one order of samples, so the gap is taken seed by seed. It is then
averaged over the seeds that both models have at that budget.

**Parts.** The gap is also taken for the loss on recallable tokens, which complete something seen earlier in their
sequence, and for the loss on all others (`seqarch.evaluation`). Models are still compared at the in-domain loss of all
tokens.

**Interval.** The deviation between seed pairs is pooled over the models of an exam (`pool`), so that a model with one
seed has an interval too. Student's t widens this part only. Models share the runs of the reference, so their deviations
are correlated. With correlation `rho` between `M` models of `n` pairs the pooled variance has

    M (n - 1) / (1 + (M - 1) rho^2)

degrees of freedom. The chance in the reference's runs of some seeds is in the mean over these seeds, and in the pooled
variance. If a mean has `p` pairs, and model `m` has `n_m` pairs, `q_m` of them at the seeds of the mean, the share

    rho^2 / (1 + (M - 1) rho^2)  sum over m of  q_m (1 - q_m / n_m) / p

of the mean's variance grows with the pooled variance. It is zero if all models have the same seeds. What grows together
needs no Student's t: the square of the factor is `t^2` for the rest and the normal quantile's square for the share. The
share takes the least `rho` (`SHARED`), so the interval is not too narrow.

Chance in the documents of the hold-outs is added in quadrature: they are drawn again, the same for both models. Noise
between neighbouring evaluations is already part of the difference between seeds.

**Settled** means two things. The gap at the last budget is within the interval's half-width of the gap at the budget
before, and the reference has learned to copy. A gap that still moves says when a model learns something, not what it
can learn.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from seqarch.errors import UserError
from seqarch.report.cubic import monotone_cubic
from seqarch.report.documents import common_documents
from seqarch.report.gap import NORMAL, student
from seqarch.report.runs import Evaluations
from seqarch.tables import readable

Seeds = Mapping[int, Evaluations]
"""The finished models of one architecture: for each seed one evaluation per budget, in order of the budgets."""

SHARED = 0.5
"""Least correlation of the deviations of two models that share the reference's runs: the one at equal variances."""
KNOWN = 4
"""Seed pairs beyond the first of each model needed to weigh domains by deviation; fewer would hide deviation."""
DRAWS = 400
COPIES = 1.0
"""A reference copies if it saves this many nats per token on random tokens that it reads again."""

WIDE = 0.1
"""Half of an interval, in nats, beyond which it rules out too little; half of the gap if that is more."""


@dataclass(frozen=True)
class BudgetGap:
    """The gap at one budget, nats per token."""

    tokens: int
    in_domain: float
    """The in-domain loss at which the models are compared, averaged over the seeds."""
    domains: dict[str, float]
    mean: float
    """The weighted mean of the domains."""
    half_width: float
    """Half of the mean's 95 % interval; infinite if no model of the exam has two seeds."""
    seeds: int = 1
    """The number of pairs of seeds that reach this budget."""
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The same mean for the loss on "recallable" and on "other" tokens, where measured, and half of its interval over
    seeds."""
    copying: tuple[float | None, float | None] = (None, None)
    """Nats per token that candidate and reference save by copying after this budget; `None` where not measured."""

    @property
    def raw(self) -> float:
        """The mean of the domains with equal weights."""
        return float(np.mean(list(self.domains.values())))


@dataclass(frozen=True)
class FinishedGap:
    """The gap of a candidate at each budget at which it can be taken; the last one is the headline."""

    weights: dict[str, float]
    """Each domain's weight in the mean: one over its deviation between seeds, so that no noisy domain dominates."""
    budgets: tuple[BudgetGap, ...]
    seeds: tuple[int, ...]
    copied: float | None
    """Nats per token that the reference saves by copying; `None` where that was not measured."""
    pooled: int = 0
    """Models with several pairs of seeds at the last budget: their deviations make the interval."""

    @property
    def headline(self) -> BudgetGap:
        return self.budgets[-1]

    @property
    def slope(self) -> float | None:
        """Change of the gap per doubling of the tokens between the last two budgets; `None` with one budget."""
        if len(self.budgets) < 2:
            return None
        before, last = self.budgets[-2:]
        return (last.mean - before.mean) / float(np.log2(last.tokens / before.tokens))

    @property
    def settled(self) -> bool:
        """Whether the last two budgets agree within an interval that is not wide, and the reference copies."""
        return self._agrees and self._narrow and self.copied is not None and self.copied >= COPIES

    @property
    def _narrow(self) -> bool:
        return self.headline.half_width <= max(WIDE, abs(self.headline.mean) / 2)

    @property
    def _agrees(self) -> bool:
        last = self.headline
        return len(self.budgets) > 1 and abs(last.mean - self.budgets[-2].mean) <= last.half_width < float("inf")

    def plain(self) -> dict[str, Any]:
        """All of it as plain values."""
        more = {"slope": self.slope, "settled": self.settled}
        return {**asdict(self), **more, "budgets": [{**asdict(each), "raw": each.raw} for each in self.budgets]}

    def sentence(self) -> str:
        """The verdict: better, worse or no difference if the gap is settled, else how it moves and what to do."""
        last = self.headline
        if self.settled:
            low, high = last.mean - last.half_width, last.mean + last.half_width
            word = "worse" if low > 0 else "better" if high < 0 else "no difference"
            gap = f"{last.mean:+.3f} nats per token [{low:+.3f}, {high:+.3f}]"
            return f"{word}: {gap} at {readable(last.tokens)} tokens"
        course = ", ".join(f"{each.mean:+.3f} at {readable(each.tokens)}" for each in self.budgets)
        return f"not settled: {course} tokens; {self._advice()}"

    def _advice(self) -> str:
        if len(self.budgets) < 2:
            return "finish models at two budgets or more"
        if not np.isfinite(self.headline.half_width):
            return "train another seed, because one seed gives no interval"
        if not self._agrees:
            return f"still moving, so train to about {readable(self.advised_tokens())} tokens"
        if not self._narrow:
            return f"an interval of ±{self.headline.half_width:.3f} is too wide, so train more seeds"
        if self.copied is None:
            return "measure copying, to know whether the reference has learned it"
        return f"the reference saves only {self.copied:z.2f} nats by copying (needed: {COPIES:g}), so train longer"

    def advised_tokens(self) -> float:
        """The budget at which the next change would lie within the interval, if changes keep shrinking as they did."""
        changes = np.abs(np.diff([each.mean for each in self.budgets]))
        growth = self.budgets[-1].tokens / self.budgets[-2].tokens
        shrinks = float(np.clip(changes[-1] / changes[-2], 0.25, 0.8)) if len(changes) > 1 and changes[-2] else 0.5
        steps = np.ceil(np.log(max(self.headline.half_width, 1e-3) / changes[-1]) / np.log(shrinks))
        return self.budgets[-1].tokens * growth ** max(float(steps), 1.0)


def finished_gaps(
    candidates: Mapping[str, Seeds],
    reference: Seeds,
    *,
    parts: Mapping[str, tuple[Mapping[str, Seeds], Seeds]] | None = None,
    copying: Mapping[str, Mapping[int, float]] | None = None,
    of_reference: Mapping[int, float] | None = None,
) -> dict[str, FinishedGap]:
    """The gap of each candidate of an exam against its reference.

    Args:
        candidates: by name; all models have the same domains.
        reference: the reference's finished models; gaps are taken at its budgets.
        parts: for each part of the tokens, by its name, all models and the reference with their losses on it.
        copying: for each candidate, by its name, what its finished models save by copying (`copying_gains`).
        of_reference: what the reference's finished models save by copying.

    Raises:
        UserError: a candidate has no seed in common with the reference, or is comparable at no budget.
    """
    pairs = {name: seed_pairs(name, each, reference) for name, each in candidates.items()}
    weights = _weights(list(pairs.values()))
    means = {name: gaps @ weights for name, gaps in pairs.items()}
    of_seeds = _half_widths(means)
    ends = _budgets(reference)
    split = {part: _part(candidates, *both, weights, ends) for part, both in (parts or {}).items()}
    gains, of_reference = copying or {}, of_reference or {}
    domains = list(next(iter(reference.values())).losses)
    named, found = dict(zip(domains, weights.tolist(), strict=True)), {}
    for name, each in candidates.items():
        halves = np.hypot(of_seeds[name], NORMAL * _document_deviation(each, reference, weights))
        counts = np.isfinite(pairs[name]).all(axis=2).sum(axis=0)
        gaps = _over_seeds(pairs[name])
        floors = _over_seeds(_by_seed(pair_floors, each, reference, ends))
        budgets = [
            BudgetGap(
                tokens=(tokens := int(ends[k])),
                in_domain=float(floors[k]),
                domains=dict(zip(domains, gaps[k].tolist(), strict=True)),
                mean=float(gaps[k] @ weights),
                half_width=float(halves[k]),
                seeds=int(counts[k]),
                parts={part: both for part, of in split.items() if np.isfinite((both := of[name][k])[0])},
                copying=(gains.get(name, {}).get(tokens), of_reference.get(tokens)),
            )
            for k in np.flatnonzero(counts)
        ]
        pooled = sum(int(np.isfinite(one[:, np.flatnonzero(counts)[-1]]).sum()) > 1 for one in means.values())
        found[name] = FinishedGap(named, tuple(budgets), _common(each, reference), budgets[-1].copying[1], pooled)
    return found


def _over_seeds(values: np.ndarray) -> np.ndarray:
    """The mean over the seeds `[seeds, budgets, ...]` that have a value at a budget; nan where none has."""
    known = np.isfinite(values)
    return np.where(known, values, 0).sum(axis=0) / np.where(known.any(axis=0), known.sum(axis=0), np.nan)


def _part(
    candidates: Iterable[str], models: Mapping[str, Seeds], reference: Seeds, weights: np.ndarray, budgets: np.ndarray
) -> dict[str, list[tuple[float, float]]]:
    """The gap of a part of the tokens and half of its interval over seeds, by candidate and budget; nan without gap."""
    gaps = {name: _by_seed(pair_gaps, models[name], reference, budgets) for name in candidates}
    means = {name: each @ weights if each.ndim == 3 else each for name, each in gaps.items()}  # of no seed too
    halves = _half_widths(means)
    return {name: list(zip(_over_seeds(each), halves[name], strict=True)) for name, each in means.items()}


def seed_pairs(name: str, candidate: Seeds, reference: Seeds) -> np.ndarray:
    """The gaps of each seed of the reference, `[seeds, budgets, domains]`, at the budgets of any; nan as in `_by_seed`.

    Raises:
        UserError: there is no such seed, the budgets differ, or no budget has a gap.
    """
    if not _common(candidate, reference):
        raise UserError(f"{name} and the reference have no seed in common: train both with the same seed")
    gaps = _by_seed(pair_gaps, candidate, reference, _budgets(reference))
    if not np.isfinite(gaps).all(axis=2).any():
        raise UserError(
            f"no gap for {name}: at no budget do its finished models and the reference's reach one in-domain loss; "
            "finish models at smaller budgets, or train the model with the higher loss longer"
        )
    return gaps


def _budgets(reference: Seeds) -> np.ndarray:
    """The budgets at which a seed of the reference has a model, in order."""
    return np.unique(np.concatenate([each.tokens for each in reference.values()]))


def _by_seed(
    what: Callable[[Evaluations, Evaluations], np.ndarray], candidate: Seeds, reference: Seeds, budgets: np.ndarray
) -> np.ndarray:
    """`what` of each seed of the reference, `[seeds, budgets, ...]`; nan where one of the two has no model."""
    pairs = {seed: _at_common_budgets(candidate[seed], reference[seed]) for seed in _common(candidate, reference)}
    found = {seed: what(*pair) for seed, pair in pairs.items()}
    values = np.full((len(reference), len(budgets), *next((each.shape[1:] for each in found.values()), ())), np.nan)
    for seed, (_, other) in pairs.items():
        values[sorted(reference).index(seed), np.searchsorted(budgets, other.tokens)] = found[seed]
    return values


def _at_common_budgets(candidate: Evaluations, reference: Evaluations) -> tuple[Evaluations, Evaluations]:
    """The models of both at the budgets that both have."""
    _, own, rows = np.intersect1d(candidate.tokens, reference.tokens, return_indices=True)
    if not len(rows):
        raise UserError(
            f"finished models at other budgets cannot be compared: {_listed(candidate.tokens)} and "
            f"{_listed(reference.tokens)} tokens; make the same branches of both"
        )
    return candidate.at(own), reference.at(rows)


def pair_gaps(candidate: Evaluations, reference: Evaluations) -> np.ndarray:
    """The gap of one seed at each budget, the same of both, `[budgets, domains]`; nan if there is none."""
    floors = pair_floors(candidate, reference)
    return _at(candidate, floors) - _at(reference, floors)


def pair_floors(candidate: Evaluations, reference: Evaluations) -> np.ndarray:
    """The lowest in-domain loss that both have reached at each budget."""
    return np.maximum(np.minimum.accumulate(candidate.in_domain), np.minimum.accumulate(reference.in_domain))


def pool(samples: Iterable[np.ndarray]) -> tuple[float, float]:
    """Standard deviation between seeds, pooled over models, and its degrees of freedom (0: not known).

    `samples` holds `[seeds]` of each model, the same seeds in the same order; nan where it lacks one.
    """
    residuals = [each - np.nanmean(each) for each in samples if np.isfinite(each).sum() > 1]
    freedom = sum(int(np.isfinite(each).sum()) - 1 for each in residuals)
    if not freedom:
        return float("inf"), 0.0
    variance = sum(float(np.nansum(each**2)) for each in residuals) / freedom
    return variance**0.5, freedom / (1 + (len(residuals) - 1) * _correlation(residuals, variance) ** 2)


def _correlation(residuals: Sequence[np.ndarray], variance: float) -> float:
    """The correlation between deviations of models that share the reference's runs, at least `SHARED`."""
    known, values = np.isfinite(residuals).astype(float), np.nan_to_num(residuals)
    freedom = np.triu(known @ known.T - 1, 1).clip(0)
    products = (values @ values.T)[freedom > 0].sum()
    return float(np.clip(products / freedom.sum() / variance, SHARED, 1)) if freedom.any() and variance else SHARED


def half_widths(samples: np.ndarray) -> np.ndarray:
    """Half of the 95 % interval of each model's mean over its seed pairs; `samples` is that of `pool`."""
    deviation, freedom = pool(samples)
    known = np.isfinite(samples).astype(float)
    pairs, several = np.maximum(known.sum(axis=1), 1), known[known.sum(axis=1) > 1]
    both = known @ several.T
    share = (both * (1 - both / several.sum(axis=1))).sum(axis=1) / pairs / (1 / SHARED**2 + len(several) - 1)
    return NORMAL * deviation * np.sqrt(((1 - share) * student(max(freedom, 1)) ** 2 + share) / pairs)


def _half_widths(means: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Half of the interval at each budget, by model, from its gaps `[seeds, budgets]`."""
    halves = [half_widths(each) for each in np.stack(list(means.values())).transpose(2, 0, 1)]
    return dict(zip(means, np.transpose(halves), strict=True))


def _common(candidate: Seeds, reference: Seeds) -> tuple[int, ...]:
    return tuple(sorted(candidate.keys() & reference.keys()))


def _weights(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """Weights of the domains, one over their deviation between seeds; equal if fewer than `KNOWN` seeds show it.

    The deviation is taken over the last two budgets, because both together show it better.
    """
    last = [gaps[:, k] for gaps in pairs for k in (-1, -2)[: gaps.shape[1]]]
    deviations = np.array([pool([gaps[:, domain] for gaps in last])[0] for domain in range(pairs[0].shape[2])])
    if sum(max(np.isfinite(gaps).all(axis=1).sum() - 1, 0) for gaps in last) < 2 * KNOWN or not deviations.all():
        return np.full(len(deviations), 1 / len(deviations))
    return 1 / deviations / (1 / deviations).sum()


def _at(models: Evaluations, floors: np.ndarray) -> np.ndarray:
    """The losses `[n, domains]` at the in-domain losses `floors [n]`, on the curves through the models."""
    nodes, first = np.unique(models.in_domain, return_index=True)
    return monotone_cubic(nodes, np.stack(list(models.losses.values()), axis=1)[first], floors)


def _document_deviation(candidate: Seeds, reference: Seeds, weights: np.ndarray) -> np.ndarray:
    """Standard deviation of the mean gap `[budgets]` when the documents are drawn again; 0 where none were kept."""
    seeds, budgets = _common(candidate, reference), _budgets(reference)
    documents = common_documents([side[seed].documents for seed in seeds for side in (candidate, reference)])
    if documents is None:
        return np.zeros(len(budgets))
    random = np.random.default_rng(0)
    gaps = []
    for _ in range(DRAWS):
        draw = documents.draw(random)
        mine, other = ({seed: side[seed].resampled(draw) for seed in seeds} for side in (candidate, reference))
        gaps.append(_over_seeds(_by_seed(pair_gaps, mine, other, budgets)))
    drawn = np.stack(gaps) @ weights
    known = np.isfinite(drawn).any(axis=0)
    return np.where(known, np.nanstd(np.where(known, drawn, 0.0), axis=0), 0.0)


def _listed(tokens: np.ndarray) -> str:
    return ", ".join(readable(float(each)) for each in tokens)
