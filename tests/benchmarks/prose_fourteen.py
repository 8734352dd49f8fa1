"""Rows and sentences of the results page on the fourteen architectures at 340M tokens, with the numbers of the CSVs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache

import numpy as np

from seqarch.report.cubic import monotone_cubic
from tests.benchmarks.prose_finished import raw_and_fourth_pair, recorded
from tests.benchmarks.prose_longer import gaps_at, rising
from tests.benchmarks.test_budget_tables import BUDGETS, TWO
from tests.benchmarks.test_draft_tables import FIVE, curves, gap, models, rows, span, straight

WHOLE = BUDGETS[3]
REFERENCE = "transformer_pp"
NEW = ("top1_element", "gated_delta_net", "rwkv6", "rwkv5", "based", "mamba1")
"""Models that have no run of 1.02B tokens and no other seed."""


@cache
def gaps() -> dict[tuple[str, str], float]:
    return gaps_at(WHOLE)


@cache
def ranked() -> tuple[str, ...]:
    """The architectures of figure 1(b) without the reference, the best gap first."""
    return tuple(sorted(models("figure_1b").keys() - {REFERENCE}, key=lambda name: gaps()[name, "mean, raw"]))


@cache
def ends() -> dict[str, dict[str, str]]:
    """The losses after 340M tokens, by model."""
    return {row["model"]: row for row in rows("three_times/losses.csv") if row["tokens"] == WHOLE}


def correlation(one: Iterable[float], other: Iterable[float]) -> float:
    """Spearman's rank correlation of values without ties."""
    return float(np.corrcoef([np.argsort(np.argsort(list(each))) for each in (one, other)])[0, 1])


def rows_of_fourteen() -> Iterable[str]:
    """The table of the fourteen."""
    gap_of, end = gaps(), ends()
    names = list(ranked())
    names.insert(sum(gap_of[name, "mean"] < 0 for name in names), REFERENCE)
    for name in names:
        row = end[name]
        losses, copying = f"{float(row['in_domain']):.3f} / {float(row['ood']):.3f}", f"{float(row['copying']):.2f}"
        parts = ("mean, raw", "mean, recallable tokens", "mean, other tokens")
        said = ["reference", "", ""] if name == REFERENCE else [f"{gap_of[name, part]:+.3f}" for part in parts]
        draft = "" if name == REFERENCE else f"{float(gap('figure_1b', name)['gap']):+.3f}"
        rate = f"{float(row['rate']) * 1e3:.2f}".rstrip("0") + "e-3"
        yield f"| {' | '.join([name, rate, losses, *said, copying, draft, settled_verdict(name)])} |"


def settled_verdict(name: str) -> str:
    """The word of the settled verdict of three seeds on five domains, or else on two domains."""
    for folder, where in (("budgets", ""), (TWO, " (two domains)")):
        for row in rows(f"{folder}/gaps.csv"):
            if (row["run"], row["tokens"], row["settled"]) == (name, WHOLE, "True"):
                return row["verdict"].partition(":")[0] + where
    return ""


def checks_of_fourteen() -> Iterable[str]:
    """The gaps under other choices of the method."""
    runs = {name: each[::-1] for (name, _), each in curves("three_times").items()}  # rising in-domain loss
    reference, found = runs[REFERENCE], []
    for name in ranked():
        model = runs[name][-2:]
        lowest = max(model[0, 0], reference[1, 0])
        other = runs[f"{REFERENCE}-3.3e-3"]
        domains = np.array([gaps()[name, domain] for domain in FIVE])
        without = [np.delete(domains, k).mean() for k in range(len(FIVE))]
        columns = [
            gaps()[name, "mean, raw"],
            straight(model, reference[1:]).mean(),
            difference(model, other, max(model[0, 0], other[0, 0])),
            difference(model, reference, model[0, 0]),
        ]
        spans = [without, rising(model, reference, lowest), seeds_on_two_domains(name)]
        found.append([*columns, *(end for each in spans for end in (min(each), max(each)))])
        cells = [f"{each:+.3f}" for each in columns] + [f"{min(each):+.3f} to {max(each):+.3f}" for each in spans]
        yield f"| {name} | {' | '.join(cells)} |"
    signs = np.sign(found)
    changed = {name for name, each in zip(ranked(), signs, strict=True) if len({*each}) > 1}
    assert changed == {"delta_net"}
    open_sign = signs[ranked().index("delta_net")]
    assert (open_sign == -1).tolist() == [False] * 6 + [True] + [False] * 3


def difference(model: np.ndarray, reference: np.ndarray, loss: float) -> float:
    """The gap at this in-domain loss."""
    own, other = (monotone_cubic(run[:, 0], run[:, 1:], np.array([loss])) for run in (model, reference))
    return float((own - other).mean())


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


def half_of_one_pair() -> float:
    """Half of the interval of the raw mean with one pair of seeds."""
    return 3**0.5 * raw_and_fourth_pair()[0]


def models_behind() -> tuple[str, ...]:
    return tuple(name for name in ranked() if gaps()[name, "mean, raw"] > half_of_one_pair())


def fourteen_sentences() -> Iterable[str]:
    """The fourteen at 340M tokens."""
    gap_of, end = gaps(), ends()
    one_pair, behind = half_of_one_pair(), models_behind()
    assert behind == ranked()[3:]
    assert all(gap_of[name, domain] > 0 for name in behind for domain in FIVE)
    ends_of = [f"{gap_of[name, 'mean, raw']:+.3f}" for name in (behind[0], behind[-1])]
    assert (len(behind), behind[0], behind[-1]) == (10, "top1_element", "window_64")
    yield f"One pair of seeds has about ±{one_pair:.3f} on these raw means."
    yield "Ten models are behind full attention by more than that, each of them on all five domains."
    yield "They reach from Top-1 element ({}) to the window of 64 keys ({}).".format(*ends_of)
    far = [gap_of[name, "mean, raw"] for name in ("rwkv6", "rwkv5", "based", "mamba1")]
    yield f"RWKV-6, RWKV-5, Based and Mamba-1 are far behind, by {span(far, 3)}."
    means = [0.0, *(gap_of[name, "mean, raw"] for name in ranked())]
    recalled = [0.0, *(gap_of[name, "mean, recallable tokens"] for name in ranked())]
    copying = [float(end[name]["copying"]) for name in (REFERENCE, *ranked())]
    yield f"The order by recallable tokens is nearly the same (rank correlation {correlation(means, recalled):.2f})"
    yield f"and so is the reverse order by what copying saves ({correlation(means, copying):.2f})."
    others = [gap_of[name, "mean, other tokens"] for name in ranked()]
    yield f"On the other tokens all gaps lie between {min(others):+.3f} and {max(others):+.3f}."
    gated, delta = (float(end[name]["in_domain"]) for name in ("gated_delta_net", "delta_net"))
    yield f"Its in-domain loss is {delta - gated:.3f} lower than DeltaNet's, and its gap is the same"
    assert abs(gap_of["gated_delta_net", "mean, raw"] - gap_of["delta_net", "mean, raw"]) < one_pair
    slowest = max(end, key=lambda name: float(end[name]["in_domain"]))
    assert slowest == "top1_element"
    yield f"Its in-domain loss of {float(end[slowest]['in_domain']):.3f} is the highest of the fourteen"
    drafts = [0.0, *(float(gap("figure_1b", name)["gap"]) for name in ranked())]
    yield f"the rank correlation with the drafts is {correlation(means, drafts):.2f}."
    assert sum(each < 0 for each in drafts) == 6
    assert sum(each < 0 for each in means) == 2
    yield "There six models were ahead of Transformer++, here two are."
    runs = {name: each[::-1] for (name, _), each in curves("three_times").items()}
    earlier = {name: difference(runs[name], runs[REFERENCE], runs[name][1, 0]) for name in NEW[1:]}
    moved = max(abs(gap_of[name, "mean, raw"] - each) for name, each in earlier.items())
    yield f"Their gaps there differ by at most {moved:.3f} from those in the table."
    new = sorted(gap_of[name, "mean, raw"] for name in NEW)
    yield f"the six of the next section between {new[0]:+.2f} and {new[-1]:+.2f}"
    minutes = {name: json.loads(recorded(name, "exam.json"))["minutes"] for name in NEW}
    assert (min(minutes, key=minutes.__getitem__), max(minutes, key=minutes.__getitem__)) == ("top1_element", "mamba1")
    yield f"took {minutes['top1_element']:.1f} (Top-1 element) to {minutes['mamba1']:.1f} minutes (Mamba-1)."


def ladder_sentences() -> Iterable[str]:
    """What the ladders of these models, of the window of 256 and of the hybrid say."""
    rungs: dict[str, dict[float, float]] = {}
    for row in rows("budgets/ladder.csv"):
        rungs.setdefault(row["model"], {})[float(row["rate"])] = float(row["in_domain"])
    best = {name: min(each, key=each.__getitem__) for name, each in rungs.items()}
    inside = {name: min(each) < best[name] < max(each) for name, each in rungs.items()}
    assert {name for name, each in inside.items() if not each} == {"based", "top1_element"}
    assert (best["based"], best["top1_element"]) == (max(rungs["based"]), min(rungs["top1_element"]))
    assert all(float(ends()[name]["rate"]) == best[name] for name in (*NEW, "window_256"))
    hybrid = rungs["hybrid_gated_delta_net_attention"]
    more = hybrid[7.43e-3] - hybrid[best["hybrid_gated_delta_net_attention"]]
    assert best["hybrid_gated_delta_net_attention"] == 4.95e-3
    yield f"The hybrid of Gated DeltaNet and attention is best at 4.95e-3, and 7.43e-3 ends {more:.3f} higher."
    yield f"Mamba-1 is best at 4.95e-3, and at 7.5e-3 it ends at {rungs['mamba1'][7.5e-3]:.1f}."
    yield "Based is best at the highest of its three rates, 3.3e-3, and Top-1 element at the lowest, 1.5e-3."
