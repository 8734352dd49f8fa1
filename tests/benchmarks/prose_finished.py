"""Sentences of the results page on finished models, with the numbers of the CSV files."""

from __future__ import annotations

import csv
import re
import tarfile
from collections.abc import Iterable

import numpy as np

from seqarch.report.finished import SHARED, pool, seed_pairs
from seqarch.report.gap import NORMAL, student
from tests.benchmarks.test_budget_tables import BUDGETS, FLOOR, ROOT, TWO
from tests.benchmarks.test_budget_tables import gap as finished
from tests.benchmarks.test_draft_tables import DOMAINS, FIVE, curves, evaluations, gap, rows, span


def budget(model: str, budget: int, domain: str = "mean", folder: str = "budgets") -> dict[str, str]:
    row = finished(model, BUDGETS[budget], domain, folder)
    assert row is not None
    return row


def at(model: str, number: int, domain: str = "mean", folder: str = "budgets") -> str:
    return f"{float(budget(model, number, domain, folder)['gap']):+.3f}"


def half(row: dict[str, str]) -> str:
    return f"±{(float(row['high']) - float(row['low'])) / 2:.3f}"


def short(folder: str, run: str) -> str:
    return f"{float(gap(folder, run)['gap']):+.2f}"


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


def recorded(name: str, file: str) -> str:
    """A file of a run in `benchmarks/exam_x3`."""
    with tarfile.open(ROOT / f"benchmarks/exam_x3/{name}-seed_0.tar.xz") as archive:
        found = archive.extractfile(f"{name}/seed_0/{file}")
        assert found is not None
        return found.read().decode()


def ladders() -> dict[str, dict[float, float]]:
    """The in-domain loss of each rate of each ladder, by model."""
    found: dict[str, dict[float, float]] = {}
    for row in rows("budgets/ladder.csv"):
        found.setdefault(row["model"], {})[float(row["rate"])] = float(row["in_domain"])
    return found


def best_rate(ladder: dict[float, float]) -> float:
    return min(ladder, key=ladder.__getitem__)


def recallable_shares() -> dict[str, float]:
    """The percentage of recallable tokens by domain in the hold-outs of the records."""
    found = csv.DictReader(recorded("transformer_pp", "curves.csv").splitlines())
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
    rungs = ladders()
    yield f"Mamba-2's best rate is {best_rate(rungs['mamba2']) * 1e3:.1f}e-3, five times the size's rate."
    yield f"the size's rate. {max(rungs['mamba2']) * 100:.1f}e-2 is worse"
    gated, learned = ((best_rate(each), max(each), each) for each in (rungs["gated_delta_net"], rungs["transformer"]))
    more = gated[2][gated[1]] - gated[2][gated[0]]
    yield f"best rate is {gated[0] * 1e3:.2f}e-3, and {gated[1] * 1e3:.2f}e-3 ends {more:.3f} higher."
    above = min(rate for rate in learned[2] if rate > learned[0])
    higher = learned[2][above] - learned[2][learned[0]]
    yield f"The Transformer's is {learned[0] * 1e3:.1f}e-3, and {above * 1e3:.2f}e-3 ends {higher:.3f} higher."
    moved = (short("figure_1b", "delta_net"), short("figure_1b", "rwkv7"))
    raw = [np.mean([float(budget(name, 3, domain)["gap"]) for domain in DOMAINS]) for name in ("delta_net", "rwkv7")]
    yield f"DeltaNet's gaps is {moved[0]} here and {raw[0]:+.2f} for the finished models at 340M tokens."
    yield f"RWKV-7's raw mean is {moved[1]} here and {raw[1]:+.2f} there."
