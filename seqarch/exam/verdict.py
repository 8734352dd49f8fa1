"""The verdict: what the finished runs of an exam say about a candidate compared with the reference.

OUT/<size>/<candidate>/verdict.json, verdict.md      the numbers, and the same in words
OUT/<size>/<candidate>/index.html, scatter.png, ...  the report of both models (`seqarch.report`)
OUT/<size>/<candidate>/against_<reference>/          the same for another reference than the default

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
from seqarch.exam.request import ALIASES, LIMITS, Models
from seqarch.exam.train import NEAR
from seqarch.report import Comparison, Findings, Gap, compare
from seqarch.report.costs import Costs, costs
from seqarch.report.draft import Draft, Level, convergence
from seqarch.report.roles import HOLD_OUT, OOD, Role
from seqarch.report.tables import budget_rows
from seqarch.runs.files import replaced, write_json, write_text
from seqarch.runs.folder import is_finished
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


COMPARED = ("conclusion", "finished", "draft", "rates", "floor", "final", "costs")
DATA = ("train", "ood", "tokenizer", "tokens")


@dataclass(frozen=True)
class Verdict:
    """The verdict on one candidate. Mappings have the keys "candidate" and "reference".

    All after `missing` is empty until both models have a finished run.
    """

    candidate: Entrant
    reference: Entrant
    size: str
    folder: Path
    missing: list[dict[str, str]] = field(default_factory=list)
    """The runs that are not finished, each with `run` and `why`."""
    conclusion: str = ""
    """The verdict in one sentence, the draft of runs without finished models, or why there is neither."""
    finished: Gap | None = None
    """The gap between finished models."""
    draft: Draft | None = None
    """The gap during training."""
    rates: dict[str, list[Rung]] = field(default_factory=dict)
    floor: Floor | None = None
    final: dict[str, dict[str, float]] = field(default_factory=dict)
    """The losses of the last evaluation, by domain."""
    convergence: list[Level] = field(default_factory=list)
    costs: dict[str, Costs] = field(default_factory=dict)
    train: Mapping[str, float] | None = None
    """The training domains with their weights."""
    ood: Sequence[str] | None = None
    tokenizer: str | None = None
    tokens: int = 0
    """What both models were trained on."""

    @property
    def sides(self) -> dict[str, Entrant]:
        return {"candidate": self.candidate, "reference": self.reference}

    @property
    def ratio(self) -> float:
        """The candidate's parameters over the reference's."""
        return self.candidate.parameters / self.reference.parameters

    def plain(self) -> dict[str, Any]:
        """The verdict as JSON's values; infinite and unknown numbers are `None`."""
        values: dict[str, Any] = {
            "candidate": self.candidate.name,
            "reference": self.reference.name,
            "size": self.size,
            "folder": str(self.folder),
            "missing": self.missing,
            "state_share": {side: each.state_share for side, each in self.sides.items()},
            "parameters": {side: each.parameters for side, each in self.sides.items()} | {"ratio": self.ratio},
        }
        if self.conclusion:
            every = asdict(self)
            values |= {name: every[name] for name in COMPARED}
            values |= {"convergence": [level._asdict() for level in self.convergence]}
            values |= {"data": {name: every[name] for name in DATA}}
            for side, rungs in self.rates.items():
                chosen = [rung.rate in self.sides[side].rates for rung in rungs]
                values["rates"][side] = [{**asdict(one), "chosen": it} for one, it in zip(rungs, chosen, strict=True)]
            if self.finished is not None:
                values["finished"] |= {"settled": self.finished.settled, "word": self.finished.word}
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
    standard = exam.reference.name == ALIASES[Models.against]
    folder = exam.folder / candidate.name / ("" if standard else f"against_{exam.reference.name}")
    verdict = Verdict(candidate, exam.reference, exam.size, folder, _missing(exam, candidate, failed))
    if findings is not None and any(group.name == candidate.name for group in findings.groups):
        both = findings.only([each.name for each in (exam.reference, candidate, exam.neighbour) if each])
        Comparison(both).write(folder)
        verdict = _compared(verdict, both, exam)
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


def _compared(verdict: Verdict, findings: Findings, exam: Exam) -> Verdict:
    """The verdict with what the finished runs of both models say."""
    comparison = findings.comparisons[verdict.candidate.name]
    group, reference = comparison.group, findings.reference
    sides = {"candidate": group, "reference": reference}
    return replace(
        verdict,
        conclusion=comparison.sentence,
        finished=comparison.finished,
        draft=comparison.draft,
        rates={side: list(exam.rungs[each.name]) for side, each in sides.items() if each.name in exam.rungs},
        floor=_floor(findings, exam),
        final={side: each.final_losses() for side, each in sides.items()},
        convergence=convergence(group.evaluations, reference.evaluations),
        costs={side: costs(each) for side, each in sides.items()},
        **{name: reference.runs[0].facts.get(name) for name in ("train", "ood", "tokenizer")},
        tokens=min(group.tokens, reference.tokens),
    )


def _floor(findings: Findings, exam: Exam) -> Floor | None:
    if exam.neighbour is None:
        return None
    name = exam.neighbour.name
    gap = findings.finished.get(name)
    return Floor(exam.neighbour.rate, gap, findings.unfinished.get(name, "" if gap else "it is not trained yet"))


def verdict_text(verdict: Verdict) -> str:
    """The verdict as a page of Markdown."""
    role, rows = OOD if verdict.ood else HOLD_OUT, {}
    if verdict.conclusion:
        rows = {"rates": _rate_rows(verdict), "losses": _loss_rows(verdict, role), "costs": _cost_rows(verdict)}
        rows |= {"budgets": budget_rows(verdict.finished) if verdict.finished else []}
        rows |= {"convergence": _level_rows(verdict)}
    tables = {name: "\n".join(markdown(each)) for name, each in rows.items() if each}
    commits = sorted({commit for side in verdict.costs.values() for commit in side.commits})
    facts = {"similar": SIMILAR, "near": NEAR, "role": role, "tables": tables, "commits": commits}
    return _template().render(verdict=verdict, **facts).rstrip()


@functools.cache
def _template() -> Any:
    environment = Environment(loader=PackageLoader("seqarch.exam", "."), trim_blocks=True)
    environment.filters["readable"] = readable
    return environment.get_template("verdict.md.jinja")


def _names(verdict: Verdict) -> list[str]:
    return [each.name for each in verdict.sides.values()]


def _rate_rows(verdict: Verdict) -> list[list[str]]:
    """The learning-rate ladders; another rate makes a gap of the size of the floor."""
    if not verdict.rates:
        return []
    at = dict(sorted((rung.factor, rung.rate) for rungs in verdict.rates.values() for rung in rungs))
    rows = [["learning rate", *(f"{rate:g} (shared)" if factor == 1 else f"{rate:g}" for factor, rate in at.items())]]
    for side, rungs in verdict.rates.items():
        cells = {rung.factor: _rung(rung, rung.rate in verdict.sides[side].rates) for rung in rungs}
        rows.append([verdict.sides[side].name, *(cells.get(factor, "") for factor in at)])
    return rows


def _rung(rung: Rung, chosen: bool) -> str:
    if rung.in_domain == float("inf"):
        return "diverged"
    losses = f"{rung.in_domain:.3f} / {rung.compared:.3f}"
    return f"**{losses}**" if chosen else losses


def _loss_rows(verdict: Verdict, role: Role) -> list[list[str]]:
    """The losses at the end, and the gaps during training."""
    gaps = verdict.draft.gaps if verdict.draft else {}
    rows = [["loss, nats per token", *_names(verdict), f"gap during training at equal {role.equal}"]]
    for name, mine in verdict.final["candidate"].items():
        label = role.inside if name == IN_DOMAIN else f"{role.short}, {'mean' if name == MEAN else name}"
        gap = f"{gaps[name]:+.3f}" if name in gaps else ""
        rows.append([label, f"{mine:.3f}", f"{verdict.final['reference'][name]:.3f}", gap])
    return rows


def _level_rows(verdict: Verdict) -> list[list[str]]:
    if not verdict.convergence:
        return []
    candidate, reference = _names(verdict)
    return [
        ["tokens to an in-domain loss of", *(f"{level.loss:.2f}" for level in verdict.convergence)],
        [candidate, *(readable(level.tokens) for level in verdict.convergence)],
        [reference, *(readable(level.reference) for level in verdict.convergence)],
        ["ratio", *(f"{level.ratio:.2f}" for level in verdict.convergence)],
    ]


def _cost_rows(verdict: Verdict) -> list[list[str]]:
    counts = [each.parameters for each in verdict.sides.values()]
    shares = [each.state_share for each in verdict.sides.values()]
    rows = [["", *_names(verdict), "ratio"]]
    rows.append(["parameters", *(f"{count:,}" for count in counts), f"{counts[0] / counts[1]:.2f}"])
    if any(share is not None for share in shares):
        cells = ["not known" if share is None else f"{share:.1%}" for share in shares]
        rows.append(["state, share of a key/value cache", *cells, ""])
    for key, (label, shown) in COSTS.items():
        mine, other = (getattr(verdict.costs[side], key) for side in verdict.sides)
        if mine and other:
            rows.append([label, shown.format(mine), shown.format(other), f"{mine / other:.2f}"])
    at = verdict.finished.headline.effective if verdict.finished else ()
    if at:
        speeds = [speed for side in verdict.sides if (speed := verdict.costs[side].tokens_per_second)]
        rows.append(["tokens to equal loss", *map(readable, at), f"{at[0] / at[1]:.2f}"])
        if len(speeds) == 2:
            seconds = [tokens / speed for tokens, speed in zip(at, speeds, strict=True)]
            minutes = [f"{second / 60:.1f}" for second in seconds]
            rows.append(["minutes of training steps to equal loss", *minutes, f"{seconds[0] / seconds[1]:.2f}"])
    return rows
