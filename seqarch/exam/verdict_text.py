"""A verdict in words: Markdown that reads as plain text in a terminal too. `verdict.md.jinja` is its template."""

import functools
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader

from seqarch.exam.entrants import Rung
from seqarch.exam.ladder import NEAR
from seqarch.report.roles import HOLD_OUT, OOD, Role
from seqarch.report.tables import budget_rows
from seqarch.runs.tags import IN_DOMAIN, MEAN
from seqarch.tables import markdown, readable

if TYPE_CHECKING:
    from seqarch.exam.verdict import Compared, Verdict

SIMILAR = 0.1
"""Share of parameters by which a candidate may differ from the reference without a warning."""
COSTS = {
    "tokens_per_second": ("tokens/s, training", "{:,.0f}"),
    "peak_gib": ("peak memory, GiB", "{:.2f}"),
    "minutes_a_run": ("minutes per run", "{:.1f}"),
}


def verdict_text(verdict: "Verdict") -> str:
    """The verdict as a page of Markdown."""
    both = verdict.compared
    options: dict[str, Any] = {"verdict": verdict, "similar": SIMILAR, "near": NEAR, "both": both}
    options["ratio"] = verdict.candidate.parameters / verdict.reference.parameters
    if both is not None:
        role = OOD if both.data["ood"] else HOLD_OUT
        tables = {
            "budgets": budget_rows(both.finished) if both.finished else [],
            "rates": _rate_rows(verdict, both),
            "losses": _loss_rows(verdict, both, role),
            "convergence": _level_rows(verdict, both),
            "costs": _cost_rows(verdict, both),
        }
        options["tables"] = {name: "\n".join(markdown(rows)) for name, rows in tables.items() if rows}
        options["role"] = role
        options["commits"] = sorted({each for side in both.costs.values() for each in side["commits"]})
    return _template().render(options).rstrip()


@functools.cache
def _template() -> Any:
    environment = Environment(loader=PackageLoader("seqarch.exam", "."), trim_blocks=True)
    environment.filters["readable"] = readable
    return environment.get_template("verdict.md.jinja")


def _names(verdict: "Verdict") -> list[str]:
    return [each.name for each in verdict.sides.values()]


def _rate_rows(verdict: "Verdict", both: "Compared") -> list[list[str]]:
    """The learning-rate ladders; another rate makes a gap of the size of the floor."""
    if not both.rates:
        return []
    at = dict(sorted((rung.factor, rung.rate) for rungs in both.rates.values() for rung in rungs))
    rows = [["learning rate", *(f"{rate:g}" + " (shared)" * (factor == 1) for factor, rate in at.items())]]
    for side, rungs in both.rates.items():
        cells = {rung.factor: _rung(rung, rung.rate in verdict.sides[side].rates) for rung in rungs}
        rows.append([verdict.sides[side].name, *(cells.get(factor, "") for factor in at)])
    return rows


def _rung(rung: Rung, chosen: bool) -> str:
    if rung.in_domain == float("inf"):
        return "diverged"
    losses = f"{rung.in_domain:.3f} / {rung.compared:.3f}"
    return f"**{losses}**" if chosen else losses


def _loss_rows(verdict: "Verdict", both: "Compared", role: Role) -> list[list[str]]:
    """The losses at the end, and the gaps during training."""
    gaps = both.draft.gaps if both.draft else {}
    rows = [["loss, nats per token", *_names(verdict), f"gap during training at equal {role.equal}"]]
    for name, mine in both.final["candidate"].items():
        label = role.inside if name == IN_DOMAIN else f"{role.short}, {'mean' if name == MEAN else name}"
        gap = f"{gaps[name]:+.3f}" if name in gaps else ""
        rows.append([label, f"{mine:.3f}", f"{both.final['reference'][name]:.3f}", gap])
    return rows


def _level_rows(verdict: "Verdict", both: "Compared") -> list[list[str]]:
    if not both.convergence:
        return []
    candidate, reference = _names(verdict)
    return [
        ["tokens to an in-domain loss of", *(f"{level.loss:.2f}" for level in both.convergence)],
        [candidate, *(readable(level.tokens) for level in both.convergence)],
        [reference, *(readable(level.reference) for level in both.convergence)],
        ["ratio", *(f"{level.ratio:.2f}" for level in both.convergence)],
    ]


def _cost_rows(verdict: "Verdict", both: "Compared") -> list[list[str]]:
    counts = [each.parameters for each in verdict.sides.values()]
    shares = [each.state_share for each in verdict.sides.values()]
    rows = [["", *_names(verdict), "ratio"]]
    rows.append(["parameters", *(f"{count:,}" for count in counts), f"{counts[0] / counts[1]:.2f}"])
    if any(share is not None for share in shares):
        cells = ["not known" if share is None else f"{share:.1%}" for share in shares]
        rows.append(["state, share of a key/value cache", *cells, ""])
    for key, (label, shown) in COSTS.items():
        mine, other = (both.costs[side][key] for side in verdict.sides)
        if mine and other:
            rows.append([label, shown.format(mine), shown.format(other), f"{mine / other:.2f}"])
    at = both.finished.headline.effective if both.finished else ()
    if at:
        speeds = [both.costs[side]["tokens_per_second"] for side in verdict.sides]
        rows.append(["tokens to equal loss", *map(readable, at), f"{at[0] / at[1]:.2f}"])
        if all(speeds):
            seconds = [tokens / speed for tokens, speed in zip(at, speeds, strict=True)]
            minutes = [f"{each / 60:.1f}" for each in seconds]
            rows.append(["minutes of training steps to equal loss", *minutes, f"{seconds[0] / seconds[1]:.2f}"])
    return rows
