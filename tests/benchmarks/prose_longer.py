"""Sentences and rows of the results page on three times the tokens, with the numbers of the CSV files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from seqarch.report.cubic import monotone_cubic
from seqarch.report.finished import seed_pairs
from tests.benchmarks.prose_finished import at, budget, raw_and_fourth_pair, recorded
from tests.benchmarks.test_budget_tables import BUDGETS, LONGEST
from tests.benchmarks.test_draft_tables import FIVE, curves, evaluations, rows, span, straight

LONGER = ("window_64", "top1_chunk_approx", "delta_net", "mamba2", "top1_chunk", "window_256", "transformer")
"""Models with three times the tokens, in the order of the page."""
CLOSE = {("delta_net", "mamba2"), ("mamba2", "top1_chunk"), ("mamba2", "window_256"), ("top1_chunk", "window_256")}
"""Pairs of them that change places under a change of the method."""
SHARED_LOSSES = np.arange(3.05, 3.185, 0.01)
"""In-domain losses that all runs with three times the tokens passed through, above the lowest shared one."""


@cache
def gaps_at(tokens: str) -> dict[tuple[str, str], float]:
    """The gaps of the runs with three times the tokens at one budget, by run and domain."""
    found = (row for row in rows("three_times/gaps.csv") if row["tokens"] == tokens)
    return {(row["run"], row["domain"]): float(row["gap"]) for row in found}


def half_of_one_pair() -> float:
    """Half of the interval of the raw mean with one pair of seeds."""
    return 3**0.5 * raw_and_fourth_pair()[0]


def longer_sentences() -> Iterable[str]:
    """Three times the tokens."""
    yield f"one pair has about ±{half_of_one_pair():.3f} on the raw mean"
    found = gaps_at(LONGEST)
    ends = (("window_64", "stack", "arxiv"), ("top1_chunk_approx", "stack", "github"), ("delta_net", "wiki", "github"))
    for name, low, high in ends:
        of = {domain: found[name, domain] for domain in FIVE}
        assert [min(of, key=of.__getitem__), max(of, key=of.__getitem__)] == [low, high]
        yield f"still behind, on each domain: {of[low]:+.3f} on {low}, {of[high]:+.3f} on {high}."
    losses = {row["model"]: row for row in rows("three_times/losses.csv") if row["tokens"] == LONGEST}
    copying = {name: f"{float(row['copying']):.2f}" for name, row in losses.items()}
    yield f"saves it {copying['window_64']} nats at 1.02B tokens, and Transformer++ {copying['transformer_pp']}."
    yield f"on github. Copying saves it {copying['top1_chunk_approx']} nats."
    yield f"on github. Copying saves it {copying['delta_net']} nats. It has 8 heads"
    runs = curves()
    seeds = [{seed: evaluations(runs[name, seed]) for seed in range(3)} for name in ("delta_net", "transformer_pp")]
    first, *others = seed_pairs("delta_net", *seeds)[:, 3].mean(axis=1)
    assert first == max(first, *others)
    yield (
        f"With 4 heads its raw mean was {at('delta_net', 3, 'mean, raw')} at 340M tokens,"
        f" from {min(others):+.3f} to {first:+.3f} by seed, and {first:+.3f} is the seed"
    )
    of = {domain: -found["transformer", domain] for domain in FIVE}
    assert [min(of, key=of.__getitem__), max(of, key=of.__getitem__)] == ["speech", "arxiv"]
    yield f"on each domain, by {of['speech']:.3f} on speech and {of['arxiv']:.3f} on arxiv, but by less than"
    yield f"Copying saves it {copying['transformer']} nats."
    one, reference = losses["transformer"], losses["transformer_pp"]
    worse, better = (float(one[column]) - float(reference[column]) for column in ("in_domain", "ood"))
    yield f"its in-domain loss is {worse:.3f} higher, and its mean OOD loss is {-better:.3f} lower."
    assert found["window_256", "mean, recallable tokens"] > 0 > found["window_256", "mean, other tokens"]
    yield f"On other tokens it is {found['top1_chunk', 'mean, other tokens']:+.3f}."
    assert abs(found["top1_chunk", "mean"] - float(budget("delta_net", 3)["gap"])) < 0.01, "a settled gap of this size"
    assert found["top1_chunk", "mean"] < half_of_one_pair() < found["delta_net", "mean"]


def moving_sentences() -> Iterable[str]:
    """Mamba-2, whose gap moves, and RWKV-7, which has one budget."""
    before, found = gaps_at(BUDGETS[3]), gaps_at(LONGEST)
    moves = f"from {before['mamba2', 'mean']:+.3f} to {found['mamba2', 'mean']:+.3f}"
    yield f"Mamba-2 falls {moves}, and all others are nearly level"
    yield f"Mamba-2 catches up: its gap falls {moves}."
    assert {domain for domain in FIVE if before["mamba2", domain] > 0} == set(FIVE)
    assert {domain for domain in FIVE if found["mamba2", domain] > 0} == {"arxiv", "github"}
    yield "behind on arxiv ({:+.3f}) and github ({:+.3f}) only.".format(*(found["mamba2", each] for each in FIVE[:2]))
    assert found["mamba2", "mean, recallable tokens"] > 0 > found["mamba2", "mean, other tokens"]
    (copying,) = (
        row["copying"] for row in rows("three_times/losses.csv") if (row["model"], row["tokens"]) == ("mamba2", LONGEST)
    )
    yield f"ahead on the others. Copying saves it {float(copying):.2f} nats."
    both = (found["mamba2", "stack"] + found["mamba2", "speech"]) / 2
    yield f"its gap on these two domains is {both:+.3f} at 1.02B tokens."
    yield f"RWKV-7 was stopped after {stopped_tokens('rwkv7') / 1e6:.0f}M tokens"
    yield f"with its other seeds in the first table (raw mean {at('rwkv7', 3, 'mean, raw')})."
    assert abs(before["rwkv7", "mean"] - float(budget("rwkv7", 3, "mean, raw")["gap"])) < 0.01


def order_sentences() -> Iterable[str]:
    """The order of the gaps at both budgets."""
    before, found = gaps_at(BUDGETS[3]), gaps_at(LONGEST)
    level = [name for name in LONGER if name != "mamba2"]
    assert max(abs(before[name, "mean"] - found[name, "mean"]) for name in level) < 0.03
    near = [f"{(before[name, 'mean'] + found[name, 'mean']) / 2:+.2f}" for name in level[1:]]
    yield "approximate Top-1 near {}, DeltaNet near {}.".format(*near[:2])
    yield "Exact Top-1 is near {}, the window of 256 near {}, the Transformer near {}.".format(*near[2:])
    (ranks,) = rows("three_times/ranks.csv")
    assert ranks == {**ranks, "models": str(len(LONGER)), "same_sign": str(len(LONGER))}
    yield f"the rank correlation of the two columns is {float(ranks['rank_correlation']):.2f}"
    yield f"and Mamba-2 differ by {before['mamba2', 'mean'] - before['delta_net', 'mean']:.3f} at 340M tokens, and"
    for each in (before, found):
        apart = abs(each["top1_chunk", "mean"] - each["window_256", "mean"])
        yield f"exact Top-1 and the window of 256 by {apart:.3f} at both budgets."
        assert each["top1_chunk", "mean"] > 0 > each["transformer", "mean"]
    gaps = np.array([[each[name, "mean"] for each in (before, found)] for name in LONGER])
    assert (np.diff(gaps[:, 1]) < 0).all()
    assert changing_places(gaps) == {("delta_net", "mamba2"), ("top1_chunk", "window_256")}


def changing_places(gaps: np.ndarray) -> set[tuple[str, str]]:
    """The pairs of `LONGER` whose order differs between columns of [models, columns]."""
    above = gaps[:, None] > gaps[None]
    pairs = [(one, other) for one in range(len(gaps)) for other in range(one + 1, len(gaps))]
    return {(LONGER[one], LONGER[other]) for one, other in pairs if len({*above[one, other]}) > 1}


def stopped_tokens(name: str) -> int:
    """Tokens of the last step that the record of an interrupted run has."""
    return int(recorded(name, "curves.csv").splitlines()[-1].split(",")[1])


def longest_minutes(name: str) -> tuple[str, float]:
    """The GPUs of a run with three times the tokens, "1 x NVIDIA H200", and its minutes."""
    record, exam = (json.loads(recorded(name, file)) for file in ("run.json", "exam.json"))
    return "{devices} x {device}".format(**record["hardware"]), exam["minutes"]


def longest_minutes_sentences() -> Iterable[str]:
    """How long the runs with three times the tokens took."""
    found = {name: longest_minutes(name) for name in ("transformer_pp", *LONGER)}
    gpus, took = found.pop("mamba2")
    assert gpus == "2 x NVIDIA H200"
    yield f"except Mamba-2, which had two H200s and took {took:.1f}."
    here = {name: took for name, (gpus, took) in found.items() if gpus == "1 x NVIDIA H200"}
    assert here.keys() == {"transformer", "window_256"}
    assert {gpus for name, (gpus, _) in found.items() if name not in here} == {"1 x NVIDIA H100 80GB HBM3"}
    there = span([took for name, (_, took) in found.items() if name not in here], 1)
    yield f"On an H200 they took {here['transformer']:.1f} minutes (Transformer)"
    yield f"and {here['window_256']:.1f} (window of 256), on an H100 the others took {there}."


def checks_of_longer_runs() -> Iterable[str]:
    """Rows on the gaps with three times the tokens under other choices of the method."""
    runs = rising_runs()
    reference, found = runs["transformer_pp"], []
    for model in (runs[name] for name in LONGER):
        lowest = max(model[0, 0], reference[0, 0])
        assert lowest < SHARED_LOSSES[0]
        first, *others = differences(model, reference, [lowest, *SHARED_LOSSES])
        ends = rising(model, reference, lowest)
        lines, means = straight(model, reference).mean(), (each.mean() for each in others)
        found.append([first.mean(), lines, *ends, *without_one(first), *means])
    gaps = np.array(found)
    assert (gaps[:, [0, 1, *range(4, gaps.shape[1])]][:-1] > 0).all()
    assert [name for name, least in zip(LONGER, gaps[:, 2], strict=True) if least < 0] == ["mamba2", "transformer"]
    assert (gaps[-1] < 0).all()
    assert (np.diff(gaps[:, 0]) < 0).all()
    assert changing_places(gaps) == CLOSE
    yield _row("as above, at 1.02B tokens", gaps[:, 0])
    yield _row("straight lines in place of curves", gaps[:, 1])
    parts = {
        "any rising curves": gaps[:, 2:4],
        "without any one domain": gaps[:, 4:9],
        f"shared in-domain losses of {span(SHARED_LOSSES, 2)}": gaps[:, 9:],
    }
    for change, each in parts.items():
        yield _row(f"{change}, the least", each.min(axis=1))
        yield _row(f"{change}, the most", each.max(axis=1))


def rising_runs() -> dict[str, np.ndarray]:
    """The runs of `curves`, which have one seed here, with rising in-domain loss."""
    return {name: run[::-1] for (name, _), run in curves("three_times").items()}


def differences(model: np.ndarray, reference: np.ndarray, losses: ArrayLike) -> np.ndarray:
    """The gaps at these in-domain losses, `[losses, domains]`."""
    return np.subtract(*(monotone_cubic(run[:, 0], run[:, 1:], np.asarray(losses)) for run in (model, reference)))


def without_one(gaps: np.ndarray) -> list[float]:
    """The mean gaps without each of the domains."""
    return [np.delete(gaps, k).mean() for k in range(len(gaps))]


def rising(model: np.ndarray, reference: np.ndarray, loss: float) -> tuple[float, float]:
    """The least and the most that the gap at this in-domain loss can be, if both curves only rise with that loss."""
    lower, upper = (
        (run[run[:, 0] <= loss][-1, 1:].mean(), run[run[:, 0] >= loss][0, 1:].mean()) for run in (model, reference)
    )
    return lower[0] - upper[1], lower[1] - upper[0]


def _row(change: str, gaps: np.ndarray) -> str:
    return f"| {change} | {' | '.join(f'{gap:+.3f}' for gap in gaps)} |"
