"""The tables and the figure of docs/results/budgets from the folder of an exam with finished models.

    python benchmarks/budget_tables.py runs/exam/small docs/results/budgets --reference transformer_pp

OUT/ladder.csv      in-domain and OOD loss of every rate of the ladders, at the smallest budget, if there are ladders
OUT/losses.csv      the losses of every finished model, by seed
OUT/gaps.csv        the gap of each model to the reference at each budget (`seqarch.report.gap`)
OUT/pairs.csv       the raw gap of each pair of seeds at each budget
OUT/standings.csv   a row per model at its last budget, or at `--tokens` (`seqarch.report.tables.standings`)
OUT/settled.csv     whether each gap is settled, by the models of at most `--tokens`
OUT/states.csv      parameters and elements of state of each model
OUT/ranks.csv       whether models keep order and sign of their gap from each budget to the largest
OUT/budgets.png     the figure of these gaps
OUT/scatter.png     OOD over in-domain loss of the models that have a gap

`--domains` restricts all of them to some OOD domains. Runs with different documents of the other domains can then be
compared. `--left_out` takes patterns of names that ranks and figures leave out, such as `'transformer_pp-*'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from seqarch.report import Comparison, compare
from seqarch.report.findings import Findings
from seqarch.report.gap import FinishedModels, common_budgets, pair_gaps
from seqarch.report.runs import PARTS, Group, Run, load_run
from seqarch.report.tables import finished, standings
from seqarch.runs.tags import MEAN
from seqarch.tables import write_csv

LADDER = ("model", "rate", "in_domain", "ood")
RANKS = ("earlier", "later", "models", "rank_correlation", "same_sign")
STATES = ("model", "parameters", "state_elements")
PAIRS = ("model", "seed", "tokens", "gap")
SETTLED = ("model", "tokens", "pairs", "word", "verdict")
LOSSES = ("model", "rate", "seed", "tokens", "in_domain", "ood", "recallable", "other", "copying")


def rate(run: Run) -> float:
    return float(run.config["model"]["learning_rate"])


def ladder(exam: Path) -> Iterator[tuple]:
    """The rows of the ladders, by model and rate."""
    for folder in sorted(exam.glob("*/ladder/*/seed_0")):
        run = load_run(folder)
        if run.facts["status"] == "finished":
            points = run.evaluations
            ood = points.with_mean()["mean"][-1]
            yield folder.parents[2].name, f"{rate(run):.2e}", f"{points.in_domain[-1]:.4f}", f"{ood:.4f}"


def losses(runs: Sequence[Run]) -> Iterator[tuple]:
    """The losses of the finished models. A cell is empty if its value was not measured.

    `recallable` and `other` are means over the domains. `copying` is the loss that copying saves. The domains follow.
    """
    for run in runs:
        models = run.finished_models()
        if models is None:
            continue
        parts = [each.losses for tag in PARTS.values() if (each := run.finished_models(tag)) is not None]
        gains = Group(run.name, [run]).copying_gains()
        split = [np.mean(list(each.values()), axis=0) for each in parts]
        for k, tokens in enumerate(models.tokens):
            by_domain = [loss[k] for loss in models.losses.values()]
            numbers = [models.in_domain[k], np.mean(by_domain), *(each[k] for each in split)]
            numbers += [gains.get(tokens, np.nan), *by_domain]
            written = (f"{number:.6f}" if np.isfinite(number) else "" for number in numbers)
            yield run.name, f"{rate(run):.2e}", run.seed, tokens, *written


def pairs(runs: Sequence[Run], reference: str) -> Iterator[tuple]:
    """The raw gap of each run to the reference's run of the same seed, at each budget of both that has one."""
    finished = {(run.name, run.seed): run.finished_models() for run in runs}
    for (name, seed), models in sorted(finished.items()):
        other = finished.get((reference, seed))
        if name == reference or models is None or other is None or not np.isin(models.tokens, other.tokens).any():
            continue
        for tokens, gap in zip(common_budgets(models, other), pair_gaps(models, other).mean(axis=1), strict=True):
            if np.isfinite(gap):
                yield name, seed, tokens, f"{gap:.6f}"


def until(models: FinishedModels, tokens: int) -> FinishedModels:
    """The same candidates without their models of larger budgets, and without parts."""
    candidates = {
        name: {seed: each.at(each.tokens <= tokens) for seed, each in seeds.items()}
        for name, seeds in models.candidates.items()
    }
    return replace(models, candidates=candidates, parts={})


def settled(findings: Findings, tokens: int) -> Iterator[tuple]:
    """The verdict on each model by the finished models of at most `tokens`."""
    assert findings.finished_models is not None
    for name, gap in until(findings.finished_models, tokens).gaps().items():
        sentence = gap.sentence(name, findings.reference.name)
        yield name, gap.headline.tokens, gap.headline.pairs, gap.word, sentence


def compared(gaps: Iterable[dict[str, Any]], left_out: Sequence[str] = ()) -> set[str]:
    """The models that have a gap, without those whose name matches a pattern."""
    names = {row["run"] for row in gaps if row["tokens"]}
    return {name for name in names if not any(fnmatch(name, pattern) for pattern in left_out)}


def rank_correlation(one: ArrayLike, other: ArrayLike) -> float:
    """Spearman's rank correlation."""
    return float(spearmanr(one, other).statistic)


def ranks(gaps: Sequence[dict[str, Any]], left_out: Sequence[str] = ()) -> Iterator[tuple]:
    """Spearman's rank correlation of the mean gaps with zero for the reference, and how many models keep their sign."""
    names = compared(gaps, left_out)
    means: dict[int, dict[str, float]] = {}
    for row in gaps:
        if row["domain"] == MEAN and row["run"] in names:
            means.setdefault(int(row["tokens"]), {})[row["run"]] = float(row["gap"])
    *budgets, last = sorted(means) or [0]
    for budget in budgets:
        models = sorted(means[budget].keys() & means[last].keys())
        both = np.array([[means[tokens][model] for model in models] for tokens in (budget, last)])
        correlation = rank_correlation(*np.pad(both, ((0, 0), (0, 1)))) if models else np.nan
        yield budget, last, len(models), f"{correlation:.4f}", int((both[0] * both[1] > 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exam", type=Path, help="OUT/SIZE of `seqarch exam`")
    parser.add_argument("out", type=Path)
    parser.add_argument("--reference", required=True)
    parser.add_argument("--domains", nargs="+", default=())
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--left_out", nargs="+", default=())
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    comparison = compare(sorted(args.exam.glob("*/seed_*")), args.reference, args.domains)
    runs = [run for _, run in comparison.findings.runs]
    header, rows = finished(comparison.findings)
    rounded = [[f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row] for row in rows]
    head, places = standings(comparison.findings, args.tokens)
    short = [[f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in places]
    write_csv(args.out / "standings.csv", head, short)
    if rungs := list(ladder(args.exam)):
        write_csv(args.out / "ladder.csv", LADDER, rungs)
    domains = [each for each in comparison.findings.domains if each != MEAN]
    write_csv(args.out / "losses.csv", (*LOSSES, *domains), losses(runs))
    facts = {run.name: run.facts for run in runs}
    states = ((name, each.get("parameters"), each.get("state_elements")) for name, each in sorted(facts.items()))
    write_csv(args.out / "states.csv", STATES, states)
    write_csv(args.out / "gaps.csv", header, rounded)
    write_csv(args.out / "pairs.csv", PAIRS, pairs(runs, args.reference))
    if args.tokens:
        write_csv(args.out / "settled.csv", SETTLED, settled(comparison.findings, args.tokens))
    by_name = [dict(zip(header, row, strict=True)) for row in rows]
    write_csv(args.out / "ranks.csv", RANKS, ranks(by_name, args.left_out))
    shown = Comparison(comparison.findings.only({args.reference, *compared(by_name, args.left_out)}))
    for name, figure in shown.figures(["budgets", "scatter"]).items():
        figure.savefig(args.out / f"{name}.png", dpi=150)


if __name__ == "__main__":
    main()
