"""The tables of a report: its CSV files, and the gaps as text."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.report.capabilities import Measured
from seqarch.report.convergence import convergence
from seqarch.report.costs import costs
from seqarch.report.findings import Findings, ModelGaps
from seqarch.report.roles import OOD
from seqarch.runs.tags import IN_DOMAIN, MEAN
from seqarch.tables import readable, write_csv

Table = tuple[Sequence[str], Iterable[Sequence[Any]]]
"""The names of the columns, and the rows."""


def write_tables(found: Findings, out: Path) -> list[Path]:
    """Write `models.csv`, `gap.csv`, `convergence.csv`, `scatter.csv`, `entropy.csv` to a folder.

    With finished models at several budgets, `finished.csv` too; with results of `seqarch eval`, `capabilities.csv`.
    Without losses that can be compared, only the tables without losses.
    """
    there = {"finished": found.finished or found.unfinished, "capabilities": found.capabilities}
    there |= dict.fromkeys(("gap", "convergence", "scatter"), not found.no_losses)
    return [write_csv(out / f"{name}.csv", *make(found)) for name, make in TABLES.items() if there.get(name, True)]


def models(found: Findings) -> Table:
    """A row per model: its settings, final losses (means of the seeds) and costs; empty where nothing was noted."""
    header = (
        *("run", "seeds", "status", "mixers", "parameters", "steps", "tokens", "sequence_length", "tokenizer", "train"),
        *("in_domain_loss", _loss_column(found), "tokens_per_second", "mfu", "peak_gib", "minutes_a_run"),
        *("hardware", "commits", "versions"),
    )
    rows: list[tuple[Any, ...]] = []
    for group in found.groups:
        facts, took = group.runs[0].facts, costs(group)
        final = [None] if found.no_losses else list(group.final_losses().values())
        what = (
            " ".join(str(run.seed) for run in group.runs),
            " ".join(dict.fromkeys(run.status for run in group.runs)),
            " ".join((facts.get("mixers") or {}).values()),
            facts.get("parameters"),
            max(run.steps for run in group.runs),
            max(run.tokens for run in group.runs),
            *(facts.get(key) for key in ("sequence_length", "tokenizer")),
            " ".join(facts.get("train") or {}),
        )
        took["commits"] = "; ".join(took["commits"])
        rows.append((group.name, *what, final[0], final[-1], *took.values()))
    return header, rows


def gaps(found: Findings) -> Table:
    """One row per model and domain; a model without a gap has one row with the reason.

    `role` says what the domains are: `ood`, or `in_domain` for the hold-outs of training domains.
    """
    header = (
        *("run", "reference", "role", "domain", "gap", "low", "high", "points", "overlap_low", "overlap_high"),
        *("run_seeds", "reference_seeds", "documents", "refused"),
    )
    rows: list[tuple[Any, ...]] = []
    for name, one in found.comparisons.items():
        names = (name, found.reference.name, found.role.name)
        if one.refusal:
            rows.append((*names, *[""] * 7, len(one.group.runs), len(found.reference.runs), "", one.refusal))
        rows.extend(
            (*names, g.domain, g.value, g.low, g.high, g.points, *g.overlap, *g.seeds, g.documents, "")
            for g in one.gaps
        )
    return header, rows


def finished(found: Findings) -> Table:
    """The gap between finished models: one row per model, budget and domain; a model without it has one row.

    The domain `mean` is their weighted mean; `mean, raw` weighs them equally. The means over recallable and other
    tokens have the same weights as `mean`, and intervals over seeds only.
    """
    header = (
        *("run", "reference", "tokens", "in_domain_loss", "domain", "weight", "gap", "low", "high"),
        *("seeds", "pairs", "settled", "verdict"),
    )
    rows: list[tuple[Any, ...]] = []
    for name, one in found.finished.items():
        for at in one.budgets:
            said = (" ".join(map(str, one.seeds)), at.seeds, one.settled, one.sentence())
            names = (name, found.reference.name, at.tokens, at.in_domain)
            rows += [(*names, each, one.weights[each], gap, "", "", *said) for each, gap in at.domains.items()]
            rows.append((*names, MEAN, 1.0, at.mean, at.mean - at.half_width, at.mean + at.half_width, *said))
            rows.append((*names, f"{MEAN}, raw", "", at.raw, "", "", *said))
            for part, (gap, wide) in at.parts.items():
                rows.append((*names, f"{MEAN}, {part} tokens", "", gap, gap - wide, gap + wide, *said))
    rows += [(name, found.reference.name, *[""] * 10, reason) for name, reason in found.unfinished.items()]
    return header, rows


def budget_rows(finished: Mapping[str, Any]) -> list[list[str]]:
    """The gap between finished models as text, a column per budget: what `FinishedGap.plain` gives."""
    budgets = finished["budgets"]
    rows = [
        ["finished models after", *(readable(each["tokens"]) for each in budgets)],
        ["pairs of seeds", *(str(each["seeds"]) for each in budgets)],
        ["compared at an in-domain loss of", *(f"{each['in_domain']:.3f}" for each in budgets)],
        ["gap, standardised mean", *(_with_width((each["mean"], each["half_width"])) for each in budgets)],
        ["gap, raw mean", *(f"{each['raw']:+.3f}" for each in budgets)],
    ]
    for name, weight in finished["weights"].items():
        rows.append([f"gap, {name} (weight {weight:.2f})", *(f"{each['domains'][name]:+.3f}" for each in budgets)])
    for part in ("recallable", "other"):
        if any(part in each["parts"] for each in budgets):
            rows.append([f"gap, {part} tokens", *(_with_width(each["parts"].get(part)) for each in budgets)])
    for index, who in enumerate(("model", "reference")):
        saved = [each["copying"][index] for each in budgets]
        if any(each is not None for each in saved):
            rows.append([f"saved by copying, {who}", *("" if each is None else f"{each:z.2f}" for each in saved)])
    return rows


def _with_width(gap: tuple[float, float | None] | None) -> str:
    """A gap and half of its interval, where these are known."""
    if gap is None:
        return ""
    value, wide = gap
    return f"{value:+.3f}" + ("" if wide is None or math.isinf(wide) else f" ±{wide:.3f}")


def capabilities(found: Findings) -> Table:
    """Results of `seqarch eval`: a row per metric and model, with the paired difference to the reference."""
    header = (
        *("metric", "run", "value", "low", "high", "samples", "chance", "at_chance"),
        *("difference", "difference_low", "difference_high", "version", "limit", "rows", "step"),
    )
    return header, (
        (tag, name, *astuple(one.value), one.value.at_chance, *(one.difference or ("", "", "")), *_origin(one))
        for tag, measured in found.capabilities.items()
        for name, one in measured.items()
    )


def _origin(one: Measured) -> tuple[Any, ...]:
    """Version and limit of a task, where its rows come from, and the training step of the checkpoint."""
    where = (one.facts.get("rows") or {}).get("where")
    return one.facts.get("version"), one.facts["settings"].get("limit"), where, one.step


def speeds(found: Findings) -> Table:
    """The tokens at which each model and the reference reach some in-domain losses: one row per model and loss."""
    header = ("run", "reference", "in_domain_loss", "tokens", "reference_tokens", "ratio")
    return header, (
        (group.name, found.reference.name, *level)
        for group in found.others
        for level in convergence(group.evaluations, found.reference.evaluations)
    )


def scatter(found: Findings) -> Table:
    """Every evaluation point: one row per run, step and compared domain (and their mean).

    The last column is `ood_loss`, or `holdout_loss` where the domains are those of training.
    """
    header = ("run", "seed", "step", "tokens", "in_domain_loss", "domain", _loss_column(found))
    return header, (
        (run.name, run.seed, step, tokens, inside, domain, loss)
        for _, run in found.runs
        for domain, losses in run.evaluations.with_mean().items()
        for step, tokens, inside, loss in zip(
            run.evaluations.step, run.evaluations.tokens, run.evaluations.in_domain, losses, strict=True
        )
    )


def entropies(found: Findings) -> Table:
    """Every entropy that was logged: one row per run, step and layer, nats, averaged over the layer's heads.

    The column `weights` names the weights: `attention`, or the `implied` weights of recurrent layers.
    """
    header = ("run", "seed", "step", "tokens", "weights", "layer", "entropy")
    return header, (
        (run.name, run.seed, step, tokens, weights, layer, entropy)
        for _, run in found.runs
        for weights, implied in (("attention", False), ("implied", True))
        for layer, curve in run.entropy_layers(implied=implied).items()
        for step, tokens, entropy in zip(curve.step, curve.tokens, curve.value, strict=True)
    )


def gap_title(found: Findings) -> str:
    """The title of `gap_rows`."""
    role = found.role
    what = f"{role.gap.capitalize()} to '{found.reference.name}': {role.loss} at the same {role.equal}"
    return f"{what}, nats per token (+ is worse)"


def gap_rows(found: Findings) -> list[list[str]]:
    """The gaps as a table of text with its head: a row per model. With one model it holds only that model's losses.

    If runs have finished models, their gap comes first, and the gap over all of training is the last column.
    """
    if found.no_losses:
        return [
            ["run", "tokens"],
            *([each.name, readable(max(run.tokens for run in each.runs))] for each in found.groups),
        ]
    single = [domain for domain in found.domains if domain != MEAN] if len(found.domains) > 1 else []
    role, finished = found.role, bool(found.finished)
    heads = ["finished models", "", *single, "over all of training"] if finished else [found.domains[-1], *single]
    heads[0] = f"gap, {heads[0]} [95 % interval]"
    rows = [["run", "tokens", role.inside, role.short, *heads]]
    for group in found.groups:
        final = group.final_losses()
        tokens = readable(max(run.tokens for run in group.runs))
        row = [group.name, tokens, f"{final[IN_DOMAIN]:.3f}", f"{final[found.domains[-1]]:.3f}"]
        one = found.comparisons.get(group.name)
        if one and finished:
            row += _finished_cells(one, single)
        elif one and one.overall:
            row += [str(one.overall), *(f"{gap.value:+.3f}" for gap in one.gaps[: len(single)])]
        else:
            row += ["no gap, see below" if one else "reference"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return rows if found.comparisons else [row[:4] for row in rows]


def _finished_cells(one: ModelGaps, domains: Sequence[str]) -> list[str]:
    """The gap between finished models, its budget, its values by domain, and the gap over all of training."""
    over_all = str(one.overall) if one.overall else "no gap"
    if one.finished is None:
        return ["not finished", *[""] * (len(domains) + 1), over_all]
    last = one.finished.headline
    interval = f"[{last.mean - last.half_width:+.3f}, {last.mean + last.half_width:+.3f}]"
    state = f"{'settled' if one.finished.settled else 'not settled'} at {readable(last.tokens)}"
    by_domain = [f"{last.domains[domain]:+.3f}" for domain in domains]
    return [f"{last.mean:+.3f} {interval if np.isfinite(last.half_width) else ''}".strip(), state, *by_domain, over_all]


def _loss_column(found: Findings) -> str:
    return "ood_loss" if found.role is OOD else "holdout_loss"


TABLES = {
    **{"models": models, "gap": gaps, "convergence": speeds, "scatter": scatter, "entropy": entropies},
    **{"finished": finished, "capabilities": capabilities},
}
