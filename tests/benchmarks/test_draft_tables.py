"""The results page quotes the CSV files of the drafts, and its checks of the method follow from the losses."""

from __future__ import annotations

import csv
import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.budget_tables import rank_correlation
from seqarch.report.finished import pair_gaps
from seqarch.report.runs import Evaluations

RESULTS = Path(__file__).parents[2] / "docs/results"
PAGE = (RESULTS / "README.md").read_text(encoding="utf-8")
THREE = r"[+-]\d\.\d{3}"
DOMAINS = ("arxiv", "github", "stack")


@functools.cache
def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def cells(head: str) -> list[list[str]]:
    """The body of the table of the page whose heading begins with `head`, without marks."""
    lines = PAGE[PAGE.index(head) :].splitlines()[2:]
    table = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.replace("`", "").replace("*", "").strip() for cell in line.strip("|").split("|")] for line in table]


def gap(folder: str, run: str, domain: str = "mean") -> dict[str, str]:
    (found,) = (row for row in rows(f"{folder}/gap.csv") if (row["run"], row["domain"]) == (run, domain))
    return found


def value(folder: str, run: str, domain: str = "mean") -> str:
    return f"{float(gap(folder, run, domain)['gap']):+.3f}"


def interval(folder: str, run: str, domain: str = "mean") -> str:
    row = gap(folder, run, domain)
    return f"{float(row['gap']):+.3f} [{float(row['low']):+.3f}, {float(row['high']):+.3f}]"


def models(folder: str) -> Mapping[str, dict[str, str]]:
    return {row["run"]: row for row in rows(f"{folder}/models.csv")}


def last_ratio(folder: str, run: str) -> str:
    ratio = [row["ratio"] for row in rows(f"{folder}/convergence.csv") if row["run"] == run][-1]
    return f"{float(ratio):.2f}"


def losses(row: Mapping[str, str]) -> list[str]:
    return [f"{float(row[key]):.3f}" for key in ("in_domain_loss", "ood_loss")]


def marked(folder: str, runs: Iterable[str]) -> set[str]:
    """The runs whose interval of the mean does not hold zero."""
    return {run for run in runs if (row := gap(folder, run)) and float(row["low"]) * float(row["high"]) > 0}


def test_figure_1b():
    facts = models("figure_1b")
    head = "| model | seeds | gap, mean"
    table = cells(head)
    assert len(table) == len(facts) == 14
    for run, seeds, mean, *domains, inside, ood, ratio in table:
        assert (int(seeds), [inside, ood]) == (len(facts[run]["seeds"].split()), losses(facts[run]))
        if run == "transformer_pp":
            assert (mean, ratio) == ("reference", "1")
            continue
        assert mean == interval("figure_1b", run)
        assert domains == [value("figure_1b", run, domain) for domain in DOMAINS]
        assert ratio == last_ratio("figure_1b", run)
    bold = set(re.findall(r"^\| `(\w+)` \| \d \| \*\*", PAGE[PAGE.index(head) :], re.MULTILINE))
    assert bold == marked("figure_1b", facts.keys() - {"transformer_pp"})


def test_figure_1a():
    for run, web, mixed in cells("| model | web training"):
        mean, *domains = re.findall(THREE, web)
        assert [mean, *domains] == [value("figure_1b", run, each) for each in ("mean", *DOMAINS)]
        assert mixed.startswith(interval("figure_1a/unseen", run) + ", ")
        assert re.findall(THREE, mixed)[3:] == [value("figure_1a/unseen", run, domain) for domain in DOMAINS]


def test_copying_at_four_steps_and_its_rank():
    small = [row for row in rows("copying/copying.csv") if row["run"].startswith("exam/small/")]
    copied = {(row["run"].split("/")[2], row["step"]): row["copying"] for row in small}
    folders = {"figure_1b": ("rwkv7", "transformer", "delta_net"), "windows": ("window_16",)}
    folders |= {"reasons": ("rwkv7_shell_softmax_100k",), "hybrids": ("hybrid_gated_delta_net_attention",)}
    folders |= {"positions": ("position_absolute", "position_alibi", "position_none")}
    where = {run: folder for folder, runs in folders.items() for run in runs}
    gaps, ends = [], []
    for name, *said, of in cells("| model, one run each"):
        run = name.split()[0]
        steps = [float(copied[run, step]) for step in ("433", "866", "1299", "1730")]
        assert [float(each.removesuffix(" nats")) for each in said] == pytest.approx(steps, abs=0.0051)
        gaps.append(float(gap(where[run], run)["gap"]) if run in where else 0.0)
        ends.append(steps[-1])
        assert of == (f"{gaps[-1]:+.3f}" if run in where else "0")
    assert f"(Spearman's rank correlation {rank_correlation(gaps, -np.array(ends)):.2f} over the ten)" in PAGE


def test_learning_rates():
    folders = {"1.0e-3": "learning_rate/1.0e-3", "1.5e-3": "figure_1b", "2.2e-3": "learning_rate/2.2e-3"}
    for rate, reference, top1, top1_gap, mamba, mamba_gap in cells("| rate | `transformer_pp`"):
        facts = models(folders[rate])
        for run, said in (("transformer_pp", reference), ("top1_chunk", top1), ("mamba2", mamba)):
            assert said == " / ".join(losses(facts[run]))
        assert top1_gap == interval(folders[rate], "top1_chunk")
        assert mamba_gap == interval(folders[rate], "mamba2")


def test_hybrids():
    for name, to_itself, to_reference, *said in cells("| model | gap to its recurrence"):
        run = name.partition(",")[0]
        other = "mamba2" if "mamba2" in run else "gated_delta_net"
        assert to_itself == interval(f"hybrids/against_{other}", run)
        assert to_reference == interval("hybrids", run)
        assert said == losses(models("hybrids")[run])


def test_variants_of_mamba():
    runs = ("mamba1_decay_one", "mamba1_decay_none", "mamba2_decay_one", "mamba2_decay_none", "mamba2_no_norm")
    table = [said for _, said in cells("| variant | gap to the full mixer")]
    assert table == [interval(run.partition("_")[0], run) for run in runs]


@pytest.mark.parametrize(
    ("folder", "runs"),
    [
        ("windows", ("window_16", "window_64", "window_256")),
        ("positions", ("position_none", "position_alibi", "position_absolute")),
        ("relation", ("constant_keys", "constant_queries_keys")),
    ],
)
def test_parts_of_attention(folder: str, runs: tuple[str, ...]):
    (row,) = (
        row
        for row in cells("| question | answer")
        if row[0].startswith({"relation": "no real relation"}.get(folder, folder))
    )
    said = re.findall(rf"{THREE} \[{THREE}, {THREE}\]", row[1])
    assert said == [interval(folder, run) for run in runs]


def test_speeds():
    facts = {row["run"]: row for row in rows("runs.csv")}
    for run, parameters, speed, mfu, memory, minutes in cells("| model | parameters | tokens/s, training"):
        row = facts[next(name for name in facts if name.endswith(f"small/{run}/seed_0"))]
        assert parameters == f"{int(row['parameters']) / 1e6:.1f}M"
        assert speed == f"{float(row['tokens_per_second']) / 1000:,.0f}k"
        assert float(mfu.removesuffix(" %")) == pytest.approx(100 * float(row["mfu"]), abs=0.51)
        assert (memory, minutes) == (f"{float(row['peak_gib']):.1f}", f"{float(row['minutes']):.1f}")


FIVE = ("arxiv", "github", "speech", "stack", "wiki")
WHOLE = "340131840"


def curves(folder: str = "budgets") -> dict[tuple[str, int], np.ndarray]:
    """The finished models of each run, `[budgets, 6]`: in-domain loss and the losses on five domains."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    for row in rows(f"{folder}/losses.csv"):
        found.setdefault((row["model"], int(row["seed"])), []).append([float(row[key]) for key in ("in_domain", *FIVE)])
    return {key: np.array(each) for key, each in found.items()}


def span(values: Iterable[float], digits: int, word: str = "to") -> str:
    found = list(values)
    return f"{min(found):.{digits}f} {word} {max(found):.{digits}f}"


def straight(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The gaps of the domains at the lowest loss that both reach, by straight lines."""
    floor = max(one[:, 0].min(), other[:, 0].min())

    def at(run: np.ndarray) -> np.ndarray:
        order = np.argsort(run[:, 0])
        return np.array([np.interp(floor, run[order, 0], run[order, k]) for k in range(1, 6)])

    return at(one) - at(other)


def evaluations(run: np.ndarray) -> Evaluations:
    tokens = np.array([43e6, 85e6, 170e6, 340e6])[: len(run)]
    return Evaluations(tokens, run[:, 0], {domain: run[:, 1 + k] for k, domain in enumerate(FIVE)})


@pytest.mark.parametrize(("column", "model"), [(1, "delta_net"), (2, "rwkv7"), (3, "top1_chunk")])
def test_checks_of_the_method(column: int, model: str):
    said = {row[0]: row[column] for row in cells("| what changes |")}
    table = {row["domain"]: row for row in rows("budgets/gaps.csv") if (row["run"], row["tokens"]) == (model, WHOLE)}
    weights = np.array([float(table[domain]["weight"]) for domain in FIVE])
    gaps = np.array([float(table[domain]["gap"]) for domain in FIVE])
    assert said["as above, at 340M tokens"] == f"{float(table['mean']['gap']):+.3f}"
    runs = curves()
    seeds = [int(each) for each in ("12" if model == "rwkv7" else "012")]
    by_line = np.mean([straight(runs[model, seed], runs["transformer_pp", seed]) for seed in seeds], axis=0)
    assert float(said["straight lines in place of curves"]) == pytest.approx(by_line @ weights, abs=6e-4)
    every = {seed: evaluations(runs[model, seed]) for seed in seeds}
    others = [evaluations(runs["transformer_pp", seed]) for seed in range(3)]
    pairings = np.mean([pair_gaps(one, other)[-1] for one in every.values() for other in others], axis=0)
    assert float(said["all nine pairings of seeds"]) == pytest.approx(pairings @ weights, abs=6e-4)
    if model != "top1_chunk":
        without = [np.delete(gaps, k) @ np.delete(weights, k) / np.delete(weights, k).sum() for k in range(5)]
        words = {"delta_net": "DeltaNet stays between {} and {}", "rwkv7": "RWKV-7 between {} and {}"}[model]
        assert words.format(f"{min(without):+.3f}", f"{max(without):+.3f}") in " ".join(PAGE.split())
