"""A verdict in words: Markdown that reads as plain text in a terminal too. `verdict.md.jinja` is its template."""

import functools
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader

from seqarch.report.gap import Gap
from seqarch.report.roles import HOLD_OUT, OOD, Role
from seqarch.report.tables import budget_rows
from seqarch.runs.tags import IN_DOMAIN, MEAN
from seqarch.tables import markdown, readable

SIMILAR = 0.1
"""Share of parameters by which a candidate may differ from the reference without a warning."""
SIDES = ("candidate", "reference")
COSTS = {
    "tokens_per_second": ("tokens/s, training", "{:,.0f}"),
    "peak_gib": ("peak memory, GiB", "{:.2f}"),
    "minutes_a_run": ("minutes per run", "{:.1f}"),
}


def verdict_text(verdict: Mapping[str, Any]) -> str:
    """The verdict as a page of Markdown."""
    options: dict[str, Any] = {}
    if "final" in verdict:
        role = OOD if verdict["data"]["ood"] else HOLD_OUT
        tables = {
            "budgets": budget_rows(verdict["finished"]) if verdict.get("finished") else [],
            "rates": _rate_rows(verdict, verdict.get("rates") or {}),
            "losses": _loss_rows(verdict, role),
            "convergence": _level_rows(verdict),
            "costs": _cost_rows(verdict),
        }
        options["tables"] = {name: "\n".join(markdown(rows)) for name, rows in tables.items() if rows}
        options["role"] = role
        options["commits"] = sorted({each for side in SIDES for each in verdict["costs"][side]["commits"]})
    return _template().render({"similar": SIMILAR, **verdict, **options}).rstrip()


@functools.cache
def _template() -> Any:
    environment = Environment(loader=PackageLoader("seqarch.exam", "."), trim_blocks=True)
    environment.filters["readable"] = readable
    return environment.get_template("verdict.md.jinja")


def _rate_rows(verdict: Mapping[str, Any], rates: Mapping[str, Any]) -> list[list[str]]:
    """The learning-rate ladders; another rate makes a gap of the size of the floor."""
    at = dict(sorted((rung["factor"], rung["rate"]) for rungs in rates.values() for rung in rungs))
    rows = [["learning rate", *(f"{rate:g}" + " (shared)" * (factor == 1) for factor, rate in at.items())]]
    for side, rungs in rates.items():
        found = {rung["factor"]: _rung(rung) for rung in rungs}
        rows.append([verdict[side], *(found.get(factor, "") for factor in at)])
    return rows


def _rung(rung: Mapping[str, Any]) -> str:
    if rung["in_domain"] is None:
        return "diverged"
    said = f"{rung['in_domain']:.3f} / {rung['compared']:.3f}"
    return f"**{said}**" if rung["chosen"] else said


def _loss_rows(verdict: Mapping[str, Any], role: Role) -> list[list[str]]:
    """The gaps, and the losses at the end."""
    gaps = {gap["domain"]: str(Gap(**gap)) for gap in verdict["gaps"]}
    rows = [["loss, nats per token", *(verdict[side] for side in SIDES), f"gap at equal {role.equal}"]]
    for name, mine in verdict["final"]["candidate"].items():
        label = role.inside if name == IN_DOMAIN else f"{role.short}, {'mean' if name == MEAN else name}"
        rows.append([label, f"{mine:.3f}", f"{verdict['final']['reference'][name]:.3f}", gaps.get(name, "")])
    return rows


def _level_rows(verdict: Mapping[str, Any]) -> list[list[str]]:
    levels = verdict["convergence"]
    return [
        ["tokens to an in-domain loss of", *(f"{level['loss']:.2f}" for level in levels)],
        [verdict["candidate"], *(readable(level["tokens"]) for level in levels)],
        [verdict["reference"], *(readable(level["reference"]) for level in levels)],
        ["ratio", *(f"{level['ratio']:.2f}" for level in levels)],
    ]


def _cost_rows(verdict: Mapping[str, Any]) -> list[list[str]]:
    counts, shares = verdict["parameters"], verdict.get("state_share") or {}
    rows = [["", *(verdict[side] for side in SIDES), "ratio"]]
    rows.append(["parameters", *(f"{counts[side]:,}" for side in SIDES), f"{counts['ratio']:.2f}"])
    if any(each is not None for each in shares.values()):
        said = ["not known" if shares[side] is None else f"{shares[side]:.1%}" for side in SIDES]
        rows.append(["state, share of a key/value cache", *said, ""])
    for key, (label, shown) in COSTS.items():
        mine, other = (verdict["costs"][side][key] for side in SIDES)
        if mine and other:
            rows.append([label, shown.format(mine), shown.format(other), f"{mine / other:.2f}"])
    return rows
