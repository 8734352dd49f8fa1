"""Gaps of random exams are those that the definition gives, computed once more in another way.

Seeds come in any order and may be missing, budgets are no doublings, and in-domain losses may rise.
"""

import contextlib
import itertools

import numpy as np
import pytest
from scipy.stats import t

from seqarch.errors import UserError
from seqarch.report.documents import DocumentLosses
from seqarch.report.gap import FinishedModels, Seeds, fixed_weights
from seqarch.report.runs import Evaluations
from seqarch.runs.results import NORMAL

DOMAINS = ["arxiv", "github"]
NEIGHBOUR = "the reference at another rate"
NAMES = ["one", "two", NEIGHBOUR]
WEIGHTS = {"raw": np.full(2, 0.5), "standardised": fixed_weights(DOMAINS)}


def random_models(random: np.random.Generator, tokens: np.ndarray) -> Seeds:
    """Two to four of four seeds, some of which lack budgets."""
    seeds, n = {}, len(tokens)
    for seed in random.permutation(4)[: random.integers(2, 5)].tolist():
        kept = np.sort(random.permutation(n)[: random.integers(1, n + 1)]) if random.random() < 0.3 else np.arange(n)
        x = np.linspace(4, 3, n) + random.normal(0, 0.15, n)
        losses = {name: (2 * x + random.normal(0, 0.1, n))[kept] for name in DOMAINS}
        seeds[seed] = Evaluations(tokens[kept], x[kept], losses)
    return seeds


def at(models: Evaluations, domain: str, x: float) -> float:
    """The loss on a domain at an in-domain loss, a line in exp(1.3 x) between the two models around it."""
    points = sorted(zip(models.in_domain.tolist(), models.losses[domain].tolist(), strict=True))
    for (a, low), (b, high) in itertools.pairwise(points):
        if a <= x <= b:
            return low + (high - low) * (np.exp(1.3 * x) - np.exp(1.3 * a)) / (np.exp(1.3 * b) - np.exp(1.3 * a))
    return points[0][1] if x == points[0][0] else np.nan


def pair_gap(candidate: Seeds, reference: Seeds, seed: int, tokens: float) -> np.ndarray:
    """The gap of a seed on each domain at a budget, nan where there is none."""
    sides = [side[seed] for side in (candidate, reference) if seed in side and tokens in side[seed].tokens]
    if len(sides) < 2:
        return np.full(2, np.nan)
    x = max(side.in_domain[side.tokens <= tokens].min() for side in sides)
    return np.array([at(sides[0], name, x) - at(sides[1], name, x) for name in DOMAINS])


def half_of(values: dict[str, list[float]], name: str) -> float:
    """Half of the moderated interval of one of several models, from the values of their pairs."""
    known = {model: [each for each in own if np.isfinite(each)] for model, own in values.items()}
    squares = {model: sum((each - np.mean(own)) ** 2 for each in own) for model, own in known.items()}
    freedom = {model: max(len(own) - 1, 0) for model, own in known.items()}
    if not (total := sum(freedom.values())):
        return np.inf
    prior = min(1.25, total)
    all_freedom = prior + freedom[name]
    variance = (prior * sum(squares.values()) / total + squares[name]) / all_freedom
    return t.ppf(0.975, max(all_freedom, 1)) * np.sqrt(variance / len(known[name]))


def random_exams(n: int):
    """Budgets, models, the losses of models on a part of the tokens, and the reference, of exams that have gaps."""
    random = np.random.default_rng(0)
    while n:
        tokens = random.integers(1, 4, random.integers(2, 5)).cumsum() * 1e6
        models, of_part = ({name: random_models(random, tokens) for name in NAMES} for _ in range(2))
        reference = random_models(random, tokens)
        with contextlib.suppress(UserError):
            parts = {"recallable": (of_part, reference)}
            yield (
                tokens,
                models,
                of_part,
                reference,
                FinishedModels(models, reference, parts, neighbour=NEIGHBOUR).gaps(),
            )
            n -= 1


def test_gaps_are_those_of_the_definition():
    for exam in random_exams(25):
        check_gaps(*exam)


def check_gaps(tokens, models, of_part, reference, gaps):
    table = {
        (name, end): [pair_gap(models[name], reference, seed, end) for seed in reference]
        for name in NAMES
        for end in tokens
    }
    for name, gap in gaps.items():
        ends = [end for end in tokens if np.isfinite(table[name, end]).any()]
        assert [each.tokens for each in gap.budgets] == ends
        for budget in gap.budgets:
            at_end = {model: table[model, budget.tokens] for model in NAMES}
            assert budget.pairs == np.isfinite(at_end[name]).all(axis=1).sum()
            for mean, weights in WEIGHTS.items():
                values = {model: [float(each @ weights) for each in own] for model, own in at_end.items()}
                found = getattr(budget, mean)
                assert found.value == pytest.approx(np.nanmean(values[name]))
                assert found.half_width == pytest.approx(half_of(values, name))
            part = [pair_gap(of_part[name], reference, seed, budget.tokens).mean() for seed in reference]
            assert ("recallable" in budget.parts) == np.isfinite(part).any()
            if "recallable" in budget.parts:
                assert budget.parts["recallable"].value == pytest.approx(np.nanmean(part))
        check_change(gap, table, ends, name)
        assert gap.highest == pytest.approx(highest(models[name], reference), nan_ok=True)
        floors = [each for each in gaps[NEIGHBOUR].budgets if each.tokens <= gap.headline.tokens]
        assert gap.floor == (abs(floors[-1].standardised.value) if floors else 0.0)


def highest(candidate: Seeds, reference: Seeds) -> float:
    """The raw gap at the highest in-domain loss that both have, the mean over the pairs that share a budget."""
    gaps = []
    for seed in candidate.keys() & reference.keys():
        sides = candidate[seed], reference[seed]
        if np.isin(sides[0].tokens, sides[1].tokens).any():
            x = min(side.in_domain.max() for side in sides)
            gaps.append(np.mean([at(sides[0], name, x) - at(sides[1], name, x) for name in DOMAINS]))
    return float(np.nanmean(gaps)) if np.isfinite(gaps).any() else np.nan


def check_change(gap, table, ends, name):
    """The change between the last two budgets, per doubling."""
    changes = {}
    if len(ends) > 1:
        weights, doublings = WEIGHTS["standardised"], np.log2(ends[-1] / ends[-2])
        for model in NAMES:
            pairs = zip(table[model, ends[-2]], table[model, ends[-1]], strict=True)
            changes[model] = [float((after - before) @ weights) / doublings for before, after in pairs]
    if not np.isfinite(changes.get(name, [])).any():
        assert gap.change is None
        return
    assert gap.change is not None
    assert gap.change.value == pytest.approx(np.nanmean(changes[name]))
    assert gap.change.half_width == pytest.approx(half_of(changes, name))


def test_documents_move_the_change_by_its_share_per_doubling():
    """Two budgets whose tokens differ by a factor of four: two doublings."""

    def models(gap: np.ndarray) -> Evaluations:
        inside, code = np.array([[4.0, 4.0], [3.0, 3.0]]), np.stack([np.full(2, 6.0), 6 + gap], axis=1)
        counts = {"in_domain/docs": np.ones(2), "ood/arxiv": np.ones(2)}
        names = {name: np.arange(2) for name in counts}
        documents = DocumentLosses({"in_domain/docs": inside, "ood/arxiv": code}, counts, names, {"docs": 1.0})
        return Evaluations(np.array([1e6, 4e6]), inside.mean(axis=1), {"arxiv": code.mean(axis=1)}, documents=documents)

    change = FinishedModels({"it": {0: models(np.array([0.1, 0.5]))}}, {0: models(np.zeros(2))}).gaps()["it"].change
    assert change is not None
    assert change.value == pytest.approx(0.4 / 2 / 2)
    # of two draws of two documents the second comes up k times, k binomial with variance 1/2
    assert change.documents == pytest.approx(NORMAL * 0.4 * 0.5**0.5 / 2 / 2, rel=0.15)
