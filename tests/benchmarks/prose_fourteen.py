"""Rows and sentences of the results page on the fourteen architectures at 340M tokens, with the numbers of the CSVs."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from benchmarks.budget_tables import rank_correlation
from tests.benchmarks.prose_finished import at, best_rate, ladders, recorded
from tests.benchmarks.prose_longer import differences, gaps_at, half_of_one_pair, rising, rising_runs, without_one
from tests.benchmarks.test_budget_tables import TWO
from tests.benchmarks.test_draft_tables import FIVE, WHOLE, gap, models, rows, span, straight

REFERENCE = "transformer_pp"
NEW = ("top1_element", "gated_delta_net", "rwkv6", "rwkv5", "based", "mamba1")
"""Models that have no run of 1.02B tokens and no other seed."""
GAPS = gaps_at(WHOLE)
RANKED = sorted(models("figure_1b").keys() - {REFERENCE} | {"window_256"}, key=lambda name: GAPS[name, "mean, raw"])
"""The architectures, with both windows and without the reference, the best gap first."""
ENDS = {row["model"]: row for row in rows("three_times/losses.csv") if row["tokens"] == WHOLE}
"""The losses after 340M tokens, by model."""


def draft(name: str) -> float:
    return float(gap("windows" if name == "window_256" else "figure_1b", name)["gap"])


def settled_verdict(name: str) -> str:
    """The word of the settled verdict of three seeds on five domains, or else on two domains."""
    for folder, where in (("budgets", ""), (TWO, " (two domains)")):
        for row in rows(f"{folder}/gaps.csv"):
            if (row["run"], row["tokens"], row["settled"]) == (name, WHOLE, "True"):
                return row["verdict"].partition(":")[0] + where
    return "-"


def rows_of_fourteen() -> Iterable[str]:
    """The table of the fourteen, with the reference at its place."""
    better = sum(GAPS[name, "mean, raw"] < 0 for name in RANKED)
    for name in (*RANKED[:better], REFERENCE, *RANKED[better:]):
        row = ENDS[name]
        rate = f"{float(row['rate']) * 1e3:.2f}".rstrip("0") + "e-3"
        losses, copying = f"{float(row['in_domain']):.3f} / {float(row['ood']):.3f}", f"{float(row['copying']):.2f}"
        if name == REFERENCE:
            yield f"| {name} | {rate} | {losses} | reference | | | {copying} | reference | |"
            continue
        parts = [f"{GAPS[name, f'mean, {part}']:+.3f}" for part in ("raw", "recallable tokens", "other tokens")]
        yield f"| {' | '.join([name, rate, losses, *parts, copying, f'{draft(name):+.3f}', settled_verdict(name)])} |"


def checks_of_fourteen() -> Iterable[str]:
    """The gaps under other choices of the method."""
    runs = rising_runs()
    reference, other = runs[REFERENCE], runs[f"{REFERENCE}-3.3e-3"]
    for name in RANKED:
        model, of_1b = runs[name][-2:], len(runs[name]) > 2  # after 340M and 170M tokens
        first = GAPS[name, "mean, raw"]
        line = straight(model, reference[1:]).mean() if of_1b else None
        own = difference(model, reference, model[0, 0])
        changes = [
            line,
            difference(model, other, max(model[0, 0], other[0, 0])),
            None if of_1b and model[0, 0] > reference[1, 0] else own,
        ]
        without = without_one(np.array([GAPS[name, domain] for domain in FIVE]))
        bounds = rising(model, reference, max(model[0, 0], reference[1, 0]))
        seeds = seeds_on_two_domains(name)
        kept = [first, *(each for each in changes if each is not None), *without, bounds[1 if first > 0 else 0], *seeds]
        assert len({*np.sign(kept)}) == 1
        assert (bounds[0] * bounds[1] < 0) == (name == "delta_net")
        cells = [f"{first:+.3f}", *("" if each is None else f"{each:+.3f}" for each in changes)]
        cells += [f"{min(each):+.3f} to {max(each):+.3f}" for each in (without, bounds, seeds)]
        yield f"| {name} | {' | '.join(cells)} |".replace("|  |", "| |")


def difference(model: np.ndarray, reference: np.ndarray, loss: float) -> float:
    """The gap at this in-domain loss."""
    return float(differences(model, reference, [loss]).mean())


def seeds_on_two_domains(name: str) -> list[float]:
    """The gap on stack and speech to each of the three seeds of the first table's reference."""
    columns = ("in_domain", "speech", "stack")

    def run(table: list[dict[str, str]]) -> np.ndarray:
        kept = [row for row in table if int(row["tokens"]) <= int(WHOLE)]
        return np.array([[float(row[each]) for each in columns] for row in kept])[::-1]

    own = run([row for row in rows("three_times/losses.csv") if row["model"] == name])
    table = [row for row in rows(f"{TWO}/losses.csv") if row["model"] == REFERENCE]
    seeds = [run([row for row in table if row["seed"] == seed]) for seed in "012"]
    return [difference(own, other, max(own[0, 0], other[0, 0])) for other in seeds]


def models_behind() -> list[str]:
    """The models whose gap is larger than one pair's interval."""
    half = half_of_one_pair()
    return [name for name in RANKED if GAPS[name, "mean, raw"] > half]


def fourteen_sentences() -> Iterable[str]:
    """The fourteen at 340M tokens."""
    parameters = [json.loads(recorded(name, "run.json"))["parameters"] / 1e6 for name in (REFERENCE, *RANKED)]
    yield f"The models have {span(parameters, 1)}M parameters."
    behind, of = models_behind(), {name: GAPS[name, "mean, raw"] for name in RANKED}
    assert behind == RANKED[4:]
    assert (len(behind), behind[0], behind[-1]) == (10, "top1_element", "window_64")
    assert all(GAPS[name, domain] > 0 for name in behind for domain in FIVE)
    yield f"One pair of seeds has about ±{half_of_one_pair():.3f} on these raw means."
    yield (
        f"means of three seeds are {at('top1_chunk', 3, 'mean, raw')} for exact Top-1 and"
        f" {at('delta_net', 3, 'mean, raw')} for DeltaNet with 4 heads"
    )
    yield "Nine architectures and the window of 64 keys are behind full attention by more than one pair could show,"
    yield f"from Top-1 element ({of['top1_element']:+.3f}) to the window of 64 keys ({of['window_64']:+.3f})."
    yield f"The window of 256 keys ({of['window_256']:+.3f}) cannot be told apart from full attention."
    far = span([of[name] for name in ("rwkv6", "rwkv5", "based", "mamba1")], 3)
    yield f"RWKV-6, RWKV-5, Based and Mamba-1 are far behind, by {far}."
    means, others, recalled = (
        [0.0, *(GAPS[name, f"mean, {part}"] for name in RANKED)]
        for part in ("raw", "other tokens", "recallable tokens")
    )
    copying = [float(ENDS[name]["copying"]) for name in (REFERENCE, *RANKED)]
    yield f"rank correlation with what copying saves is {rank_correlation(means, copying):.2f},"
    yield f"and with the gap on recallable tokens {rank_correlation(means, recalled):.2f}."
    yield f"On the other tokens all gaps lie between {min(others):+.3f} and {max(others):+.3f}."
    losses = {name: float(ENDS[name]["in_domain"]) for name in (REFERENCE, *RANKED)}
    lower = losses["delta_net"] - losses["gated_delta_net"]
    yield f"Their gaps differ by {of['gated_delta_net'] - of['delta_net']:.3f}. The in-domain loss of Gated DeltaNet is"
    yield f"The in-domain loss of Gated DeltaNet is {lower:.3f} lower."
    assert max(losses, key=losses.__getitem__) == "top1_element"
    yield f"Its in-domain loss of {losses['top1_element']:.3f} is the highest of all"
    drafts = [0.0, *map(draft, RANKED)]
    assert [sum(each < 0 for each in column) for column in (drafts, means)] == [6, 2]
    yield f"the rank correlation with the drafts is {rank_correlation(means, drafts):.2f}."
    yield "There six models were ahead of Transformer++, here two are."
    runs = rising_runs()
    fell = [difference(runs[name], runs[REFERENCE], runs[name][1, 0]) - of[name] for name in NEW[1:]]
    assert min(fell) > 0
    yield f"All five gaps were larger there, by up to {max(fell):.3f}."
    new = sorted(of[name] for name in NEW)
    yield f"the six of the next section between {new[0]:+.2f} and {new[-1]:+.2f}"
    minutes = {name: json.loads(recorded(name, "exam.json"))["minutes"] for name in NEW}
    assert (min(minutes, key=minutes.__getitem__), max(minutes, key=minutes.__getitem__)) == ("top1_element", "mamba1")
    yield f"took {minutes['top1_element']:.1f} (Top-1 element) to {minutes['mamba1']:.1f} minutes (Mamba-1)."


def ladder_sentences() -> Iterable[str]:
    """What the ladders of these models, of the window of 256 and of the hybrid say."""
    rungs = ladders()
    best = {name: best_rate(each) for name, each in rungs.items()}
    inside = {name: min(each) < best[name] < max(each) for name, each in rungs.items()}
    assert {name for name, each in inside.items() if not each} == {"based", "top1_element"}
    assert (best["based"], best["top1_element"]) == (max(rungs["based"]), min(rungs["top1_element"]))
    assert all(float(ENDS[name]["rate"]) == best[name] for name in (REFERENCE, *RANKED))
    hybrid = rungs["hybrid_gated_delta_net_attention"]
    more = hybrid[7.43e-3] - hybrid[best["hybrid_gated_delta_net_attention"]]
    assert best["hybrid_gated_delta_net_attention"] == 4.95e-3
    yield f"The hybrid of Gated DeltaNet and attention is best at 4.95e-3, and 7.43e-3 ends {more:.3f} higher."
    yield f"Mamba-1 is best at 4.95e-3 of three rates, and at 7.5e-3 it ends at {rungs['mamba1'][7.5e-3]:.1f}."
    yield "Based is best at the highest of its three rates, 3.3e-3, and Top-1 element at the lowest, 1.5e-3."
