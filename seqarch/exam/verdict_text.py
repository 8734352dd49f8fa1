"""A verdict in words: Markdown that reads as plain text in a terminal too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seqarch.report.gap import Gap
from seqarch.report.roles import HOLD_OUT, OOD
from seqarch.report.tables import budget_rows
from seqarch.runs.tags import IN_DOMAIN, MEAN
from seqarch.tables import markdown, readable

SIMILAR = 0.1
"""Share of parameters by which a candidate may differ from the reference without a warning."""


def verdict_text(verdict: Mapping[str, Any]) -> str:
    """The verdict as a page of Markdown."""
    names = verdict["candidate"], verdict["reference"]
    lines = [f"# {names[0]} against {names[1]} ({verdict['size']})", ""]
    lines.append(verdict.get("conclusion") or "There is no verdict yet: a finished run of each model is needed.")
    lines += [f"Missing: {each['run']}: {each['why']}" for each in verdict["missing"]]
    if warning := _parameters_warning(verdict):
        lines.append(warning)
    if "final" in verdict:
        lines += [
            "",
            *_finished(verdict),
            *_rates(verdict),
            *_losses(verdict),
            "",
            *_learning(verdict),
            *_costs(verdict),
            "",
            *_footing(verdict),
        ]
    return "\n".join(lines)


def _parameters_warning(verdict: Mapping[str, Any]) -> str:
    ratio = verdict["parameters"]["ratio"]
    if abs(ratio - 1) <= SIMILAR:
        return ""
    more = "more" if ratio > 1 else "fewer"
    return (
        f"Warning: {verdict['candidate']} has {abs(ratio - 1):.0%} {more} parameters than {verdict['reference']}: "
        "part of the difference may be size."
    )


def _finished(verdict: Mapping[str, Any]) -> list[str]:
    """The gap between finished models at each budget of tokens."""
    finished = verdict.get("finished")
    if not finished:
        return []
    moves = (
        "" if finished["slope"] is None else f" The gap last moved by {finished['slope']:+.3f} per doubling of tokens."
    )
    copied = finished["copied"]
    copying = "" if copied is None else f" The reference saves {copied:.2f} nats per token by copying."
    settled = "settled" if finished["settled"] else "not settled"
    return [*markdown(budget_rows(finished)), "", f"The gap is {settled}.{moves}{copying}", ""]


def _rates(verdict: Mapping[str, Any]) -> list[str]:
    """The learning-rate ladders, and the floor: another rate makes a gap of this size."""
    rates = verdict.get("rates")
    if not rates:
        return []
    factors = sorted({rung["factor"] for rungs in rates.values() for rung in rungs})
    at = {rung["factor"]: rung["rate"] for rungs in rates.values() for rung in rungs}
    head = ["learning rate", *(f"{at[factor]:g}" + " (shared)" * (factor == 1) for factor in factors)]
    rows = [head]
    for side, rungs in rates.items():
        found = {rung["factor"]: _rung(rung) for rung in rungs}
        rows.append([verdict[side], *(found.get(factor, "") for factor in factors)])
    lines = [*markdown(rows), ""]
    role = OOD if verdict["data"]["ood"] else HOLD_OUT
    lines.append(
        f"In-domain / {role.short} loss after the smallest budget. Each model trains at its rate in bold, which has "
        "its lowest in-domain loss."
    )
    if floor := verdict.get("floor"):
        course = ", ".join(f"{each['mean']:+.3f} at {readable(each['tokens'])} tokens" for each in floor["budgets"])
        lines.append(
            f"Floor: the gap of {verdict['reference']} at {floor['rate']:g} to itself is "
            f"{course or 'unknown: ' + floor['refused']}. A smaller gap of a candidate may come from its rate."
        )
    return [*lines, ""]


def _rung(rung: Mapping[str, Any]) -> str:
    if rung["in_domain"] is None:
        return "diverged"
    said = f"{rung['in_domain']:.3f} / {rung['compared']:.3f}"
    return f"**{said}**" if rung["chosen"] else said


def _losses(verdict: Mapping[str, Any]) -> list[str]:
    """The gaps, and the losses at the end."""
    mine, other = verdict["final"]["candidate"], verdict["final"]["reference"]
    role = OOD if verdict["data"]["ood"] else HOLD_OUT
    gaps = {gap["domain"]: gap for gap in verdict["gaps"]}
    rows = [["loss, nats per token", verdict["candidate"], verdict["reference"], f"gap at equal {role.equal}"]]
    for name in mine:
        said = str(Gap(**gaps[name])) if name in gaps else ""
        label = role.inside if name == IN_DOMAIN else f"{role.short}, {'mean' if name == MEAN else name}"
        rows.append([label, f"{mine[name]:.3f}", f"{other[name]:.3f}", said])
    lines = markdown(rows)
    if gaps:
        gap = verdict["gaps"][-1]
        documents = f" and {gap['documents']} evaluation documents" if gap["documents"] else ""
        seeds = verdict["seeds"]
        lines += [
            "",
            f"Gap: {role.loss} above the reference's where both have the same {role.equal} ({gap['overlap'][1]:.2f} to "
            f"{gap['overlap'][0]:.2f}, {gap['points']} evaluations); below zero is better. Intervals: 95 %, resampled "
            f"over {len(seeds['candidate'])} and {len(seeds['reference'])} seeds, evaluations{documents}.",
        ]
        if role is HOLD_OUT:
            lines.append("Weighted as in training, the gaps of the domains add up to zero: read them one by one.")
        if min(map(len, seeds.values())) == 1:
            lines.append("With one seed the interval does not say what another seed would give.")
    return lines


def _learning(verdict: Mapping[str, Any]) -> list[str]:
    levels = verdict["convergence"]
    if not levels:
        return []
    rows = [["tokens to an in-domain loss of", *(f"{level['loss']:.2f}" for level in levels)]]
    rows.append([verdict["candidate"], *(readable(level["tokens"]) for level in levels)])
    rows.append([verdict["reference"], *(readable(level["reference"]) for level in levels)])
    rows.append(["ratio", *(f"{level['ratio']:.2f}" for level in levels)])
    return [*markdown(rows), ""]


def _costs(verdict: Mapping[str, Any]) -> list[str]:
    mine, other = verdict["costs"]["candidate"], verdict["costs"]["reference"]
    counts = verdict["parameters"]
    rows = [["", verdict["candidate"], verdict["reference"], "ratio"]]
    rows.append(["parameters", f"{counts['candidate']:,}", f"{counts['reference']:,}", f"{counts['ratio']:.2f}"])
    shares = verdict.get("state_share") or {}
    if any(each is not None for each in shares.values()):
        said = ["none" if shares[side] is None else f"{shares[side]:.1%}" for side in ("candidate", "reference")]
        rows.append(["state, share of a key/value cache", *said, ""])
    for key, label, shown in (
        ("tokens_per_second", "tokens/s, training", "{:,.0f}"),
        ("peak_gib", "peak memory, GiB", "{:.2f}"),
        ("minutes_a_run", "minutes per run", "{:.1f}"),
    ):
        if mine[key] and other[key]:
            rows.append([label, shown.format(mine[key]), shown.format(other[key]), f"{mine[key] / other[key]:.2f}"])
    lines = markdown(rows)
    if mine["hardware"] != other["hardware"]:
        lines += ["", f"Speeds do not compare: {mine['hardware']} and {other['hardware']}."]
    return lines


def _footing(verdict: Mapping[str, Any]) -> list[str]:
    data, costs = verdict["data"], verdict["costs"]
    train = ", ".join(data["train"])
    said = [
        f"Both models were trained on {train} for {readable(data['tokens'])} tokens ({data['tokenizer']} tokenizer), "
        "with the same recipe, order of text and initial embeddings. "
        f"Hardware: {costs['candidate']['hardware']}."
    ]
    commits = {*costs["candidate"]["commits"], *costs["reference"]["commits"]}
    if len(commits) > 1:
        said.append(f"Warning: the runs come from different commits of seqarch: {', '.join(sorted(commits))}.")
    return said
