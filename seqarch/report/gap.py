"""The gap between finished models: its value at each training budget, its interval, and whether it is settled.

Base capability is the OOD loss at a matched pre-training loss (arXiv 2505.18522, section 2). A finished model is one
whose learning rate has decayed to zero. A run with decay branches (`branches` of `seqarch fit`) gives several of them,
at growing budgets of training tokens. For one seed, let the finished models of candidate `c` and reference `r` have
in-domain losses `x` and OOD losses `y`, and let `f_c`, `f_r` be the curves through them. The gap at budget `k` is

    gap_k = f_c(x_k) - f_r(x_k)   with   x_k = max(min(x_c[1..k]), min(x_r[1..k])),

in nats per token, at the lowest in-domain loss that both have reached. Positive means that the candidate generalises
worse than its in-domain loss promises. The smallest budget has a gap only if both models end it with the same loss.

**Curves.** Between two neighbouring models the OOD loss is a line in `exp(CURVATURE x)`. The same estimator serves
models with two budgets and with more, and a later budget changes no earlier gap. The losses on the hold-outs of a mix
are lines in `x`, which is their weighted mean: so weighted, their gaps add up to zero.

**Pairs.** A seed gives all models one embedding and one order of samples, so the gap is taken seed by seed. It is then
averaged over the seeds that both models have at that budget.

**Means.** The raw mean weighs all domains equally. The standardised mean has fixed weights (`weights.csv`), one over
each domain's deviation between seeds, and is the sharper test of zero. Neither depends on the other models of an exam.

**Interval.** The pairs' variance is `seqarch.report.estimates`'s. Chance in the documents of the hold-outs is added in
quadrature: they are drawn again, the same for both models (a cluster bootstrap).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from seqarch.errors import UserError
from seqarch.report.documents import common_documents
from seqarch.report.estimates import BudgetGap, Change, Estimate, Gap, half_width, half_widths, moderated, over_pairs
from seqarch.report.runs import Evaluations
from seqarch.runs.results import NORMAL
from seqarch.tables import read_csv, readable

Seeds = Mapping[int, Evaluations]
"""The finished models of one architecture: for each seed one evaluation per budget, in order of the budgets."""

WEIGHTS = Path(__file__).with_name("weights.csv")
"""Weights of the domains in the standardised mean: one over the deviation between the pairs of three models with nine
seeds at `small` (docs/results/budgets)."""
CURVATURE = 1.3
"""The curvature of OOD loss over in-domain loss, per nat. It predicts the finished models at 170M tokens of `small`
from those at 85M and 340M to 0.004 nats on average; a straight line is 0.029 nats too high (docs/exam.md)."""
DRAWS = 200


@dataclass(frozen=True)
class FinishedModels:
    """The finished models of an exam, whose gaps share one variance.

    Args:
        candidates: by name; all models have the same domains.
        reference: the reference's finished models; gaps are taken at its budgets.
        parts: for each part of the tokens, by its name, all models and the reference with their losses on it.
        copying: for each candidate, by its name, what its finished models save by copying (`copying_gains`).
        of_reference: what the reference's finished models save by copying.
        neighbour: the candidate that is the reference at its second-best rate; its gap is the floor.
        limits: why these runs can settle nothing.
    """

    candidates: Mapping[str, Seeds]
    reference: Seeds
    parts: Mapping[str, tuple[Mapping[str, Seeds], Seeds]] = field(default_factory=dict)
    copying: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    of_reference: Mapping[int, float] = field(default_factory=dict)
    neighbour: str | None = None
    limits: str = ""

    def gaps(self) -> dict[str, Gap]:
        """The gap of each candidate against the reference, by name.

        Raises:
            UserError: a candidate has no seed in common with the reference, or is comparable at no budget.
        """
        gaps = {name: self._gap(name) for name in self.candidates}
        if self.neighbour not in gaps:
            return gaps
        budgets = gaps[self.neighbour].budgets
        floors = {name: [at for at in budgets if at.tokens <= gap.headline.tokens] for name, gap in gaps.items()}
        return {
            name: replace(gap, floor=abs(floors[name][-1].standardised.value) if floors[name] else 0.0)
            for name, gap in gaps.items()
        }

    @cached_property
    def ends(self) -> np.ndarray:
        """The budgets, in order."""
        return _budgets(self.reference)

    @cached_property
    def domains(self) -> list[str]:
        return list(next(iter(self.reference.values())).losses)

    @cached_property
    def pairs(self) -> dict[str, np.ndarray]:
        """The gaps of each candidate's pairs, `[seeds, budgets, domains]`; nan where there is none."""
        return {name: seed_pairs(name, each, self.reference) for name, each in self.candidates.items()}

    @cached_property
    def weights(self) -> np.ndarray:
        """The weights of the domains in the raw and in the standardised mean, `[2, domains]`."""
        return np.array([np.full(len(self.domains), 1 / len(self.domains)), fixed_weights(self.domains)])

    @cached_property
    def means(self) -> np.ndarray:
        """The raw and the standardised mean of all pairs, `[models, seeds, budgets, 2]`."""
        return np.stack([gaps @ self.weights.T for gaps in self.pairs.values()])

    @cached_property
    def of_parts(self) -> dict[str, np.ndarray]:
        """For each part of the tokens the raw mean of all pairs, `[models, seeds, budgets]`; nan where not measured."""

        def raw(candidate: Evaluations, reference: Evaluations) -> np.ndarray:
            return pair_gaps(candidate, reference) @ self.weights[0]

        return {
            part: np.stack([_by_seed(raw, models[name], reference, self.ends) for name in self.candidates])
            for part, (models, reference) in self.parts.items()
        }

    def _gap(self, name: str) -> Gap:
        number, each = list(self.candidates).index(name), self.candidates[name]
        has = np.flatnonzero(np.isfinite(self.pairs[name]).all(axis=2).any(axis=0)).tolist()
        drawn = _drawn_again(each, self.reference, self.ends) @ self.weights.T
        return Gap(
            weights=dict(zip(self.domains, self.weights[1].tolist(), strict=True)),
            budgets=tuple(self._at_budget(name, k, _deviation(drawn)[k]) for k in has),
            seeds=common_seeds(each, self.reference),
            change=self._change(number, drawn[..., 1], *has[-2:]) if len(has) > 1 else None,
            highest=_gaps_at_highest(each, self.reference) @ self.weights[0],
            limits=self.limits,
        )

    def _at_budget(self, name: str, k: int, documents: np.ndarray) -> BudgetGap:
        """The gap at a budget; `documents` is the deviation of both means when the documents are drawn again."""
        number, each, tokens = list(self.candidates).index(name), self.candidates[name], int(self.ends[k])
        gaps = over_pairs(self.pairs[name])[k]
        halves = np.hypot(half_widths(self.means[:, :, k].transpose(2, 0, 1))[:, number], NORMAL * documents)
        raw, standardised = map(Estimate, (self.weights @ gaps).tolist(), halves.tolist())
        parts = {
            part: Estimate(float(over_pairs(means[number, :, k])), float(half_widths(means[:, :, k])[number]))
            for part, means in self.of_parts.items()
        }
        floors = over_pairs(_by_seed(pair_floors, each, self.reference, self.ends))[k]
        mine, other = over_pairs(_by_seed(_tokens_at_floors, each, self.reference, self.ends))[k].tolist()
        return BudgetGap(
            tokens=tokens,
            in_domain=float(floors),
            domains=dict(zip(self.domains, gaps.tolist(), strict=True)),
            raw=raw,
            standardised=standardised,
            pairs=int(np.isfinite(self.pairs[name][:, k]).all(axis=1).sum()),
            parts={part: one for part, one in parts.items() if np.isfinite(one.value)},
            effective=(mine, other),
            copying=(self.copying.get(name, {}).get(tokens), self.of_reference.get(tokens)),
        )

    def _change(self, number: int, drawn: np.ndarray, before: int, last: int) -> Change | None:
        """The change of a candidate's standardised gap per doubling; `drawn [draws, budgets]` is that gap redrawn."""
        doublings = float(np.log2(self.ends[last] / self.ends[before]))
        changes = (self.means[:, :, last, 1] - self.means[:, :, before, 1]) / doublings
        if not (pairs := int(np.isfinite(changes[number]).sum())):
            return None
        variance, freedom = (float(each[number]) for each in moderated(changes))
        documents = float(NORMAL * _deviation(drawn[:, last] - drawn[:, before]) / doublings)
        half = float(np.hypot(half_width(variance, freedom, pairs), documents))
        return Change(float(over_pairs(changes[number])), half, pairs, variance, freedom - pairs + 1, documents)


def fixed_weights(domains: Sequence[str]) -> np.ndarray:
    """The weights of the standardised mean, `[domains]`; equal if `weights.csv` lacks one of the domains."""
    known = {row["domain"]: float(row["weight"]) for row in read_csv(WEIGHTS)}
    weights = np.array([known.get(name, np.nan) for name in domains])
    return weights / weights.sum() if np.isfinite(weights).all() else np.full(len(domains), 1 / len(domains))


def seed_pairs(name: str, candidate: Seeds, reference: Seeds) -> np.ndarray:
    """The gaps of each seed of the reference, `[seeds, budgets, domains]`, at the budgets of any; nan as in `_by_seed`.

    Raises:
        UserError: there is no such seed, one model makes no curve, all budgets differ, or no budget has a gap.
    """
    if not (seeds := sorted(candidate.keys() & reference.keys())):
        raise UserError(f"{name} and the reference have no seed in common: train both with the same seed")
    if all(len(each.tokens) < 2 for each in candidate.values()):
        raise UserError(f"no gap for {name}: it has a finished model at one budget, a curve needs two (branches.at)")
    if not common_seeds(candidate, reference):
        mine, other = (", ".join(map(readable, side[seeds[0]].tokens.tolist())) for side in (candidate, reference))
        raise UserError(f"finished models of {mine} and of {other} tokens cannot be compared: make the same branches")
    gaps = _by_seed(pair_gaps, candidate, reference, _budgets(reference))
    if not np.isfinite(gaps).all(axis=2).any():
        others = "finish models at smaller budgets (branches.at), or train the one with the higher loss longer"
        raise UserError(f"no gap for {name}: at no budget do it and the reference reach one in-domain loss; {others}")
    return gaps


def pair_gaps(candidate: Evaluations, reference: Evaluations) -> np.ndarray:
    """The gap of one seed at each budget that both have, `[budgets, domains]`; nan if there is none.

    Models at other budgets are points of the curves.
    """
    floors = pair_floors(candidate, reference)
    return _at(candidate, floors) - _at(reference, floors)


def pair_floors(candidate: Evaluations, reference: Evaluations) -> np.ndarray:
    """The lowest in-domain loss that both have reached at each budget that both have."""
    return np.array(
        [
            max(each.in_domain[each.tokens <= tokens].min() for each in (candidate, reference))
            for tokens in common_budgets(candidate, reference)
        ]
    )


def common_budgets(candidate: Evaluations, reference: Evaluations) -> np.ndarray:
    """The budgets at which both have a model, in order."""
    return np.intersect1d(candidate.tokens, reference.tokens)


def _tokens_at_floors(candidate: Evaluations, reference: Evaluations) -> np.ndarray:
    """The training tokens at which both have the losses of `pair_floors`, `[budgets, 2]`."""
    floors = pair_floors(candidate, reference)
    return np.stack([tokens_at(each, floors) for each in (candidate, reference)], axis=1)


def tokens_at(models: Evaluations, losses: np.ndarray) -> np.ndarray:
    """The tokens with which finished models reach in-domain losses: a line in the logarithm of the tokens."""
    nodes, first = np.unique(models.in_domain, return_index=True)
    return np.exp(np.interp(losses, nodes, np.log(models.tokens[first]), np.nan, np.nan))


def _gaps_at_highest(candidate: Seeds, reference: Seeds) -> np.ndarray:
    """`[domains]`: gaps at the highest in-domain loss that finished models of a pair share, the mean over pairs."""
    gaps = []
    for seed in common_seeds(candidate, reference):
        mine, other = candidate[seed], reference[seed]
        highest = np.array([min(mine.in_domain.max(), other.in_domain.max())])
        gaps.append((_at(mine, highest) - _at(other, highest))[0])
    return over_pairs(np.array(gaps))


def _at(models: Evaluations, floors: np.ndarray) -> np.ndarray:
    """The losses `[n, domains]` at the in-domain losses `floors [n]`, on the curves through the models; nan outside."""
    nodes, first = np.unique(models.in_domain, return_index=True)
    bent, at = (nodes, floors) if models.of_mix else (np.exp(CURVATURE * nodes), np.exp(CURVATURE * floors))
    return np.stack([np.interp(at, bent, loss[first], np.nan, np.nan) for loss in models.losses.values()], axis=1)


def _budgets(reference: Seeds) -> np.ndarray:
    """The budgets at which a seed of the reference has a model, in order."""
    return np.unique(np.concatenate([each.tokens for each in reference.values()]))


def common_seeds(candidate: Seeds, reference: Seeds) -> tuple[int, ...]:
    """The seeds of which both have a model at one budget, in order."""
    both = sorted(candidate.keys() & reference.keys())
    return tuple(seed for seed in both if len(common_budgets(candidate[seed], reference[seed])))


def _by_seed(
    what: Callable[[Evaluations, Evaluations], np.ndarray], candidate: Seeds, reference: Seeds, budgets: np.ndarray
) -> np.ndarray:
    """`what` of each seed of the reference, `[seeds, budgets, ...]`; nan where one of the two has no model."""
    pairs = {seed: (candidate[seed], reference[seed]) for seed in common_seeds(candidate, reference)}
    values = {seed: what(*pair) for seed, pair in pairs.items()}
    table = np.full((len(reference), len(budgets), *next((each.shape[1:] for each in values.values()), ())), np.nan)
    for seed, pair in pairs.items():
        table[sorted(reference).index(seed), np.searchsorted(budgets, common_budgets(*pair))] = values[seed]
    return table


def _drawn_again(candidate: Seeds, reference: Seeds, budgets: np.ndarray) -> np.ndarray:
    """The gaps `[draws, budgets, domains]` over documents that are drawn again, the same for both models.

    One draw of the documents as they are, if the models did not keep the losses of the same documents.
    """
    seeds, sides = common_seeds(candidate, reference), (candidate, reference)
    documents = common_documents([side[seed].documents for seed in seeds for side in sides])
    if documents is None:
        return over_pairs(_by_seed(pair_gaps, candidate, reference, budgets))[None]
    random = np.random.default_rng(0)
    gaps = []
    for _ in range(DRAWS):
        draw = documents.draw(random)
        mine, other = ({seed: side[seed].resampled(draw) for seed in seeds} for side in sides)
        gaps.append(over_pairs(_by_seed(pair_gaps, mine, other, budgets)))
    return np.stack(gaps)


def _deviation(drawn: np.ndarray) -> np.ndarray:
    """Standard deviation over draws `[draws, ...]`, of those that have a gap; 0 where none has."""
    return over_pairs((drawn - over_pairs(drawn)) ** 2) ** 0.5
