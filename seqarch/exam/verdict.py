"""The verdict: what the finished runs of an exam say about a candidate compared with the reference.

OUT/<size>/<candidate>/verdict.json, verdict.md      the numbers, and the same in words
OUT/<size>/<candidate>/index.html, scatter.png, ...  the report of both models (`seqarch.report`)
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from seqarch.errors import UserError
from seqarch.exam.entrants import Entrant, Exam, Rung
from seqarch.exam.verdict_text import verdict_text
from seqarch.report import Comparison, Findings, Gap, compare
from seqarch.report.convergence import Level, convergence
from seqarch.report.costs import costs
from seqarch.report.draft import Draft
from seqarch.runs.files import replaced, write_json, write_text
from seqarch.runs.record import is_finished

LIMITS = {
    "tiny": "A tiny exam shows only large effects and settles nothing",
    "draft": "A draft shows what a model learns first and settles nothing",
}
"""What the sizes that are too short to settle anything can show."""


@dataclass(frozen=True)
class Floor:
    """The gap of the reference at its second-best rate to itself; smaller gaps may come from a rate."""

    rate: float
    gap: Gap | None = None
    refused: str = ""
    """Why there is no gap."""


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
    costs: dict[str, dict[str, Any]]
    data: dict[str, Any]


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
    found = compare([*runs, *floor], exam.reference.name).found
    if found.no_losses:
        raise UserError(found.no_losses)
    neighbour = exam.neighbour.name if exam.neighbour else None
    return replace(found, neighbour=neighbour, limits=LIMITS.get(exam.size, ""))


def judge(exam: Exam, candidate: Entrant, failed: Mapping[str, str], found: Findings | None) -> Verdict:
    """The verdict on one candidate; writes its files, the report too where both models have a finished run.

    `failed` holds the error of each failed run, by run folder; `found` is what `compared` gives.
    """
    folder = exam.folder / candidate.name
    verdict = Verdict(candidate, exam.reference, exam.size, folder, _missing(exam, candidate, failed))
    if found is not None and exam.finished(candidate):
        both = found.only([each.name for each in (exam.reference, candidate, exam.neighbour) if each])
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


def _compared(found: Findings, exam: Exam, candidate: Entrant) -> Compared:
    comparison = found.comparisons[candidate.name]
    group, reference = comparison.group, found.reference
    sides = {"candidate": group, "reference": reference}
    facts = reference.runs[0].facts
    return Compared(
        conclusion=comparison.sentence,
        finished=comparison.finished,
        draft=comparison.draft,
        rates={side: list(exam.rungs[each.name]) for side, each in sides.items() if each.name in exam.rungs},
        floor=_floor(found, exam),
        final={side: each.final_losses() for side, each in sides.items()},
        convergence=convergence(group.evaluations, reference.evaluations),
        costs={side: costs(each) for side, each in sides.items()},
        data={**{key: facts.get(key) for key in ("train", "ood", "tokenizer")}, "tokens": reference.runs[0].tokens},
    )


def _floor(found: Findings, exam: Exam) -> Floor | None:
    if exam.neighbour is None:
        return None
    name = exam.neighbour.name
    gap = found.finished.get(name)
    return Floor(exam.neighbour.rate, gap, found.unfinished.get(name, "" if gap else "it is not trained yet"))
