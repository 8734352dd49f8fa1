"""The tables of a report: its CSV files, and the gaps as text."""

import math
import operator
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seqarch.report.capabilities import Measured
from seqarch.report.costs import costs
from seqarch.report.draft import convergence
from seqarch.report.estimates import Estimate, Gap
from seqarch.report.findings import Findings, ModelGaps
from seqarch.report.roles import OOD
from seqarch.report.runs import PARTS
from seqarch.runs.tags import IN_DOMAIN, MEAN
from seqarch.tables import readable, write_csv

Table = tuple[Sequence[str], Iterable[Sequence[Any]]]
"""The names of the columns, and the rows."""


def write_tables(findings: Findings, out: Path) -> list[Path]:
    """Write `models.csv`, `gap.csv`, `convergence.csv`, `scatter.csv`, `entropy.csv` to a folder.

    With finished models at several budgets, `finished.csv` and `standings.csv` too; with results of `seqarch eval`,
    `capabilities.csv`.
    Without losses that can be compared, only the tables without losses.
    """
    there = {"finished": findings.finished or findings.unfinished, "capabilities": findings.capabilities}
    there["standings"] = findings.finished
    there |= dict.fromkeys(("gap", "convergence", "scatter"), not findings.no_losses)
    return [write_csv(out / f"{name}.csv", *make(findings)) for name, make in TABLES.items() if there.get(name, True)]


def models(findings: Findings) -> Table:
    """A row per model: its settings, final losses (means of the seeds) and costs; empty where nothing was noted."""
    header = (
        *("run", "seeds", "status", "mixers", "parameters", "steps", "tokens", "sequence_length", "tokenizer", "train"),
        "evaluations_left_out",
        *("in_domain_loss", _loss_column(findings), "tokens_per_second", "mfu", "flops_counted", "peak_gib"),
        *("minutes_a_run", "hardware", "commits", "versions"),
    )
    rows: list[tuple[Any, ...]] = []
    for group in findings.groups:
        facts, took = group.runs[0].facts, costs(group)
        final = [None] if findings.no_losses else list(group.final_losses().values())
        what = (
            " ".join(str(run.seed) for run in group.runs),
            " ".join(dict.fromkeys(run.status for run in group.runs)),
            " ".join((facts.get("mixers") or {}).values()),
            facts.get("parameters"),
            max(run.steps for run in group.runs),
            group.tokens,
            *(facts.get(key) for key in ("sequence_length", "tokenizer")),
            " ".join(facts.get("train") or {}),
            None if findings.no_losses else sum(run.evaluations_left_out for run in group.runs),
        )
        speed = (took.tokens_per_second, took.mfu, facts.get("flops_counted"), took.peak_gib, took.minutes_a_run)
        rows.append(
            (group.name, *what, final[0], final[-1], *speed, took.hardware, "; ".join(took.commits), took.versions)
        )
    return header, rows


def gaps(findings: Findings) -> Table:
    """The gap during training: one row per model and domain; a model without it has one row with the reason.

    `role` says what the domains are: `ood`, or `in_domain` for the hold-outs of training domains.
    """
    header = (
        *("run", "reference", "role", "domain", "gap", "points", "overlap_low", "overlap_high"),
        *("run_seeds", "reference_seeds", "refused"),
    )
    rows: list[tuple[Any, ...]] = []
    for name, one in findings.comparisons.items():
        names = (name, findings.reference.name, findings.role.name)
        seeds = len(one.group.runs), len(findings.reference.runs)
        if one.draft is None:
            rows.append((*names, *[""] * 5, *seeds, one.refusal))
        else:
            where = (one.draft.points, *one.draft.overlap, *seeds, "")
            rows.extend((*names, domain, gap, *where) for domain, gap in one.draft.gaps.items())
    return header, rows


def finished(findings: Findings) -> Table:
    """The gap between finished models: one row per model, budget and domain; a model without it has one row.

    The domain `mean, raw` is their mean, `mean` the standardised one, whose weights are in `weight`. The means over
    recallable and other tokens are raw and have intervals over seeds only.
    """
    header = (
        *("run", "reference", "tokens", "in_domain_loss", "domain", "weight", "gap", "low", "high"),
        *("seeds", "pairs", "settled", "word", "verdict"),
    )
    rows: list[tuple[Any, ...]] = []
    for name, one in findings.finished.items():
        for at in one.budgets:
            sentence = one.sentence(name, findings.reference.name)
            rest = (" ".join(map(str, one.seeds)), at.pairs, one.settled, one.word, sentence)
            names = (name, findings.reference.name, at.tokens, at.in_domain)
            rows += [(*names, each, one.weights[each], gap, "", "", *rest) for each, gap in at.domains.items()]
            means = {MEAN: at.standardised, f"{MEAN}, raw": at.raw}
            means |= {f"{MEAN}, {part} tokens": gap for part, gap in at.parts.items()}
            rows += [(*names, each, "", gap.value, gap.low, gap.high, *rest) for each, gap in means.items()]
    rows += [(name, findings.reference.name, *[""] * 11, reason) for name, reason in findings.unfinished.items()]
    return header, rows


def standings(findings: Findings, tokens: int | None = None) -> Table:
    """One row per model with finished models, the best raw gap first: at its last budget, or at that of `tokens`.

    `effective_tokens` are the tokens with which each of the two finished models has the in-domain loss at which they
    are compared. `tokens_ratio` is their ratio, and `time_ratio` that of the seconds of training; below 1 the model
    needs less than the reference to come to this loss. `rank, DOMAIN` is the model's place among them on a domain.
    """
    names = [domain for domain in findings.domains if domain != MEAN]
    header = (
        *("run", "reference", "tokens", "pairs", "in_domain_loss", "gap", "low", "high"),
        *("gap_recallable", "gap_other", "standardised", "standardised_low", "standardised_high"),
        *("change_per_doubling", "verdict", "gap_at_highest_loss", "gap_during_training"),
        *("effective_tokens", "reference_effective_tokens", "tokens_ratio", "time_ratio"),
        *(f"rank, {name}" for name in names),
    )
    last = {
        name: at
        for name, one in findings.finished.items()
        for at in one.budgets
        if at.tokens == (tokens or one.headline.tokens)
    }
    speed = {group.name: costs(group).tokens_per_second for group in findings.groups}
    rows: list[tuple[Any, ...]] = []
    for name, at in sorted(last.items(), key=lambda item: item[1].raw.value):
        one, draft = findings.finished[name], findings.comparisons[name].draft
        ratio = at.effective[0] / at.effective[1]
        mine, other = speed[name], speed[findings.reference.name]
        ranks = [1 + sum(other.domains[each] < at.domains[each] for other in last.values()) for each in names]
        where = (name, findings.reference.name, at.tokens, at.pairs, at.in_domain)
        raw, mean = at.raw, at.standardised
        of_raw = (raw.value, raw.low, raw.high, *(at.parts[part].value if part in at.parts else "" for part in PARTS))
        verdict = (one.change.value if one.change else "", one.word, one.highest, draft.overall if draft else "")
        ratios = (*at.effective, ratio, ratio * other / mine if mine and other else "")
        rows.append((*where, *of_raw, mean.value, mean.low, mean.high, *verdict, *ratios, *ranks))
    return header, rows


def budget_rows(finished: Gap) -> list[list[str]]:
    """The gap between finished models as text, a column per budget."""
    budgets = finished.budgets
    rows = [
        ["finished models after", *(readable(each.tokens) for each in budgets)],
        ["pairs of seeds", *(str(each.pairs) for each in budgets)],
        ["compared at an in-domain loss of", *(f"{each.in_domain:.3f}" for each in budgets)],
        ["gap, mean of the domains", *(_with_width(each.raw) for each in budgets)],
    ]
    for part in PARTS:
        if any(part in each.parts for each in budgets):
            rows.append([f"gap, {part} tokens", *(_with_width(each.parts.get(part)) for each in budgets)])
    rows += [[f"gap, {name}", *(f"{each.domains[name]:+.3f}" for each in budgets)] for name in finished.weights]
    rows.append(["gap, standardised mean", *(_with_width(each.standardised) for each in budgets)])
    for index, who in enumerate(("model", "reference")):
        rows.append([f"tokens to this loss, {who}", *(readable(each.effective[index]) for each in budgets)])
    for index, who in enumerate(("model", "reference")):
        saved = [each.copying[index] for each in budgets]
        if any(each is not None for each in saved):
            rows.append([f"saved by copying, {who}", *("" if each is None else f"{each:z.2f}" for each in saved)])
    return rows


def _with_width(gap: Estimate | None) -> str:
    """A gap and half of its interval, where these are known."""
    if gap is None:
        return ""
    return f"{gap.value:+.3f}" + (f" ±{gap.half_width:.3f}" if math.isfinite(gap.half_width) else "")


def capabilities(findings: Findings) -> Table:
    """Results of `seqarch eval`: a row per metric and model, with the paired difference to the reference."""
    header = (
        *("metric", "run", "value", "low", "high", "samples", "chance", "at_chance"),
        *("difference", "difference_low", "difference_high", "version", "limit", "rows", "step"),
    )
    facts = operator.attrgetter("value", "low", "high", "n", "chance", "at_chance")
    return header, (
        (tag, name, *facts(one.value), *(one.difference or ("", "", "")), *_origin(one))
        for tag, measured in findings.capabilities.items()
        for name, one in measured.items()
    )


def _origin(one: Measured) -> tuple[Any, ...]:
    """Version and limit of a task, where its rows come from, and the training step of the checkpoint."""
    where = (one.facts.get("rows") or {}).get("where")
    return one.facts.get("version"), one.facts["settings"].get("limit"), where, one.step


def speeds(findings: Findings) -> Table:
    """The tokens at which each model and the reference reach some in-domain losses: one row per model and loss."""
    header = ("run", "reference", "in_domain_loss", "tokens", "reference_tokens", "ratio")
    return header, (
        (group.name, findings.reference.name, *level)
        for group in findings.others
        for level in convergence(group.evaluations, findings.reference.evaluations)
    )


def scatter(findings: Findings) -> Table:
    """Every evaluation point: one row per run, step and compared domain (and their mean).

    The last column is `ood_loss`, or `holdout_loss` where the domains are those of training.
    """
    header = ("run", "seed", "step", "tokens", "in_domain_loss", "domain", _loss_column(findings))
    return header, (
        (run.name, run.seed, step, tokens, inside, domain, loss)
        for _, run in findings.runs
        for domain, losses in run.evaluations.with_mean().items()
        for step, tokens, inside, loss in zip(
            run.evaluations.step, run.evaluations.tokens, run.evaluations.in_domain, losses, strict=True
        )
    )


def entropies(findings: Findings) -> Table:
    """Every entropy that was logged: one row per run, step and layer, nats, averaged over the layer's heads.

    The column `weights` names the weights: `attention`, or the `implied` weights of recurrent layers.
    """
    header = ("run", "seed", "step", "tokens", "weights", "layer", "entropy")
    return header, (
        (run.name, run.seed, step, tokens, weights, layer, entropy)
        for _, run in findings.runs
        for weights, implied in (("attention", False), ("implied", True))
        for layer, curve in run.entropy_layers(implied=implied).items()
        for step, tokens, entropy in zip(curve.step, curve.tokens, curve.value, strict=True)
    )


def gap_title(findings: Findings) -> str:
    """The title of `gap_rows`."""
    role = findings.role
    what = f"{role.gap.capitalize()} to '{findings.reference.name}': {role.loss} at the same {role.equal}"
    return f"{what}, nats per token (+ is worse)"


def gap_rows(findings: Findings) -> list[list[str]]:
    """The gaps as a table of text with its head: a row per model. With one model it holds only that model's losses.

    If runs have finished models, their gap comes first, and the gap during training is the last column.
    """
    if findings.no_losses:
        return _evaluation_rows(findings)
    single = [domain for domain in findings.domains if domain != MEAN] if len(findings.domains) > 1 else []
    role, finished = findings.role, bool(findings.finished)
    heads = ["gap, finished models [95 % interval]", "", *single, "during training"] if finished else []
    heads = heads or [f"gap, {findings.domains[-1]} (draft)", *single]
    rows = [["run", "tokens", role.inside, role.short, *heads]]
    for group in findings.groups:
        final = group.final_losses()
        row = [group.name, readable(group.tokens), f"{final[IN_DOMAIN]:.3f}", f"{final[findings.domains[-1]]:.3f}"]
        one = findings.comparisons.get(group.name)
        if one and finished:
            row += _finished_cells(one, single)
        elif one and one.draft:
            row += [f"{one.draft.gaps[domain]:+.3f}" for domain in (findings.domains[-1], *single)]
        else:
            row += ["no gap, see below" if one else "reference"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    return rows if findings.comparisons else [row[:4] for row in rows]


def _evaluation_rows(findings: Findings) -> list[list[str]]:
    """The results of `seqarch eval`: a row per metric, a column per model."""
    names = [group.name for group in findings.groups]
    tokens = (readable(group.tokens) if group.tokens else "unknown" for group in findings.groups)
    rows = [["metric", *names], ["training tokens", *tokens]]
    facts = [group.runs[0].facts for group in findings.groups]
    rows.append(["parameters", *(readable(each["parameters"]) if "parameters" in each else "" for each in facts)])
    for tag, measured in findings.capabilities.items():
        rows.append([tag, *(f"{measured[name].value.value:.4g}" if name in measured else "" for name in names)])
    return rows


def _finished_cells(one: ModelGaps, domains: Sequence[str]) -> list[str]:
    """The gap between finished models, its verdict, its values by domain, and the gap during training."""
    draft = f"{one.draft.overall:+.3f}" if one.draft else "no gap"
    if one.finished is None:
        return ["not finished", *[""] * (len(domains) + 1), draft]
    last = one.finished.headline
    by_domain = [f"{last.domains[domain]:+.3f}" for domain in domains]
    return [str(last.raw), f"{one.finished.word} at {readable(last.tokens)}", *by_domain, draft]


def _loss_column(findings: Findings) -> str:
    return "ood_loss" if findings.role is OOD else "holdout_loss"


TABLES = {
    **{"models": models, "gap": gaps, "convergence": speeds, "scatter": scatter, "entropy": entropies},
    **{"finished": finished, "standings": standings, "capabilities": capabilities},
}
