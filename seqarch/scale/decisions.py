"""Decision accuracy: do models keep their order from a smaller rung to the largest?

The largest rung is left out, and the order at a smaller one is the prediction. On 25 corpora no scaling law predicted
orders better than this (DataDecide, arXiv 2504.11393). A pair is right if the model with the lower loss at the smaller
rung has the lower loss at the largest one too. A pair with equal losses at one of the rungs is neither right nor wrong.

Pairs share models, so they are not independent. The intervals draw models again, and of each drawn model its seeds.

A summary writes predictions down before the runs that test them: OUT/predictions.csv. A row says which of two models
has the lower loss at the next rung. It is written once, and scored as soon as a larger rung has both models.
"""

import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.stats import kendalltau, rankdata, spearmanr

from seqarch.errors import UserError
from seqarch.scale.losses import Point
from seqarch.tables import read_csv, readable, write_csv

DRAWS = 1000
Rungs = dict[str, dict[str, list[float]]]
"""For each rung, the smallest first, the losses of each model's seeds."""


@dataclass(frozen=True)
class Pair:
    """Two models, the better one first, and how much lower its loss is."""

    better: str
    worse: str
    difference: float


@dataclass(frozen=True)
class Accuracy:
    """How the order at `early` predicts that at `late`: a row of `decisions.csv`.

    Args:
        early: the smaller rung.
        late: the largest rung.
        models: how many both have.
        right: pairs that keep their order.
        pairs: pairs with an order at both rungs.
        tied: the other pairs, which have equal losses at one of the rungs.
        share_low: lower end of the 95 % interval of right / pairs; `None` if the bootstrap has no width.
        share_high: its upper end.
        rank_correlation: Spearman's; `None` if all models of a rung have one loss, and so no order.
        rank_correlation_low: lower end of its 95 % interval, over the draws that have one; `None` as `share_low`.
        rank_correlation_high: the upper end.
        chance: the probability that a random order has as many right pairs.
        decided_from: the largest difference at the smaller rung among wrong pairs; all pairs above it are right.
        decided: the number of pairs above it.
    """

    early: str
    late: str
    models: int
    right: int
    pairs: int
    tied: int
    share_low: float | None
    share_high: float | None
    rank_correlation: float | None
    rank_correlation_low: float | None
    rank_correlation_high: float | None
    chance: float
    decided_from: float
    decided: int


def rungs_of(points: Sequence[Point]) -> Rungs:
    """The losses of each rung or, if all models have one size, those at each budget of tokens."""
    if len({point.rung for point in points}) > 1:
        return ends_of(points)
    budgets: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda each: each.tokens):
        budgets.setdefault(f"{readable(point.tokens)} tokens", []).append(point)
    return {budget: _by_model(own) for budget, own in budgets.items()}


def ends_of(points: Sequence[Point]) -> Rungs:
    """The losses of each rung: of each run at its end."""
    sizes: dict[str, list[float]] = {}
    ends: dict[tuple[str, str, int], Point] = {}
    for point in sorted(points, key=lambda each: each.tokens):
        sizes.setdefault(point.rung, []).append(point.parameters)
        ends[point.rung, point.model, point.seed] = point
    order = sorted(sizes, key=lambda rung: float(np.median(sizes[rung])))
    return {rung: _by_model([end for end in ends.values() if end.rung == rung]) for rung in order}


def _by_model(points: Sequence[Point]) -> dict[str, list[float]]:
    losses: dict[str, list[float]] = {}
    for point in points:
        losses.setdefault(point.model, []).append(point.loss)
    return losses


def ranked_pairs(losses: Mapping[str, Sequence[float]]) -> list[Pair]:
    """All pairs of a rung, the widest difference first."""
    means = {model: float(np.mean(each)) for model, each in losses.items()}
    order = sorted(means, key=lambda model: means[model])
    pairs = [Pair(one, other, means[other] - means[one]) for one, other in combinations(order, 2)]
    return sorted(pairs, key=lambda pair: -pair.difference)


def accuracies(rungs: Rungs) -> list[Accuracy]:
    """How each smaller rung predicts the order at the largest, the smallest rung first.

    A rung counts if it has at least three of the models of the largest.
    """
    *_, late = rungs
    shared = {early: [model for model in rungs[early] if model in rungs[late]] for early in list(rungs)[:-1]}
    return [_accuracy(rungs, early, late, models) for early, models in shared.items() if len(models) > 2]


def _accuracy(rungs: Rungs, early: str, late: str, models: list[str]) -> Accuracy:
    both = np.array([[np.mean(rungs[rung][model]) for model in models] for rung in (early, late)])
    one, other = np.array(list(combinations(range(len(models)), 2))).T
    kept = _kept(both, one, other)
    right, differences = kept > 0, np.abs(both[0, one] - both[0, other])
    wrong = differences[kept < 0].max(initial=0.0)
    ends = (np.quantile(each or [0.0], (0.025, 0.975)).tolist() for each in _drawn(rungs, early, late, models))
    shares, correlations = ((low, high) if high - low > 1e-9 else (None, None) for low, high in ends)
    ordered = _is_ordered(both)
    return Accuracy(
        *(early, late, len(models), int(right.sum()), int((kept != 0).sum()), int((kept == 0).sum())),
        *shares,
        *((float(spearmanr(*both)[0]), *correlations) if ordered else (None, None, None)),  # pyright: ignore[reportArgumentType]
        chance=float(kendalltau(*both, alternative="greater")[1]) if ordered else 1.0,  # pyright: ignore[reportArgumentType]
        decided_from=float(wrong),
        decided=int((right & (differences > wrong)).sum()),
    )


def _kept(both: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """1 for each pair of columns with one order in both rows of `both`, -1 with two orders, 0 for a tie, `[pairs]`."""
    return np.sign(both[:, one] - both[:, other]).prod(axis=0)


def _is_ordered(both: np.ndarray) -> bool:
    """Whether there are two losses at least in each row of `both`."""
    return bool((np.ptp(both, axis=1) > 0).all())


def _drawn(rungs: Rungs, early: str, late: str, models: list[str]) -> tuple[list[float], list[float]]:
    """The share of right pairs and the rank correlation when models and their seeds are drawn again.

    Draws with fewer than three different models are left out, and so are pairs of a model with itself and ties. Draws
    of equal losses have no rank correlation.
    """
    random = np.random.default_rng(0)
    one, other = np.array(list(combinations(range(len(models)), 2))).T
    shares, correlations = [], []
    for _ in range(DRAWS):
        chosen = random.integers(len(models), size=len(models))
        if len(set(chosen.tolist())) < 3:
            continue
        both = np.array([[_redrawn(random, rungs[rung][models[k]]) for k in chosen.tolist()] for rung in (early, late)])
        kept = _kept(both, one, other)[chosen[one] != chosen[other]]
        if kept.any():
            shares.append((kept[kept != 0] > 0).mean())
        if _is_ordered(both):
            correlations.append(np.corrcoef(rankdata(both, axis=1))[0, 1])
    return shares, correlations


def _redrawn(random: np.random.Generator, seeds: Sequence[float]) -> float:
    """The mean loss of seeds that are drawn again."""
    return seeds[0] if len(seeds) == 1 else float(random.choice(seeds, len(seeds)).mean())


PREDICTIONS = "predictions.csv"
COLUMNS = ("written", "loss", "rung", "better", "worse", "difference", "decided")


@dataclass(frozen=True)
class Prediction:
    """One row, and in the last two fields, which the file does not have, what came of it.

    Args:
        written: the date.
        loss: which loss.
        rung: the largest rung at that time.
        better: the model that is expected to have the lower loss.
        worse: the other one.
        difference: by how much at `rung`.
        decided: "yes" if pairs with this difference kept their order before, "no" if not, "" if unknown.
        later: the next rung with both models, "" before there is one.
        measured: the difference at that rung.
    """

    written: str
    loss: str
    rung: str
    better: str
    worse: str
    difference: float
    decided: str
    later: str = ""
    measured: float = float("nan")

    @property
    def holds(self) -> bool:
        return self.measured > 0

    @property
    def is_tied(self) -> bool:
        """Whether the later losses are equal, so that the prediction is neither right nor wrong."""
        return self.measured == 0


def register(path: Path, loss: str, rungs: Rungs, known: Collection[str] = ()) -> None:
    """Write down what the largest rung predicts for the next one. Pairs with a prediction from there keep it.

    A pair of equal losses gets none, nor does a pair of `known` models, whose runs of the next rung are finished.
    """
    *_, last = rungs
    predictions = _read(path)
    before = accuracies(rungs)
    decided_from = before[-1].decided_from if before else None
    there = {(each.loss, each.rung, frozenset((each.better, each.worse))) for each in predictions}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for pair in ranked_pairs(rungs[last]):
        both = frozenset((pair.better, pair.worse))
        if pair.difference and (loss, last, both) not in there and not both <= set(known):
            decided = "" if decided_from is None else "yes" if pair.difference > decided_from else "no"
            predictions.append(Prediction(today, loss, last, pair.better, pair.worse, pair.difference, decided))
    write_csv(path, COLUMNS, ((*astuple(each)[:5], f"{each.difference:.6f}", each.decided) for each in predictions))


def scored(path: Path, loss: str, rungs: Rungs) -> list[Prediction]:
    """The predictions of this loss, each with its score where a larger rung has both models."""
    order = list(rungs)
    predictions = []
    for one in _read(path):
        if one.loss != loss:
            continue
        later = order[order.index(one.rung) + 1 :] if one.rung in order else []
        both = next((rung for rung in later if {one.better, one.worse} <= rungs[rung].keys()), None)
        if both is not None:
            better, worse = (float(np.mean(rungs[both][model])) for model in (one.better, one.worse))
            one = replace(one, later=both, measured=worse - better)
        predictions.append(one)
    return predictions


def _read(path: Path) -> list[Prediction]:
    rows = read_csv(path) if path.is_file() else []
    if rows and tuple(rows[0]) != COLUMNS:
        raise UserError(f"{path} holds no predictions: its columns must be {', '.join(COLUMNS)}")
    return [Prediction(**{**row, "difference": float(row["difference"])}) for row in rows]  # pyright: ignore[reportArgumentType]
