"""Each measured number in the sentences of the results page follows from the CSV files."""

from __future__ import annotations

import csv
import json
import re
import tarfile
from collections.abc import Iterable

import numpy as np
import pytest

from benchmarks import recall_reasons
from benchmarks.key_conv import seeds
from seqarch.report.cubic import monotone_cubic
from seqarch.report.finished import SHARED, pool, seed_pairs
from seqarch.report.gap import NORMAL, student
from seqarch.tables import read_csv
from tests.benchmarks import test_budget_tables
from tests.benchmarks.test_budget_tables import BUDGETS, FLOOR, LONGEST, ROOT, TWO
from tests.benchmarks.test_budget_tables import gap as finished
from tests.benchmarks.test_draft_tables import (
    DOMAINS,
    FIVE,
    PAGE,
    cells,
    curves,
    evaluations,
    gap,
    interval,
    models,
    rows,
    straight,
    value,
)

BODY = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
TEXT = " ".join(re.sub(r"\]\([^)]*\)", "]", re.sub(r"[*`]", "", BODY)).split())
CELLS = " ".join(line for line in re.sub(r"[*`]", "", PAGE).splitlines() if line.startswith("|"))
FOURTEEN = models("figure_1b")


def budget(model: str, budget: int, domain: str = "mean", folder: str = "budgets") -> dict[str, str]:
    row = finished(model, BUDGETS[budget], domain, folder)
    assert row is not None
    return row


def at(model: str, number: int, domain: str = "mean", folder: str = "budgets") -> str:
    return f"{float(budget(model, number, domain, folder)['gap']):+.3f}"


def half(row: dict[str, str]) -> str:
    return f"±{(float(row['high']) - float(row['low'])) / 2:.3f}"


def last_losses(run: str, domain: str = "mean") -> list[float]:
    """The losses at the end of each seed of a draft."""
    points = [row for row in rows("figure_1b/scatter.csv") if (row["run"], row["domain"]) == (run, domain)]
    ends = {row["seed"]: float(row["ood_loss"]) for row in sorted(points, key=lambda row: int(row["step"]))}
    return list(ends.values())


def span(values: Iterable[float], digits: int, word: str = "to") -> str:
    found = list(values)
    return f"{min(found):.{digits}f} {word} {max(found):.{digits}f}"


def ends(run: str, key: str = "ood_loss") -> float:
    return float(FOURTEEN[run][key])


def entropy(run: str, seed: int, step: int, layers: Iterable[int]) -> list[float]:
    where = {(run, str(seed), str(step), str(layer)) for layer in layers}
    table = rows("reasons/entropy.csv")
    return [float(row["entropy"]) for row in table if (row["run"], row["seed"], row["step"], row["layer"]) in where]


def copied(run: str) -> str:
    """What copying saves at the end."""
    found = [row["copying"] for row in rows("copying/copying.csv") if run in row["run"] and row["step"] == "1730"]
    return f"{float(found[-1]):.2f}"


def minutes(commit: str, *starts: str) -> list[float]:
    """The minutes of the runs at `draft` of a commit whose names begin so."""
    table = {row["run"]: row for row in rows("runs.csv") if row["commit"] == commit and row["minutes"]}
    return [
        float(row["minutes"])
        for name, row in table.items()
        if "medium" not in name and name.split("/")[2].startswith(starts)
    ]


def other_rate(model: str) -> str:
    """The gap at 170M tokens of seed 0 to the reference at its other rate, with the weights of the table."""
    runs = curves()
    (gaps,) = seed_pairs(model, {0: evaluations(runs[model, 0])}, {0: evaluations(runs[FLOOR, 0])})
    weights = np.array([float(budget(model, 3, domain)["weight"]) for domain in FIVE])
    return f"{float(gaps[2] @ weights):+.3f}"


def raw_and_fourth_pair() -> tuple[float, float]:
    """Half of the interval over seeds: of the raw mean with three pairs, of the standardised mean with four."""
    runs = curves()
    models_of = {
        name: {seed: evaluations(runs[name, seed]) for seed in range(3) if (name, seed) in runs}
        for name in ("delta_net", "rwkv7", "top1_chunk", "transformer_pp")
    }
    reference = models_of.pop("transformer_pp")
    pairs = [seed_pairs(name, each, reference)[:, 3] for name, each in models_of.items()]
    weights = np.array([float(budget("delta_net", 3, domain)["weight"]) for domain in FIVE])
    (raw, freedom), (deviation, _) = (
        pool([each.mean(axis=1) for each in pairs]),
        pool([each @ weights for each in pairs]),
    )
    more = freedom * 8 / 5  # the three models have 3, 3 and 2 pairs now
    return NORMAL * student(freedom) * raw / 3**0.5, NORMAL * student(more) * deviation / 2


def recall(mixer: str, column: int = 3, width: str = "64") -> str:
    return next(row for row in cells("| mixer                   | width") if row[:2] == [mixer, width])[column]


ATTENTION = ("transformer", "window", "top1_chunk", "qk_norm", "position", "temperature", "constant")
RECURRENT = ("rwkv5", "rwkv6", "mamba", "delta", "gated", "based", "hybrid")
SPREAD = ("mamba1", "mamba2", "based", "window_64", "transformer_pp")
LAST = {
    run: {domain: float(np.mean(last_losses(run, domain))) for domain in ("arxiv", "github", "stack")}
    for run in FOURTEEN
}
ENTROPY = {"arxiv": 6.30, "github": 6.19, "stack": 6.90}
"""Unigram entropies of the drafts' hold-outs, from the runs' `run.json`."""
COPIED = {name.split()[0]: float(said.split()[0]) for name, *_, said, _ in cells("| model, one run each")}


LONGER = ("window_64", "top1_chunk_approx", "delta_net", "top1_chunk", "window_256", "transformer")
"""Models with three times the tokens, in the order of the page."""
SHARED_LOSSES = np.arange(3.05, 3.205, 0.01)
"""In-domain losses that all runs with three times the tokens passed through, above the lowest shared one."""


def short(folder: str, run: str) -> str:
    return f"{float(gap(folder, run)['gap']):+.2f}"


def recallable_shares() -> dict[str, float]:
    """The percentage of recallable tokens by domain in the hold-outs of the records."""
    with tarfile.open(ROOT / "benchmarks/exam_x3/transformer_pp-seed_0.tar.xz") as archive:
        file = archive.extractfile("transformer_pp/seed_0/curves.csv")
        assert file is not None
        found = list(csv.DictReader(file.read().decode().splitlines()))
    row = next(each for each in found if each["share_recallable/ood/arxiv"])
    start = "share_recallable/"
    return {name.rpartition("/")[2]: 100 * float(row[name]) for name in row if name.startswith(start)}


def finished_sentences() -> Iterable[str]:
    """The finished models."""
    share = 3 * (1 - 1 / 3) / (1 / SHARED**2 + 3 - 1)  # for one pair of seeds, next to three models of three pairs
    wider = (1 - share + share / student(3 - 1) ** 2) ** -0.5  # deviations that all share leave two degrees of freedom
    yield f"up to {100 * (wider - 1):.0f} % wider than [the exam's"
    yield f"to full attention: {at('top1_chunk', 3)} {half(budget('top1_chunk', 3)).replace('±', '± ')}"
    yield f"DeltaNet generalises worse: {at('delta_net', 3)} {half(budget('delta_net', 3)).replace('±', '± ')}"
    yield f"Mamba-2's gap falls from {at('mamba2', 1)} at 85M to {at('mamba2', 2)} at 170M tokens (one seed)"
    yield f"has a gap to itself of {at(FLOOR, 1)} at 85M and {at(FLOOR, 2)} at 170M tokens"
    later = {
        row["domain"]: float(row["gap"])
        for row in rows("three_times/gaps.csv")
        if (row["run"], row["tokens"]) == ("transformer_pp-3.3e-3", BUDGETS[3])
    }
    assert max(abs(later[domain]) for domain in FIVE if domain != "github") < 0.008
    yield f"The floor of the raw mean is {later['mean, raw']:+.3f} there: {later['github']:+.3f} on github,"
    yield "on github, and less than 0.008 on each other domain."
    share = recallable_shares()
    few = span((share[domain] for domain in ("speech", "stack", "wiki")), 0)
    yield f"Recallable tokens are {share['arxiv']:.0f} % of arxiv and {share['github']:.0f} % of github,"
    yield f"of github, and {few} % of the others (in the hold-outs of the records in benchmarks/exam_x3)."
    three, recalled = budget("delta_net", 3), budget("delta_net", 3, "mean, recallable tokens")
    wide, fourth = raw_and_fourth_pair()
    yield f"three pairs give {half(three)} on the standardised mean, ±{wide:.3f} on the raw mean and {half(recalled)}"
    yield f"Two pairs give {half(budget('rwkv7', 3))} on the standardised mean. A fourth pair of each model would take"
    yield f"take {half(three)} to about ±{fourth:.3f}."
    ends_of = [
        row for row in rows("budgets/losses.csv") if row["model"] == "transformer_pp" and row["tokens"] == BUDGETS[3]
    ]
    one, *others = sorted((row["seed"] != "1", f"{float(row['recallable']):.2f}") for row in ends_of)
    assert {said for _, said in others} == {others[0][1]}
    yield f"to {others[0][1]} nats at 340M tokens against {one[1]} of seed 1."
    yield f"A gap above {float(budget('mamba2', 3, folder=TWO)['high']):.3f} is ruled out on these domains."
    left_out = [at("mamba2", 2, domain) for domain in ("arxiv", "github")]
    yield f"At 170M tokens its gap was {left_out[0]} on arxiv and {left_out[1]} on github, which this table leaves out."
    assert max(float(budget("mamba2", 2, domain)["gap"]) for domain in ("stack", "speech")) < 0.05
    far, near = rows("budgets/ranks.csv")
    assert {each["models"] for each in (far, near)} == {"3"}
    correlations = [f"{float(each['rank_correlation']):.2f}" for each in (near, far)]
    yield "Their correlation, again with the reference, is {} and {}".format(*correlations)
    assert [budget("rwkv7", number)["pairs"] for number in (1, 2, 3)] == ["3", "3", "2"]
    held = [
        [float(budget(name, k)[end]) for end in ("low", "high")] for name in ("rwkv7", "top1_chunk") for k in (2, 3)
    ]
    assert all(low < 0 < high for low, high in held)
    yield f"at 170M tokens was {at('mamba2', 2)}, on these two it is {at('mamba2', 2, folder=TWO)}."
    (saved,) = (row["copying"] for row in rows("budgets/losses.csv") if row["copying"] and row["tokens"] == BUDGETS[3])
    yield f"Transformer++ saves {float(saved):.2f}."
    of_two = {row["model"]: f"{float(row['copying']):.2f}" for row in rows(f"{TWO}/losses.csv") if row["copying"]}
    yield f"Copying saves this model {of_two['window_64']} nats."
    yield f"Mamba-2 {of_two['mamba2']} nats per token at 340M tokens, and approximate Top-1"
    yield f"and approximate Top-1 {of_two['top1_chunk_approx']}."
    late = [float(budget(model, 3, folder=TWO)["gap"]) for model in ("window_64", "top1_chunk_approx")]
    yield f"the window stays near {late[0]:+.1f}, approximate Top-1 near {late[1]:+.2f},"
    versions = {row["versions"] for row in rows("runs.csv")}
    (torch, triton) = (re.search(rf"{name} ([\d.]+\d)", "; ".join(versions)) for name in ("torch", "triton"))
    assert torch is not None
    assert triton is not None
    yield f"PyTorch {torch[1].removesuffix('.0')}, Triton {triton[1]},"
    ladder = [row for row in rows("budgets/ladder.csv") if row["model"] == "mamba2"]
    best, worse = sorted(ladder, key=lambda row: float(row["in_domain"]))[0], max(float(row["rate"]) for row in ladder)
    yield f"Mamba-2's best rate is {float(best['rate']) * 1e3:.1f}e-3, five times the size's rate."
    yield f"the size's rate. {worse * 100:.1f}e-2 is worse"
    rungs = {
        model: {
            float(row["rate"]): float(row["in_domain"]) for row in rows("budgets/ladder.csv") if row["model"] == model
        }
        for model in ("gated_delta_net", "transformer")
    }
    gated, learned = ((min(each, key=each.__getitem__), max(each), each) for each in rungs.values())
    more = gated[2][gated[1]] - gated[2][gated[0]]
    yield f"best rate is {gated[0] * 1e3:.2f}e-3, and {gated[1] * 1e3:.2f}e-3 ends {more:.3f} higher."
    above = min(rate for rate in learned[2] if rate > learned[0])
    higher = learned[2][above] - learned[2][learned[0]]
    yield f"The Transformer's is {learned[0] * 1e3:.1f}e-3, and {above * 1e3:.2f}e-3 ends {higher:.3f} higher."
    moved = (short("figure_1b", "delta_net"), short("figure_1b", "rwkv7"))
    raw = [np.mean([float(budget(name, 3, domain)["gap"]) for domain in DOMAINS]) for name in ("delta_net", "rwkv7")]
    yield f"DeltaNet's gaps is {moved[0]} here and {raw[0]:+.2f} for the finished models at 340M tokens."
    yield f"RWKV-7's raw mean is {moved[1]} here and {raw[1]:+.2f} there."


def longer_sentences() -> Iterable[str]:
    """Three times the tokens."""
    yield f"one pair has about ±{3**0.5 * raw_and_fourth_pair()[0]:.3f} on the raw mean"
    found = {
        (row["run"], row["domain"]): float(row["gap"])
        for row in rows("three_times/gaps.csv")
        if row["tokens"] == LONGEST
    }
    ends = (("window_64", "stack", "arxiv"), ("top1_chunk_approx", "stack", "github"), ("delta_net", "wiki", "github"))
    for name, low, high in ends:
        of = {domain: found[name, domain] for domain in FIVE}
        assert [min(of, key=of.__getitem__), max(of, key=of.__getitem__)] == [low, high]
        yield f"still behind, on each domain: {of[low]:+.3f} on {low}, {of[high]:+.3f} on {high}."
    copying = {
        row["model"]: f"{float(row['copying']):.2f}"
        for row in rows("three_times/losses.csv")
        if row["tokens"] == LONGEST
    }
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
    one, reference = (
        next(row for row in rows("three_times/losses.csv") if (row["model"], row["tokens"]) == (name, LONGEST))
        for name in ("transformer", "transformer_pp")
    )
    worse, better = (float(one[column]) - float(reference[column]) for column in ("in_domain", "ood"))
    yield f"its in-domain loss is {worse:.3f} higher, and its mean OOD loss is {-better:.3f} lower."
    assert found["window_256", "mean, recallable tokens"] > 0 > found["window_256", "mean, other tokens"]
    middle = {
        name: np.mean(
            [float(row["gap"]) for row in rows("three_times/gaps.csv") if (row["run"], row["domain"]) == (name, "mean")]
        )
        for name in LONGER
    }
    near = [f"{middle[name]:+.2f}" for name in LONGER[1:]]
    yield "approximate Top-1 near {}, DeltaNet near {}.".format(*near[:2])
    yield "Exact Top-1 is near {}, the window of 256 near {}, the Transformer near {}.".format(*near[2:])
    yield f"On other tokens it is {found['top1_chunk', 'mean, other tokens']:+.3f}."
    (ranks,) = rows("three_times/ranks.csv")
    assert ranks == {**ranks, "models": str(len(LONGER)), "same_sign": str(len(LONGER))}
    yield f"the rank correlation of the two columns is {float(ranks['rank_correlation']):.2f}"
    for tokens in (BUDGETS[3], LONGEST):
        at_tokens = {
            row["run"]: float(row["gap"])
            for row in rows("three_times/gaps.csv")
            if (row["tokens"], row["domain"]) == (tokens, "mean")
        }
        yield f"differ by {abs(at_tokens['top1_chunk'] - at_tokens['window_256']):.3f} at both budgets"
        assert sorted(LONGER[:4], key=at_tokens.__getitem__, reverse=True) == list(LONGER[:4])
        assert at_tokens["top1_chunk"] > 0 > at_tokens["transformer"]
    assert abs(found["top1_chunk", "mean"] - float(budget("delta_net", 3)["gap"])) < 0.01, "a settled gap of this size"
    assert found["top1_chunk", "mean"] < 3**0.5 * raw_and_fourth_pair()[0] < found["delta_net", "mean"]


def longest_minutes(name: str) -> tuple[str, float]:
    """The GPU of a run with three times the tokens, and its minutes."""
    with tarfile.open(ROOT / f"benchmarks/exam_x3/{name}-seed_0.tar.xz") as archive:
        files = [archive.extractfile(f"{name}/seed_0/{each}.json") for each in ("run", "exam")]
        record, exam = (json.load(file) for file in files if file is not None)
    return record["hardware"]["device"], exam["minutes"]


def longest_minutes_sentences() -> Iterable[str]:
    """How long the runs with three times the tokens took."""
    found = {name: longest_minutes(name) for name in ("transformer_pp", *LONGER)}
    here = {name: took for name, (device, took) in found.items() if device == "NVIDIA H200"}
    assert here.keys() == {"transformer", "window_256"}
    assert {device for name, (device, _) in found.items() if name not in here} == {"NVIDIA H100 80GB HBM3"}
    there = span([took for name, (_, took) in found.items() if name not in here], 1)
    yield f"On an H200 they took {here['transformer']:.1f} minutes (Transformer)"
    yield f"and {here['window_256']:.1f} (window of 256), on an H100 the others took {there}."


def test_longer_runs_have_the_order_of_other_runs_on_two_domains():
    longest = {
        (row["run"], row["domain"]): float(row["gap"])
        for row in rows("three_times/gaps.csv")
        if row["tokens"] == LONGEST
    }
    later = [longest[name, "stack"] + longest[name, "speech"] for name in LONGER[:4]]
    earlier = [float(budget(name, 3, "mean, raw", TWO)["gap"]) for name in LONGER[:4]]
    assert sorted(later, reverse=True) == later
    assert sorted(earlier, reverse=True) == earlier
    assert min(*later, *earlier) > 0


def checks_of_longer_runs() -> Iterable[str]:
    """Rows on the gaps with three times the tokens under other choices of the method."""
    runs = {name: each[::-1] for (name, _), each in curves("three_times").items()}  # rising in-domain loss
    reference, found = runs["transformer_pp"], []
    for model in (runs[name] for name in LONGER):
        lowest = max(model[0, 0], reference[0, 0])
        assert lowest < SHARED_LOSSES[0]
        first, *others = np.subtract(
            *(monotone_cubic(run[:, 0], run[:, 1:], np.array([lowest, *SHARED_LOSSES])) for run in (model, reference))
        )
        without = [np.delete(first, k).mean() for k in range(len(FIVE))]
        ends = rising(model, reference, lowest)
        found.append(
            [first.mean(), straight(model, reference).mean(), *ends, *without, *(each.mean() for each in others)]
        )
    gaps = np.array(found)
    assert (gaps[:-1] > 0).all()
    assert (gaps[-1] < 0).all()
    for alike in ("top1_chunk", "window_256"):  # these two change places
        assert (np.diff(np.delete(gaps, LONGER.index(alike), axis=0), axis=0) < 0).all()
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


def rising(model: np.ndarray, reference: np.ndarray, loss: float) -> tuple[float, float]:
    """The least and the most that the gap at this in-domain loss can be, if both curves only rise with that loss."""
    lower, upper = (
        (run[run[:, 0] <= loss][-1, 1:].mean(), run[run[:, 0] >= loss][0, 1:].mean()) for run in (model, reference)
    )
    return lower[0] - upper[1], lower[1] - upper[0]


def _row(change: str, gaps: np.ndarray) -> str:
    return f"| {change} | {' | '.join(f'{gap:+.3f}' for gap in gaps)} |"


def draft_sentences() -> Iterable[str]:
    """The drafts."""
    apart = max(map(ends, SPREAD)) - min(map(ends, SPREAD))
    assert max(inside := [ends(run, "in_domain_loss") for run in SPREAD]) - min(inside) < 0.02
    yield f"end within 0.02 nats of each other on web text. On the unseen text they lie up to {apart:.2f} nats apart."
    faster = ends("transformer_pp") - float(models("learning_rate/2.2e-3")["transformer_pp"]["ood_loss"])
    yield f"Transformer++ at [2.2e-3] is {faster:.1f} nats lower OOD."
    yield f"most of all Transformer++ ({faster:.2f} nats OOD)"
    better = [name for name, *_, of in cells("| model, one run each") if of.startswith("-") and float(of) < -0.2]
    most = [saved for name, saved in COPIED.items() if all(not each.startswith(name) for each in better)]
    assert max(most) <= 0.7
    least = min(COPIED[name.split()[0]] for name in better)
    yield f"copies at least {int(least * 10) / 10} nats, and every other one at most 0.7."
    yield f"itself is {interval('reasons/against_rwkv7', 'rwkv7_shell_softmax_100k')}, two seeds each."
    learned = interval("positions", "position_absolute")
    other = interval("positions/against_transformer", "position_absolute")
    yield f"has a gap of {learned}. It cannot be told apart from the Transformer ({other},"
    shell, first = "rwkv7_shell_softmax_100k", range(3)
    early = [entropy(run, seed, 346, [1])[0] for seed in (0, 1) for run in ("transformer", shell)]
    yield "is down to {:.1f} and {:.1f} nats ({:.1f} and {:.1f} in seed 1).".format(*early)
    yield f"are then still at {span(entropy('transformer_pp', 0, 346, first), 1)} nats."
    yield f"They end at {span(entropy('transformer_pp', 0, 1730, first), 1)} nats,"
    assert (
        max(abs(float(gap("figure_1a/unseen", row[0], "stack")["gap"])) for row in cells("| model | web training"))
        < 0.02
    )
    yield "All gaps on stack fall below 0.02 nats"
    for run in ("rwkv7", "top1_chunk", "window_64", "mamba2"):
        three, all_five = (abs(float(gap(f"figure_1a{part}", run)["gap"])) for part in ("/unseen", ""))
        assert all_five < three
    yield "The first panel of the figure has the mean of all five hold-outs, in which the gaps are smaller."
    stop = {
        run: row
        for run in ("mamba2_decay_none_no_conv", "mamba2")
        for row in rows("mamba2/scatter.csv")
        if row["run"] == run and row["step"] == "934" and row["seed"] == "0"
    }
    bare, whole = (float(row["in_domain_loss"]) for row in stop.values())
    yield f"after {int(stop['mamba2']['tokens']) / 1e6:.0f}M tokens such a Mamba-2 is at {bare:.2f} nats,"
    yield f"Mamba-2 itself at {whole:.2f}."
    yield f"copies little ({copied('hybrid_gated_delta_net_attention')} nats)"
    yield f"takes Transformer++ to {interval('temperature', 'qk_norm')}."
    yield f"Exact selection, which has it too, is at {value('figure_1b', 'top1_chunk')}."
    large = [copied(f"exam_medium/medium/{run}/") for run in ("transformer", "transformer_pp", "top1_chunk")]
    yield "copying: {} nats for the Transformer, {} for Transformer++ and {} for Top-1 chunk".format(*large)


def cells_of_answers() -> Iterable[str]:
    """Rows of tables that no other test reads."""
    on_stack = [value("windows", f"window_{keys}", "stack") for keys in (16, 64, 256)]
    yield f"on stack only {', '.join(on_stack)}:"
    facts, runs = models("relation"), ("constant_keys", "constant_queries_keys")
    inside, outside = ([f"{float(facts[run][key]):.3f}" for run in runs] for key in ("in_domain_loss", "ood_loss"))
    yield f"they end at {' and '.join(inside)} in domain, {' and '.join(outside)} OOD"
    by_domain = [" and ".join(value("relation", run, domain) for run in runs) for domain in ("stack", "github")]
    yield f"on stack {by_domain[0]}, on github {by_domain[1]}"
    sharp = ["temperature_0.0625", "qk_norm", "temperature_0.25", "temperature_0.5", "temperature_1.0"]
    losses = [f"{float(models('temperature')[run]['ood_loss']):.3f}" for run in sharp]
    losses[3] += " (at step 1,488)"
    yield f"OOD loss at the end {', '.join(losses)}: sharper"
    yield f"The gaps, {', '.join(value('temperature', run) for run in sharp)}, all hold zero"
    flat = [" and ".join(value("temperature", run, domain) for run in sharp[3:]) for domain in ("stack", "github")]
    yield f"at 0.5 and 1.0 on stack {flat[0]}, on github {flat[1]}"
    chunks = [f"top1_chunk{end}" for end in ("_16", "_32", "", "_128", "_2_remote", "_4_remote")]
    yield f"| {' | '.join(interval('chunk_size', run) for run in chunks)} |"
    for run in ("rwkv7", "transformer", "top1_chunk", "mamba2"):
        end = models("medium")[run]
        loss = f"{float(end['in_domain_loss']):.3f} / {float(end['ood_loss']):.3f}"
        yield f"| {run} | {interval('figure_1b', run)} | {interval('medium', run)} | {loss} |"
    end = models("medium")["transformer_pp"]
    yield f"| reference | reference | {float(end['in_domain_loss']):.3f} / {float(end['ood_loss']):.3f} |"
    yield f"seed 0 | {' | '.join(map(other_rate, ('delta_net', 'rwkv7', 'top1_chunk')))} |"
    two, three = (span(minutes(commit, *ATTENTION), 1) for commit in ("dead9ea", "8985401"))
    yield f"| attention or Top-1 chunk | {two} | {span([m for m in minutes('8985401', *ATTENTION) if m < 10], 1)} |"
    assert three.endswith("10.1")  # two remote chunks, which the page names by themselves
    alone = [f"{minutes('dead9ea', run)[0]:.1f}" for run in ("top1_element", "rwkv7_shell")]
    yield f"| Top-1 element, the shell | {', '.join(alone)} |"
    recurrent = [
        [
            *minutes(commit, *RECURRENT),
            *(m for m in minutes(commit, "rwkv7") if m not in minutes(commit, "rwkv7_shell")),
        ]
        for commit in ("dead9ea", "8985401")
    ]
    yield f"| recurrences | {span(recurrent[0], 1)} | {span(recurrent[1], 1)} |"


def recall_reasons_sentences() -> Iterable[str]:
    """Convolution, norm and precision of linear attention."""
    table = read_csv(ROOT / "docs/results/recall/reasons.csv")
    found = {variant: recall_reasons.accuracies(table, variant) for variant in recall_reasons.VARIANTS}
    assert {tuple(each) for each in found.values()} == {tuple("01234567")}
    ours, half, zoology, rms, based, based_rms = found.values()
    means = [f"{np.mean([*each.values()]):.3f}" for each in (ours, half, zoology, rms)]
    assert all(zoology[seed] > ours[seed] for seed in ours)
    yield f"ours gives {means[0]} and Zoology's gives {means[2]} in the same 12 epochs,"
    yield "in the same 12 epochs, and Zoology's is ahead in each of the eight seeds."
    yield f"our convolution gives {means[1]} in bf16."
    yield f"TaylorLinearAttention reaches {means[0]} with LayerNorm and {means[3]} with RMSNorm."
    assert sum(each < 0.4 for each in based_rms.values()) == 2
    yield "Based with RMSNorm stays below 0.4 in two of the eight seeds, so its interval is wide and holds zero."
    assert sum(based[seed] < ours[seed] for seed in ours) == 6
    yield "which has twice the channels. It is lower in six of the eight seeds."
    intervals = [row[-1].split(" ± ") for row in list(recall_reasons.table(table))[2:]]
    clear = [abs(float(mean)) > float(width) for mean, width in intervals]
    assert clear == [False, True, False, True, False]  # bf16, Zoology's, RMSNorm, Based, Based with RMSNorm
    apart = [max(each.values()) - min(each.values()) for each in found.values()]
    yield f"The seeds of a row differ by {span(apart, 2)}, so one seed says little"


def other_sentences() -> Iterable[str]:
    """Recall, care and cost."""
    known = [float(row[5]) - float(row[3]) for row in cells("| mixer                   | width") if row[5] != "-"]
    near = sum(abs(each) < 0.03 for each in known)
    assert (near, len(known)) == (5, 8)
    yield "Five of the eight points with a published accuracy lie within 0.03 of it."
    states = [
        float(row[3]) for row in cells("| mixer                   | width") if int(row[2].replace(",", "")) < 12_000
    ]
    yield f"of that state and reach {span(states, 2)}."
    assert min(float(recall(each)) for each in ("Attention", "Top1Element", "Top1Chunk")) >= 0.99
    yield "Full attention and exact Top-1 selection reach at least 0.99, and they keep all keys."
    yield f"A window of 64 keys reaches {float(recall('Attention, window 64', width='128')):.2f}."
    recalled = [float(recall(each)) for each in ("RWKV6", "GatedDeltaNet", "RWKV7")]
    yield f"RWKV-6, Gated DeltaNet and RWKV-7 at {span(recalled, 2)} with"
    yield f"Linear attention of Based ({recall('TaylorLinearAttention', 6)})."
    yield f"Mamba-2 ({recall('Mamba2', 6)} at width 64, {recall('Mamba2', 6, '128')} at width 128)."
    table = read_csv(ROOT / "docs/results/recall/key_conv.csv")
    exact, approx = ([np.mean(seeds(table, each, "8", kernel)) for kernel in "03"] for each in ("exact", "approx"))
    yield f"between the two selections, from {exact[0] - approx[0]:.2f} to {exact[1] - approx[1]:.2f}."
    lower = float(recall("TaylorLinearAttention")) - float(recall("Based"))
    yield f"Based itself is {lower:.1f} lower than its linear attention."
    between = [span(last_losses(run), 3, "and") for run in ("transformer_pp", "top1_chunk", "mamba2")]
    yield "Transformer++ end between {} nats OOD, of Top-1 chunk between {}, of Mamba-2 between {}.".format(*between)
    yield f"ended at 5.569 instead of {last_losses('transformer_pp')[0]:.3f}, because"
    yield "entropies are {:.2f} (arxiv), {:.2f} (github) and {:.2f} nats (stack)".format(*ENTROPY.values())
    above = {domain: sum(each[domain] > ENTROPY[domain] for each in LAST.values()) for domain in ENTROPY}
    assert above == {"arxiv": 9, "github": 5, "stack": 0}
    far = span((LAST[run]["arxiv"] - ENTROPY["arxiv"] for run in ("mamba2", "mamba1")), 1)
    yield f"Nine of the fourteen models end above the entropy on arxiv (both Mambas by {far} nats) and five on github."
    yield f"do all models end well below it ({span((each['stack'] for each in LAST.values()), 1)})."
    table = {row["run"]: row["minutes"] for row in rows("runs.csv")}
    yield f"Two remote chunks took {float(table['exam/small/top1_chunk_2_remote/seed_0']):.1f} minutes."
    large = {name.split("/")[2]: float(each) for name, each in table.items() if "medium" in name and each}
    yield f"took {span((each for run, each in large.items() if run != 'rwkv7'), 1)} minutes and RWKV-7"
    yield f"minutes and RWKV-7 {large['rwkv7']:.1f}."
    yield f"of each of the {len(table)} runs."


PROSE = [
    *finished_sentences(),
    *longer_sentences(),
    *longest_minutes_sentences(),
    *draft_sentences(),
    *recall_reasons_sentences(),
    *other_sentences(),
]


@pytest.mark.parametrize("sentence", PROSE)
def test_a_sentence_has_the_numbers_of_the_csv(sentence: str):
    assert sentence in TEXT


@pytest.mark.parametrize("row", [*cells_of_answers(), *checks_of_longer_runs()])
def test_a_row_has_the_numbers_of_the_csv(row: str):
    assert row in CELLS


WITHOUT_CSV = (
    "has 0.72 and 0.80, so the differences are +0.01 and -0.07. The published points are read from a figure, to ±0.02",
)
"""Sentences on published figures."""
THRESHOLDS = ("within 0.02", "below 0.02", "within 0.03 of it", "outside 0.03", "gaps below 0.04", "had reached 0.99")
ELSEWHERE = (  # in test_budget_tables and test_draft_tables
    r"ends at \S+, close",
    r"A gap above \S+ is ruled out\.",
    r"A gap above \S+ is ruled out in this mean",
    r"DeltaNet stays between \S+ and \S+, and RWKV-7 between \S+ and \S+",
    r"saves \S+ nats per token by \[copying\] after 43M tokens, \S+ after 85M, \S+ after 170M and \S+ after",
    r"\S+ to \S+ \(window\), \S+ to \S+ \(approximate Top-1\) and \S+ to \S+ \(Mamba-2\)",
    r"is \S+ between 170M and 340M tokens and \S+ between 85M and 340M",
    r"\(Spearman's rank correlation \S+ over the ten\)",
)


def test_every_measured_number_in_a_sentence_is_checked():
    lines = re.sub(r"\]\([^)]*\)", "]", re.sub(r"[*`]", "", BODY)).splitlines()
    text = " ".join(" ".join(line for line in lines if not line.startswith("|")).split())
    tests = (
        test_budget_tables.test_findings_on_the_page_are_those_of_the_csv,
        test_budget_tables.test_findings_on_two_domains_are_those_of_the_csv,
    )
    claims = [each[0].replace(r"\*", "") for test in tests for each in test.pytestmark[0].args[1]]
    said = [*claims, *ELSEWHERE, *map(re.escape, (*PROSE, *WITHOUT_CSV, *THRESHOLDS))]
    checked = {place for each in said for found in re.finditer(each, text) for place in range(*found.span())}
    numbers = list(re.finditer(r"(?<![\w.])[+-]?\d\.\d\d\d?(?![\d.eB])", text))
    assert len(numbers) > 100
    assert [text[each.start() - 60 : each.end() + 20] for each in numbers if each.start() not in checked] == []


def test_the_page_of_the_exam_has_the_minutes_of_the_finished_models():
    said = re.search(r"a run took (\S+) minutes .* and (\S+) \(RWKV-7\)", TEXT)
    assert said
    minutes = " to ".join(f"{float(each):.0f}" for each in said.groups())
    (row,) = re.findall(r"^\| `small` \| as.*", (ROOT / "docs/exam.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert f"| {minutes} minutes on an H200 |" in row


def test_the_page_of_tasks_has_the_recallable_shares_of_the_records():
    share = recallable_shares()
    lines = (ROOT / "docs/evaluation.md").read_text(encoding="utf-8").splitlines()
    start = lines.index(f"| {' | '.join(share)} |")
    assert lines[start + 2] == f"| {' | '.join(f'{each:.0f} %' for each in share.values())} |"


def test_the_page_on_verdicts_quotes_the_draft():
    page = (ROOT / "docs/read_verdict.md").read_text(encoding="utf-8")
    assert f"`not settled: {value('figure_1b', 'top1_chunk')} nats per token. A draft shows" in page


def test_the_page_of_the_exam_has_the_half_widths_of_the_csv():
    page = " ".join((ROOT / "docs/exam.md").read_text(encoding="utf-8").split())
    of_mean, (raw, _) = half(budget("delta_net", 3)), raw_and_fourth_pair()
    assert f"about {of_mean} nats on the standardised mean, and ±{raw:.3f} on the raw mean" in page
