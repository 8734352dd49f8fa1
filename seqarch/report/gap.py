"""The base-capability gap: how much higher a run's OOD loss is than the reference's at the same in-domain loss.

For runs on a mix of domains without OOD domains, the gap is computed on the training domains' hold-outs. `y` is then
the loss on the hold-out of a domain, and `x` is the loss on the held-out mix.

Base capability is the OOD loss at a matched pre-training loss (arXiv 2505.18522, section 2; its authors read it off a
scatter plot, the number is ours). Let run `a` have evaluation points `(x_k, y_k)`, in-domain loss and OOD loss, and let
`f_a` be the piecewise-linear curve through them, in order of `x`. For run `a` and reference `r`, over the overlap
`[low, high]` of their in-domain losses,

    gap(a, r) = mean over the points of both runs inside the overlap of  f_a(x) - f_r(x),

in nats per token; positive means that `a` generalises worse than its in-domain loss promises. The mean is over
evaluation points, not over the axis. Training passes through high losses within a few steps. Two points lie far apart
there, and a straight line between them is a poor guess. Training spends most of its time at the losses that matter.

**The order of training is not used.** In-domain loss does not always fall: it rises at spikes, and evaluation noise
shuffles neighbours. Points are sorted by in-domain loss, and points of equal loss are averaged. If the loss rises
again, these points lie among the others at that loss. The first tenth of each run's tokens is left out (`EARLY`). It is
warm-up, where the curves turn and the points lie far apart.

**Interval.** It is a bootstrap with fixed random numbers. Within a pair of runs it resamples the distances by circular
moving blocks (Politis and Romano 1992) of about `2 n^(1/3)` neighbouring points, because neighbours share the lines
between them. If a side has several seeds, it also resamples them, independently on both sides. One block, or seed,
fewer is drawn than there are, which makes the variance unbiased (Rao and Wu 1988). Few blocks and fewer seeds need a
wider interval, so Student's t over the normal quantile widens it (Hesterberg 2015, "What teachers should know about the
bootstrap"). All domains are resampled together, so the interval of the mean knows how they move together.

If all runs kept the losses of their evaluation sequences, the documents of the hold-outs are resampled as well, the
same for all runs, and the curves are drawn anew. That deviation is independent of the others and is added to them.

The interval covers the noise from one evaluation to the next and a gap that changes during training. With several seeds
it covers initialisation and data order, and with losses by document another hold-out of the same domains. With one seed
it does not cover another seed. It never covers another training length or another learning rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqarch.errors import UserError
from seqarch.report.documents import DocumentLosses, Draw, common_documents
from seqarch.report.runs import Evaluations
from seqarch.tables import readable

EARLY = 0.1
"""The fraction of a run's tokens whose evaluations are left out of the gap and of the figures' axes."""
MIN_OVERLAP = 0.1
"""Nats of in-domain loss that two runs must share."""
MIN_POINTS = 3
"""Evaluation points inside the overlap that each run must have."""
NORMAL = 1.95996
"""97.5 % quantile of the normal distribution."""
RESAMPLES = 4000
DOCUMENT_RESAMPLES = 400
"""Fewer than `RESAMPLES`, because each draw computes the curves again."""


class OverlapError(UserError):
    """Two runs share too little in-domain loss for a gap; the message says how much more training it takes."""


@dataclass(frozen=True)
class Gap:
    """The gap of one domain (or of their mean) with its 95 % interval, nats per token."""

    domain: str
    value: float
    low: float
    high: float
    points: int
    """Evaluation points inside the overlap, of all runs together."""
    overlap: tuple[float, float]
    """The in-domain losses at which the runs were compared."""
    seeds: tuple[int, int]
    """Runs of the candidate and of the reference."""
    documents: int = 0
    """Evaluation documents that were resampled, of all domains together; 0 where the runs did not keep their losses."""

    def __str__(self) -> str:
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def base_capability_gap(
    runs: Sequence[Evaluations],
    reference: Sequence[Evaluations],
    *,
    names: tuple[str, str] = ("the run", "the reference"),
    early: float = EARLY,
) -> list[Gap]:
    """The gap of a model (one run, or one per seed) against a reference, for each compared domain, then for their mean.

    With several seeds the gap is the mean over all pairs of a run and a reference run, over the losses that all share.

    Args:
        runs: evaluation points of the candidate, one entry per seed.
        reference: the same for the reference, with the same domains.
        names: what to call the two in messages.
        early: fraction of each run's tokens whose evaluations are left out.

    Raises:
        OverlapError: the overlap is too small, or too few points lie in it; says how much more training is needed.
        UserError: the compared domains differ.
    """
    domains = list(runs[0].with_mean())
    if any(list(one.with_mean()) != domains for one in (*runs, *reference)):
        raise UserError(f"{names[0]} and {names[1]} have losses of different domains: evaluate both on the same")
    late_runs, late_reference = ([late(one, early) for one in side] for side in (runs, reference))
    low, high = _overlap(late_runs, late_reference, names)
    curves, others = ([_curve(one) for one in side] for side in (late_runs, late_reference))
    pairs = [[_distances(a, b, low, high) for b in others] for a in curves]
    values = np.mean([[pair.mean(axis=0) for pair in row] for row in pairs], axis=(0, 1))
    deviations = student(_freedom(pairs)) * (_bootstrap(pairs) - values)
    documents = common_documents([one.documents for one in (*late_runs, *late_reference)])
    if documents:
        deviations = deviations + _document_deviations(late_runs, late_reference, documents)
    interval = values + np.percentile(deviations, (2.5, 97.5), axis=0)
    points = sum(_inside(one, low, high) for one in (*late_runs, *late_reference))
    drawn = sum(map(len, documents.documents.values())) if documents else 0
    shared = points, (low, high), (len(runs), len(reference)), drawn
    rows = zip(domains, values.tolist(), *interval.tolist(), strict=True)
    return [Gap(domain, value, bottom, top, *shared) for domain, value, bottom, top in rows]


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


def late(run: Evaluations, early: float = EARLY) -> Evaluations:
    """The run without its first `early` fraction of tokens; the last point always stays."""
    return run.at(run.tokens >= early * run.tokens.max())


def shared_losses(runs: Sequence[Evaluations]) -> tuple[float, float]:
    """The lowest and the highest in-domain loss that all runs went through; the first is larger if there is none."""
    return float(max(one.in_domain.min() for one in runs)), float(min(one.in_domain.max() for one in runs))


Line = tuple[np.ndarray, np.ndarray]
"""A curve: in-domain losses `[n]`, rising and distinct, and the compared losses `[n, domains]`."""


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


def _document_deviations(runs: list[Evaluations], reference: list[Evaluations], losses: DocumentLosses) -> np.ndarray:
    """The movement of the gap when the documents are drawn again: `[RESAMPLES, domains]`."""
    random = np.random.default_rng(1)
    gaps = np.array([_redrawn(runs, reference, losses.draw(random)) for _ in range(DOCUMENT_RESAMPLES)])
    gaps = gaps[np.isfinite(gaps).all(axis=1)]
    fewest = min(map(len, losses.documents.values()))
    deviations = student(max(fewest - 1, 1)) * (gaps - gaps.mean(axis=0))
    return deviations[random.integers(len(deviations), size=RESAMPLES)]


def _redrawn(runs: list[Evaluations], reference: list[Evaluations], draw: Draw) -> np.ndarray:
    """The gaps `[domains]` over drawn documents, at the in-domain losses that the runs then share."""
    redrawn, others = ([_curve(one.resampled(draw)) for one in side] for side in (runs, reference))
    low = max(x[0] for x, _ in (*redrawn, *others))
    high = min(x[-1] for x, _ in (*redrawn, *others))
    distances = [_distances(a, b, low, high) for a in redrawn for b in others]
    if not all(map(len, distances)):
        return np.full(distances[0].shape[1], np.nan)
    return np.mean([each.mean(axis=0) for each in distances], axis=0)


def _bootstrap(pairs: list[list[np.ndarray]]) -> np.ndarray:
    """Resampled gaps `[RESAMPLES, domains]` from the distances of each pair of runs."""
    random = np.random.default_rng(0)
    blocks = np.array([[_block_means(pair, random) for pair in row] for row in pairs])
    runs = random.integers(len(pairs), size=(RESAMPLES, max(len(pairs) - 1, 1)))
    references = random.integers(len(pairs[0]), size=(RESAMPLES, max(len(pairs[0]) - 1, 1)))
    each = np.arange(RESAMPLES)[:, None, None]
    return blocks[runs[:, :, None], references[:, None, :], each].mean(axis=(1, 2))


def _block_means(distances: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Means of circular moving-block resamples of `distances [n, domains]`: `[RESAMPLES, domains]`."""
    n, (length, count) = len(distances), _blocks(len(distances))
    wrapped = np.concatenate([distances, distances[: length - 1]])
    sums = np.cumsum(np.vstack([np.zeros_like(distances[:1]), wrapped]), axis=0)
    means = (sums[length:] - sums[:-length]) / length
    return means[random.integers(n, size=(RESAMPLES, max(count - 1, 1)))].mean(axis=1)


def _blocks(n: int) -> tuple[int, int]:
    """Length and number of the blocks for `n` distances."""
    length = min(n, int(np.ceil(2 * n ** (1 / 3))))
    return length, int(np.ceil(n / length))


def _freedom(pairs: list[list[np.ndarray]]) -> int:
    """Degrees of freedom of the interval: of the seeds if there are several, else of the blocks."""
    return len(pairs) + len(pairs[0]) - 2 or max(_blocks(len(pairs[0][0]))[1] - 1, 1)


def student(freedom: float) -> float:
    """The ratio of Student's t to the normal for a 95 % interval; `freedom` is at least 1, whole or not."""
    angles = np.linspace(0, np.pi / 2, 4001)  # t is freedom**0.5 times the tangent
    density = np.cos(angles) ** (freedom - 1)
    inside = np.cumsum(density[1:] + density[:-1])
    return float(freedom**0.5 * np.tan(np.interp(0.95, inside / inside[-1], angles[1:]))) / NORMAL


def _inside(run: Evaluations, low: float, high: float) -> int:
    return int(np.sum((run.in_domain >= low) & (run.in_domain <= high)))


def _overlap(runs: list[Evaluations], reference: list[Evaluations], names: tuple[str, str]) -> tuple[float, float]:
    """The in-domain losses that all runs went through, or `OverlapError`."""
    sides = [(names[0], one) for one in runs] + [(names[1], one) for one in reference]
    low, high = shared_losses([*runs, *reference])
    fewest = min(_inside(one, low, high) for _, one in sides)
    if high - low >= MIN_OVERLAP and fewest >= MIN_POINTS:
        return low, high
    points = "1 point" if fewest == 1 else f"{fewest} points"
    found = f"by {high - low:.3f} nats with {points} of one run inside" if high > low else "nowhere"
    raise OverlapError(
        f"no gap for {names[0]} against {names[1]}: their in-domain losses overlap {found} "
        f"(needed: {MIN_OVERLAP:g} nats and {MIN_POINTS} points of each run); " + _remedy(sides, high)
    )


def _remedy(sides: list[tuple[str, Evaluations]], high: float) -> str:
    """The runs that need more training, and how much, until all share `MIN_OVERLAP` nats below `high`."""
    short = [name for name, one in sides if len(one.in_domain) < MIN_POINTS]
    if short:
        return f"{short[0]} has fewer than {MIN_POINTS} evaluations after warm-up: evaluate more often or train longer"
    ladder = [np.sort(one.in_domain[one.in_domain <= high])[::-1] for _, one in sides]
    target = min([high - MIN_OVERLAP, *(steps[MIN_POINTS - 1] for steps in ladder if len(steps) >= MIN_POINTS)])
    behind = [(name, one) for name, one in sides if one.in_domain.min() > target]
    if not behind:
        return "evaluate more often"
    return "; ".join(dict.fromkeys(f"{name} has to come {_more_training(one, target)}" for name, one in behind))


def _more_training(run: Evaluations, target: float) -> str:
    """The fall that is needed and its tokens, by a straight line through loss against log tokens in the second half."""
    here = f"down from {run.in_domain.min():.3f} to {target:.3f} nats in domain"
    half = run.tokens >= np.median(run.tokens)
    if half.sum() < 3:
        return f"{here}, too few evaluations to say how many more tokens that takes"
    slope, _ = np.polyfit(np.log(run.tokens[half]), run.in_domain[half], 1)
    if slope >= 0:
        return f"{here}, but its loss no longer falls"
    growth = float(np.exp(min((target - run.in_domain.min()) / slope, 50.0)))
    if growth > 1000:
        return f"{here}, more than 1000 times its tokens at the present rate"
    more = (growth - 1) * float(run.tokens.max())
    return f"{here}, about {readable(more)} more tokens ({growth:.3g} times its length) if it goes on as before"
