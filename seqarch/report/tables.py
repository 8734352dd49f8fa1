"""The numbers of a report: comparisons with the reference, CSV files, and the table for the terminal."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.report.convergence import convergence
from seqarch.report.costs import costs
from seqarch.report.gap import Gap, OverlapError, base_capability_gap, readable
from seqarch.report.roles import OOD
from seqarch.report.runs import Group
from seqarch.runs.tags import MEAN


@dataclass(frozen=True)
class Comparison:
    """A run against the reference: the gaps of all domains and, last, of their mean; or why there is none."""

    group: Group
    gaps: list[Gap]
    refusal: str = ""

    @property
    def overall(self) -> Gap | None:
        """The gap of the mean of the domains (of the domain, where there is one)."""
        return self.gaps[-1] if self.gaps else None


def compare(groups: Sequence[Group], reference: Group) -> list[Comparison]:
    """Every other run against the reference; too small an overlap is told in the comparison and stops no report."""
    comparisons = []
    for group in groups:
        if group is reference:
            continue
        names = (f"'{group.name}'", f"'{reference.name}'")
        try:
            gaps = base_capability_gap(group.evaluations, reference.evaluations, names=names)
            comparisons.append(Comparison(group, gaps))
        except OverlapError as error:
            comparisons.append(Comparison(group, [], str(error)))
    return comparisons


def ranked(groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison]) -> list[Group]:
    """The groups by their gap, the best first, the reference where it is zero; those without a gap come last."""
    gaps = {one.group.name: one.overall.value for one in comparisons if one.overall}
    return sorted(groups, key=lambda group: 0.0 if group is reference else gaps.get(group.name, np.inf))


def final_losses(group: Group) -> tuple[float, float]:
    """In-domain loss and mean compared loss of the last evaluation, nats a token, averaged over the seeds."""
    ends = [(e.in_domain[-1], np.mean([loss[-1] for loss in e.losses.values()])) for e in group.evaluations]
    inside, outside = np.mean(ends, axis=0)
    return float(inside), float(outside)


def write_scatter(path: Path, groups: Sequence[Group]) -> Path:
    """Every evaluation point: one line a run, step and compared domain (and their mean).

    The last column is `ood_loss`, or `holdout_loss` where the domains are those of training.
    """
    header = ("run", "seed", "step", "tokens", "in_domain_loss", "domain", _loss_column(groups))
    return _write(
        path,
        header,
        (
            (run.name, run.seed, step, tokens, inside, domain, loss)
            for group in groups
            for run in group.runs
            for domain, losses in run.evaluations.with_mean().items()
            for step, tokens, inside, loss in zip(
                run.evaluations.step, run.evaluations.tokens, run.evaluations.in_domain, losses, strict=True
            )
        ),
    )


def write_entropy(path: Path, groups: Sequence[Group]) -> Path:
    """Every entropy that was logged: one line a run, step and layer, nats, averaged over the layer's heads.

    `weights` says of which: `attention`, or the `implied` ones of recurrent layers.
    """
    header = ("run", "seed", "step", "tokens", "weights", "layer", "entropy")
    return _write(
        path,
        header,
        (
            (run.name, run.seed, step, tokens, weights, layer, entropy)
            for group in groups
            for run in group.runs
            for weights, layers in (("attention", run.entropy_layers), ("implied", run.implied_entropy_layers))
            for layer, curve in layers.items()
            for step, tokens, entropy in zip(curve.step, curve.tokens, curve.value, strict=True)
        ),
    )


def write_gaps(path: Path, comparisons: Sequence[Comparison], reference: Group) -> Path:
    """The gap table: one line a run and domain; a run without a gap has one line with the reason.

    `role` says what the domains are: `ood`, or `in_domain` for the hold-outs of training domains.
    """
    role = reference.role.name
    header = (
        *("run", "reference", "role", "domain", "gap", "low", "high", "points", "overlap_low", "overlap_high"),
        *("run_seeds", "reference_seeds", "documents", "refused"),
    )
    rows: list[tuple[Any, ...]] = []
    for one in comparisons:
        names = (one.group.name, reference.name, role)
        if one.refusal:
            rows.append((*names, *[""] * 7, len(one.group.runs), len(reference.runs), "", one.refusal))
        rows.extend(
            (*names, g.domain, g.value, g.low, g.high, g.points, *g.overlap, *g.seeds, g.documents, "")
            for g in one.gaps
        )
    return _write(path, header, rows)


def write_models(path: Path, groups: Sequence[Group]) -> Path:
    """What each model is, how its runs ended (means of the seeds) and what they took; empty where nothing was noted."""
    header = (
        *("run", "seeds", "status", "mixers", "parameters", "steps", "tokens", "sequence_length", "tokenizer", "train"),
        *("in_domain_loss", _loss_column(groups), "tokens_per_second", "mfu", "peak_gib", "minutes_a_run"),
        *("hardware", "commits", "versions"),
    )
    rows: list[tuple[Any, ...]] = []
    for group in groups:
        facts, took = group.runs[0].facts, costs(group)
        what = (
            " ".join(str(run.seed) for run in group.runs),
            " ".join(dict.fromkeys(str(run.facts.get("status", "unknown")) for run in group.runs)),
            " ".join((facts.get("mixers") or {}).values()),
            facts.get("parameters"),
            max(run.steps for run in group.runs),
            max(run.tokens for run in group.runs),
            *(facts.get(key) for key in ("sequence_length", "tokenizer")),
            " ".join(facts.get("train") or {}),
        )
        costed = ("; ".join(each) if isinstance(each, list) else each for each in astuple(took))
        rows.append((group.name, *what, *final_losses(group), *costed))
    return _write(path, header, rows)


def write_convergence(path: Path, groups: Sequence[Group], reference: Group) -> Path:
    """The tokens at which each run and the reference reach some in-domain losses: one line a run and loss."""
    header = ("run", "reference", "in_domain_loss", "tokens", "reference_tokens", "ratio")
    return _write(
        path,
        header,
        (
            (group.name, reference.name, level.loss, level.tokens, level.reference, level.ratio)
            for group in groups
            if group is not reference
            for level in convergence(group.evaluations, reference.evaluations)
        ),
    )


def gap_table(groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison]) -> str:
    """The gaps as plain text for a terminal, with a line for each run that could not be compared."""
    by_name = {one.group.name: one for one in comparisons}
    domains = list(groups[0].evaluations[0].with_mean())
    single = [domain for domain in domains if domain != MEAN] if len(domains) > 1 else []
    role = reference.role
    rows = [["run", "tokens", role.inside, role.short, f"gap, {domains[-1]} [95 % interval]", *single]]
    for group in groups:
        inside, outside = final_losses(group)
        row = [group.name, readable(max(run.tokens for run in group.runs)), f"{inside:.3f}", f"{outside:.3f}"]
        overall = by_name[group.name].overall if group is not reference else None
        if overall:
            row += [interval_text(overall), *(f"{gap.value:+.3f}" for gap in by_name[group.name].gaps[: len(single)])]
        else:
            row += ["reference" if group is reference else "no gap, see below", *[""] * len(single)]
        rows.append(row)
    notes = [one.refusal for one in comparisons if one.refusal]
    what = f"{role.gap.capitalize()} to '{reference.name}': {role.loss} at the same {role.equal}"
    title = f"{what}, nats a token (+ is worse)"
    return "\n".join([title, *_align(rows), *notes]) if comparisons else "\n".join(_align([row[:4] for row in rows]))


def interval_text(gap: Gap) -> str:
    """ "+0.021 [+0.017, +0.025]"."""
    return f"{gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"


def verdict(gap: Gap, group: Group) -> str:
    """What a gap says about a group beside the reference, as a sentence."""
    name = group.name
    where = f"averaged over {group.average}" if gap.domain == MEAN else f"on {group.role.one}{gap.domain}"
    amount = f"{gap.value:+.3f} nats a token {where} (95 % interval {gap.low:+.3f} to {gap.high:+.3f})"
    if gap.low <= 0 <= gap.high:
        return f"{name} cannot be told apart: {amount}."
    return f"{name} is {'worse' if gap.value > 0 else 'better'}: {amount}."


def _loss_column(groups: Sequence[Group]) -> str:
    return "ood_loss" if groups[0].role is OOD else "holdout_loss"


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def _align(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
