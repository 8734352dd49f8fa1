"""The verdict: what the finished runs of an exam say about a candidate compared with the reference.

OUT/<size>/<candidate>/verdict.json, verdict.md      the numbers, and the same in words
OUT/<size>/<candidate>/index.html, scatter.png, ...  the report of both models (`seqarch.report`)

The words are Markdown that reads as plain text in a terminal too. `verdict.md.jinja` is their template.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from seqarch.errors import UserError
from seqarch.exam.plan import Entrant, Exam, Rung
from seqarch.exam.request import LIMITS
from seqarch.exam.train import NEAR
from seqarch.report import Comparison, Findings, Gap, compare
from seqarch.report.convergence import Level, convergence
from seqarch.report.costs import Costs, costs
from seqarch.report.draft import Draft
from seqarch.report.roles import HOLD_OUT, OOD, Role
from seqarch.report.tables import budget_rows
from seqarch.runs.files import replaced, write_json, write_text
from seqarch.runs.record import is_finished
from seqarch.runs.tags import IN_DOMAIN, MEAN
from seqarch.tables import markdown, readable

SIMILAR = 0.1
"""Share of parameters by which a candidate may differ from the reference without a warning."""
COSTS = {
    "tokens_per_second": ("tokens/s, training", "{:,.0f}"),
    "peak_gib": ("peak memory, GiB", "{:.2f}"),
    "minutes_a_run": ("minutes per run", "{:.1f}"),
}


@dataclass(frozen=True)
class Floor:
    """The gap of the reference at its second-best rate to itself; smaller gaps may come from a rate."""

    rate: float
    gap: Gap | None = None
    refused: str = ""
    """Why there is no gap."""


@dataclass(frozen=True)
class Data:
    """What both models were trained on."""

    train: Mapping[str, float] | None
    """The domains with their weights."""
    ood: Sequence[str] | None
    tokenizer: str | None
    tokens: int


@dataclass(frozen=True)
class Compared:
    """The finished runs of both models. Mappings have the keys "candidate" and "reference"."""

    conclusion: str
    """The verdict in one sentence, the draft of runs without finished models, or why there is neither."""
    finished: Gap | None
    """The gap between finished models."""
    draft: Draft | None
    """The gap during training."""
    rates: dict[str, list[Rung]]
    floor: Floor | None
    final: dict[str, dict[str, float]]
    """The losses of the last evaluation, by domain."""
    convergence: list[Level]
    costs: dict[str, Costs]
    data: Data


@dataclass(frozen=True)
class Verdict:
    """The verdict on one candidate."""

    candidate: Entrant
    reference: Entrant
    size: str
    folder: Path
    missing: list[dict[str, str]] = field(default_factory=list)
    """The runs that are not finished, each with `run` and `why`."""
    compared: Compared | None = None
    """`None` until both models have a finished run."""

    @property
    def sides(self) -> dict[str, Entrant]:
        return {"candidate": self.candidate, "reference": self.reference}

    def plain(self) -> dict[str, Any]:
        """The verdict as JSON's values; infinite and unknown numbers are `None`."""
        counts = {side: each.parameters for side, each in self.sides.items()}
        values: dict[str, Any] = {
            "candidate": self.candidate.name,
            "reference": self.reference.name,
            "size": self.size,
            "folder": str(self.folder),
            "missing": self.missing,
            "state_share": {side: each.state_share for side, each in self.sides.items()},
            "parameters": {**counts, "ratio": counts["candidate"] / counts["reference"]},
        }
        if (both := self.compared) is not None:
            values |= asdict(both) | {"convergence": [level._asdict() for level in both.convergence]}
            for side, rungs in both.rates.items():
                chosen = [rung.rate in self.sides[side].rates for rung in rungs]
                values["rates"][side] = [{**asdict(one), "chosen": it} for one, it in zip(rungs, chosen, strict=True)]
            if both.finished is not None:
                values["finished"] |= {"settled": both.finished.settled, "word": both.finished.word}
        return json.loads(json.dumps(values), parse_constant=lambda name: None)


def compared(exam: Exam) -> Findings | None:
    """The finished runs of all models, and one at the neighbouring rate; `None` if the reference has none.

    Raises:
        UserError: the runs cannot be compared.
    """
    if not exam.finished(exam.reference):
        return None
    floor = exam.finished(exam.neighbour)[:1] if exam.neighbour else []
    runs = [run for each in exam.entrants for run in exam.finished(each)]
    findings = compare([*runs, *floor], exam.reference.name).findings
    if findings.no_losses:
        raise UserError(findings.no_losses)
    neighbour = exam.neighbour.name if exam.neighbour else None
    return replace(findings, neighbour=neighbour, limits=LIMITS.get(exam.size, ""))


def judge(exam: Exam, candidate: Entrant, failed: Mapping[str, str], findings: Findings | None) -> Verdict:
    """The verdict on one candidate; writes its files, the report too where both models have a finished run.

    `failed` holds the error of each failed run, by run folder; `findings` is what `compared` gives.
    """
    folder = exam.folder / candidate.name
    verdict = Verdict(candidate, exam.reference, exam.size, folder, _missing(exam, candidate, failed))
    if findings is not None and any(group.name == candidate.name for group in findings.groups):
        both = findings.only([each.name for each in (exam.reference, candidate, exam.neighbour) if each])
        Comparison(both).write(folder)
        verdict = replace(verdict, compared=_compared(both, exam, candidate))
    with replaced(folder) as new:
        write_json(new / "verdict.json", verdict.plain())
        write_text(new / "verdict.md", verdict_text(verdict) + "\n")
    return verdict


def _missing(exam: Exam, candidate: Entrant, failed: Mapping[str, str]) -> list[dict[str, str]]:
    """The runs that are not finished, and why."""
    runs = [exam.run(entrant, seed) for entrant in (exam.reference, candidate) for seed in range(exam.seeds)]
    return [{"run": str(run), "why": _why(run, failed)} for run in runs if not is_finished(run)]


def _why(run: Path, failed: Mapping[str, str]) -> str:
    """The error of a run, or of the ladder of its model."""
    above = (why for where, why in failed.items() if where in (str(run), str(run.parent)))
    ladder = (f"its ladder failed: {why}" for where, why in failed.items() if where.startswith(f"{run.parent}/ladder/"))
    return next(above, None) or next(ladder, "not trained")


def _compared(findings: Findings, exam: Exam, candidate: Entrant) -> Compared:
    comparison = findings.comparisons[candidate.name]
    group, reference = comparison.group, findings.reference
    sides = {"candidate": group, "reference": reference}
    facts = reference.runs[0].facts
    return Compared(
        conclusion=comparison.sentence,
        finished=comparison.finished,
        draft=comparison.draft,
        rates={side: list(exam.rungs[each.name]) for side, each in sides.items() if each.name in exam.rungs},
        floor=_floor(findings, exam),
        final={side: each.final_losses() for side, each in sides.items()},
        convergence=convergence(group.evaluations, reference.evaluations),
        costs={side: costs(each) for side, each in sides.items()},
        data=Data(facts.get("train"), facts.get("ood"), facts.get("tokenizer"), min(group.tokens, reference.tokens)),
    )


def _floor(findings: Findings, exam: Exam) -> Floor | None:
    if exam.neighbour is None:
        return None
    name = exam.neighbour.name
    gap = findings.finished.get(name)
    return Floor(exam.neighbour.rate, gap, findings.unfinished.get(name, "" if gap else "it is not trained yet"))


def verdict_text(verdict: Verdict) -> str:
    """The verdict as a page of Markdown."""
    both = verdict.compared
    options: dict[str, Any] = {"verdict": verdict, "similar": SIMILAR, "near": NEAR, "both": both}
    options["ratio"] = verdict.candidate.parameters / verdict.reference.parameters
    if both is not None:
        role = OOD if both.data.ood else HOLD_OUT
        tables = {
            "budgets": budget_rows(both.finished) if both.finished else [],
            "rates": _rate_rows(verdict, both),
            "losses": _loss_rows(verdict, both, role),
            "convergence": _level_rows(verdict, both),
            "costs": _cost_rows(verdict, both),
        }
        options["tables"] = {name: "\n".join(markdown(rows)) for name, rows in tables.items() if rows}
        options["role"] = role
        options["commits"] = sorted({commit for side in both.costs.values() for commit in side.commits})
    return _template().render(options).rstrip()


@functools.cache
def _template() -> Any:
    environment = Environment(loader=PackageLoader("seqarch.exam", "."), trim_blocks=True)
    environment.filters["readable"] = readable
    return environment.get_template("verdict.md.jinja")


def _names(verdict: Verdict) -> list[str]:
    return [each.name for each in verdict.sides.values()]


def _rate_rows(verdict: Verdict, both: Compared) -> list[list[str]]:
    """The learning-rate ladders; another rate makes a gap of the size of the floor."""
    if not both.rates:
        return []
    at = dict(sorted((rung.factor, rung.rate) for rungs in both.rates.values() for rung in rungs))
    rows = [["learning rate", *(f"{rate:g} (shared)" if factor == 1 else f"{rate:g}" for factor, rate in at.items())]]
    for side, rungs in both.rates.items():
        cells = {rung.factor: _rung(rung, rung.rate in verdict.sides[side].rates) for rung in rungs}
        rows.append([verdict.sides[side].name, *(cells.get(factor, "") for factor in at)])
    return rows


def _rung(rung: Rung, chosen: bool) -> str:
    if rung.in_domain == float("inf"):
        return "diverged"
    losses = f"{rung.in_domain:.3f} / {rung.compared:.3f}"
    return f"**{losses}**" if chosen else losses


def _loss_rows(verdict: Verdict, both: Compared, role: Role) -> list[list[str]]:
    """The losses at the end, and the gaps during training."""
    gaps = both.draft.gaps if both.draft else {}
    rows = [["loss, nats per token", *_names(verdict), f"gap during training at equal {role.equal}"]]
    for name, mine in both.final["candidate"].items():
        label = role.inside if name == IN_DOMAIN else f"{role.short}, {'mean' if name == MEAN else name}"
        gap = f"{gaps[name]:+.3f}" if name in gaps else ""
        rows.append([label, f"{mine:.3f}", f"{both.final['reference'][name]:.3f}", gap])
    return rows


def _level_rows(verdict: Verdict, both: Compared) -> list[list[str]]:
    if not both.convergence:
        return []
    candidate, reference = _names(verdict)
    return [
        ["tokens to an in-domain loss of", *(f"{level.loss:.2f}" for level in both.convergence)],
        [candidate, *(readable(level.tokens) for level in both.convergence)],
        [reference, *(readable(level.reference) for level in both.convergence)],
        ["ratio", *(f"{level.ratio:.2f}" for level in both.convergence)],
    ]


def _cost_rows(verdict: Verdict, both: Compared) -> list[list[str]]:
    counts = [each.parameters for each in verdict.sides.values()]
    shares = [each.state_share for each in verdict.sides.values()]
    rows = [["", *_names(verdict), "ratio"]]
    rows.append(["parameters", *(f"{count:,}" for count in counts), f"{counts[0] / counts[1]:.2f}"])
    if any(share is not None for share in shares):
        cells = ["not known" if share is None else f"{share:.1%}" for share in shares]
        rows.append(["state, share of a key/value cache", *cells, ""])
    for key, (label, shown) in COSTS.items():
        mine, other = (getattr(both.costs[side], key) for side in verdict.sides)
        if mine and other:
            rows.append([label, shown.format(mine), shown.format(other), f"{mine / other:.2f}"])
    at = both.finished.headline.effective if both.finished else ()
    if at:
        speeds = [speed for side in verdict.sides if (speed := both.costs[side].tokens_per_second)]
        rows.append(["tokens to equal loss", *map(readable, at), f"{at[0] / at[1]:.2f}"])
        if len(speeds) == 2:
            seconds = [tokens / speed for tokens, speed in zip(at, speeds, strict=True)]
            minutes = [f"{second / 60:.1f}" for second in seconds]
            rows.append(["minutes of training steps to equal loss", *minutes, f"{seconds[0] / seconds[1]:.2f}"])
    return rows
