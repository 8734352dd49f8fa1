"""Draws the figures of docs/results again from the files next to them, without the runs.

    python benchmarks/redraw_results.py [docs/results]

Gaps and intervals come from `gap.csv` and `gaps.csv`, recall against state size from `mqar.json`. The script replaces
existing figures and adds none. It leaves a scatter without `scatter.csv`, which `budget_tables.py` draws from records.
It also prints the table of recall.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from seqarch.recall.figure import published_accuracy, recall_figure
from seqarch.report import Findings, Gap, Group, Run
from seqarch.report.comparison import Comparison
from seqarch.report.findings import ModelGaps
from seqarch.report.finished import BudgetGap, FinishedGap
from seqarch.report.panels import DPI, STYLE, Picture
from seqarch.report.roles import HOLD_OUT, OOD
from seqarch.runs import tags
from seqarch.runs.curves import Curve
from seqarch.tables import markdown, read_csv

RESULTS = Path(__file__).parents[1] / "docs/results"
REFERENCE = "transformer_pp"


def grouped(table: list[dict[str, str]], *keys: str) -> Iterator[tuple[tuple[str, ...], list[dict[str, str]]]]:
    """The rows of a table with the same cells in some columns, in order of appearance."""
    order = {cells: i for i, cells in enumerate(dict.fromkeys(tuple(row[key] for key in keys) for row in table))}

    def place(row: dict[str, str]) -> int:
        return order[tuple(row[key] for key in keys)]

    for i, chosen in groupby(sorted(table, key=place), place):
        yield list(order)[i], list(chosen)


def curve(table: list[dict[str, str]], column: str) -> Curve:
    columns = [np.array([float(row[name]) for row in table]) for name in ("step", "tokens", column)]
    return Curve(columns[0].astype(int), columns[1].astype(int), columns[2])


def runs(folder: Path) -> Iterator[Run]:
    """The runs of a folder of results, with the curves that its tables hold."""
    models = {row["run"]: row for row in read_csv(folder / "models.csv")}
    points, entropies = (read_csv(folder / f"{name}.csv") for name in ("scatter", "entropy"))
    layers: dict[tuple[str, ...], dict[str, Curve]] = {}
    for (name, seed, weights, layer), table in grouped(entropies, "run", "seed", "weights", "layer"):
        tag = tags.entropy(int(layer), implied=weights == "implied")
        layers.setdefault((name, seed), {})[tag] = curve(table, "entropy")
    for (name, seed), table in grouped(points, "run", "seed"):
        loss = "ood_loss" if "ood_loss" in table[0] else "holdout_loss"
        role = OOD if loss == "ood_loss" else HOLD_OUT
        curves = {tags.loss(tags.IN_DOMAIN): curve(next(grouped(table, "domain"))[1], "in_domain_loss")}
        curves |= {role.tag(domain): curve(part, loss) for (domain,), part in grouped(table, "domain")}
        curves.pop(role.tag(tags.MEAN), None)
        mixers = {str(i): each for i, each in enumerate(models[name]["mixers"].split())}
        facts = {"mixers": mixers, "status": models[name]["status"]}
        every, tokens = (int(models[name][key]) for key in ("steps", "tokens"))
        yield Run(folder / name, name, int(seed), facts, {}, curves | layers.get((name, seed), {}), every, tokens)


def groups(every: Iterator[Run]) -> list[Group]:
    named: dict[str, list[Run]] = {}
    for run in every:
        named.setdefault(run.name, []).append(run)
    return [Group(name, found) for name, found in named.items()]


def findings(folder: Path) -> Findings:
    """The findings of the report in a folder of results."""
    gaps = read_csv(folder / "gap.csv")
    models = groups(runs(folder))
    found = Findings(models, next(group for group in models if group.name == gaps[0]["reference"]))
    comparisons = {group.name: ModelGaps(group, [], "no gap") for group in found.others}
    for (name,), table in grouped(gaps, "run"):
        read = [gap(row) for row in table if not row["refused"]]
        comparisons[name] = ModelGaps(comparisons[name].group, read, table[0]["refused"])
    vars(found)["comparisons"] = comparisons
    return found


def gap(row: dict[str, str]) -> Gap:
    value, low, high, left, right = (float(row[key]) for key in ("gap", "low", "high", "overlap_low", "overlap_high"))
    seeds = int(row["run_seeds"]), int(row["reference_seeds"])
    return Gap(row["domain"], value, low, high, int(row["points"]), (left, right), seeds, int(row["documents"]))


def finished(folder: Path) -> Findings:
    """The findings of a report on finished models, without their curves."""
    losses, table = read_csv(folder / "losses.csv"), read_csv(folder / "gaps.csv")
    ends = [({**row, "step": row["tokens"]}, seed) for row in losses for seed in [int(row["seed"])]]
    models: list[Group] = []
    for (name,), chosen in grouped([row for row, _ in ends], "model"):
        domains = list(chosen[0])[list(chosen[0]).index("copying") + 1 : -1]
        mine = []
        for (seed,), points in grouped(chosen, "seed"):
            curves = {tags.loss(tags.IN_DOMAIN): curve(points, "in_domain")}
            curves |= {OOD.tag(domain): curve(points, domain) for domain in domains}
            mine.append(Run(folder / name, name, int(seed), {}, {}, curves, 0, int(points[-1]["tokens"])))
        models.append(Group(name, mine))
    found = Findings(models, next(group for group in models if group.name == REFERENCE))
    vars(found)["finished"] = {name: finished_gap(chosen) for (name,), chosen in grouped(table, "run")}
    return found


def finished_gap(table: list[dict[str, str]]) -> FinishedGap:
    budgets = []
    for (tokens,), at in grouped([row for row in table if row["tokens"]], "tokens"):
        domains = {row["domain"]: float(row["gap"]) for row in at if not row["domain"].startswith(tags.MEAN)}
        mean = next(row for row in at if row["domain"] == tags.MEAN)
        ends: Any = [float(mean[end]) for end in ("low", "high")]
        half = (ends[1] - ends[0]) / 2
        budgets.append(BudgetGap(int(tokens), float(mean["in_domain_loss"]), domains, float(mean["gap"]), half))
    copied = 1.0 if table[0]["settled"] == "True" else None
    return FinishedGap({}, tuple(budgets), tuple(map(int, table[0]["seeds"].split())), copied)


def recall_points(folder: Path) -> list[dict[str, Any]]:
    """The points of a recall exam, the smallest state first."""
    points = json.loads((folder / "mqar.json").read_text(encoding="utf-8"))["points"]
    return sorted(points, key=lambda point: (point["state_elements"], point["accuracy"]))


def recall_table(points: list[dict[str, Any]]) -> list[str]:
    """The points as Markdown, with the published accuracy of the same configuration."""
    table = [["mixer", "width", "state elements", "accuracy", "epochs", "published", "difference"]]
    for point in points:
        window = point["options"].get("window") if point["class"] == "Attention" else None
        name = f"`{point['class']}`" + (f", window {window}" if window else "")
        accuracy, known = point["accuracy"], published_accuracy(point)
        table.append([name, str(point["width"]), f"{point['state_elements']:,}", f"{accuracy:.3f}"])
        table[-1] += [str(point["epochs"]) + ("" if point["finished"] else ", stopped")]
        table[-1] += ["-", "-"] if known is None else [f"{known:.2f}", f"{accuracy - known:+.3f}"]
    return markdown(table)


def drawn(picture: Path) -> Picture:
    if picture.stem == "mqar":
        points = recall_points(picture.parent)
        print("\n".join(recall_table(points)))
        with matplotlib.rc_context(STYLE):
            return recall_figure(points)
    found = (finished if picture.stem == "budgets" else findings)(picture.parent)
    return Comparison(found).figures([picture.stem])[picture.stem]


def main() -> None:
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    for picture in sorted(results.rglob("*.png")):
        if picture.stem == "scatter" and not picture.with_suffix(".csv").exists():
            continue
        figure = drawn(picture)
        with matplotlib.rc_context(STYLE):
            figure.savefig(picture, dpi=DPI)
        print(f"wrote {picture}")


if __name__ == "__main__":
    main()
