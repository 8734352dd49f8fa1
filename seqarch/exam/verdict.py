"""The verdict: what the finished runs of an exam say about a candidate compared with the reference.

OUT/<size>/<candidate>/verdict.json, verdict.md      the numbers, and the same in words
OUT/<size>/<candidate>/index.html, scatter.png, ...  the report of both models (`seqarch.report`)
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqarch.errors import UserError
from seqarch.exam.entrants import Entrant, Exam
from seqarch.exam.verdict_text import verdict_text
from seqarch.report import Comparison, Findings, compare
from seqarch.report.convergence import convergence
from seqarch.report.costs import costs
from seqarch.report.findings import ModelGaps
from seqarch.report.finished import FinishedGap
from seqarch.runs.files import replaced, write_json, write_text
from seqarch.runs.record import is_finished

DRAFT = "draft"
"""The size that is too short to settle anything."""


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
    return found


def judge(exam: Exam, candidate: Entrant, failed: Mapping[str, str], found: Findings | None) -> dict[str, Any]:
    """The verdict on one candidate as plain values; writes its files, the report where both models have a finished run.

    `failed` holds the error of each failed run, by run folder; `found` is what `compared` gives.
    """
    entrants = {"candidate": candidate, "reference": exam.reference}
    folder = exam.folder / candidate.name
    verdict: dict[str, Any] = {
        "candidate": candidate.name,
        "reference": exam.reference.name,
        "size": exam.size,
        "folder": str(folder),
        "missing": _missing(exam, candidate, failed),
        "state_share": {side: each.state_share for side, each in entrants.items()},
        "parameters": {side: each.parameters for side, each in entrants.items()}
        | {"ratio": candidate.parameters / exam.reference.parameters},
    }
    if found is not None and exam.finished(candidate):
        both = found.only([each.name for each in (exam.reference, candidate, exam.neighbour) if each])
        Comparison(both).write(folder)
        verdict |= _compared(both, exam, candidate)
    verdict = json.loads(json.dumps(verdict), parse_constant=lambda name: None)  # JSON has no infinity and no nan
    with replaced(folder) as new:
        write_json(new / "verdict.json", verdict)
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


def _compared(found: Findings, exam: Exam, candidate: Entrant) -> dict[str, Any]:
    comparison = found.comparisons[candidate.name]
    group, reference = comparison.group, found.reference
    sides = {"candidate": group, "reference": reference}
    facts = reference.runs[0].facts
    levels = convergence(group.evaluations, reference.evaluations)
    return {
        "seeds": {side: [run.seed for run in each.runs] for side, each in sides.items()},
        "conclusion": _conclusion(comparison, exam.size),
        "finished": _finished(comparison.finished, exam.size),
        "rates": {
            side: [{**dataclasses.asdict(one), "chosen": one.rate == entrant.rate} for one in exam.rungs[entrant.name]]
            for side, entrant in (("candidate", candidate), ("reference", exam.reference))
            if entrant.name in exam.rungs
        },
        "floor": _floor(found, exam),
        "gaps": [dataclasses.asdict(gap) for gap in comparison.gaps],
        "final": {side: each.final_losses() for side, each in sides.items()},
        "convergence": [level._asdict() for level in levels],
        "costs": {side: costs(each) for side, each in sides.items()},
        "data": {**{key: facts.get(key) for key in ("train", "ood", "tokenizer")}, "tokens": reference.runs[0].tokens},
    }


def _conclusion(comparison: ModelGaps, size: str) -> str:
    """The verdict in one sentence; a draft is called neither better nor worse."""
    if not comparison.gaps and comparison.finished is None:
        return f"There is no verdict: {comparison.refusal}."
    if size != DRAFT:
        return comparison.sentence
    gap = comparison.finished.headline.mean if comparison.finished else comparison.gaps[-1].value
    return (
        f"{comparison.group.name}: not settled: {gap:+.3f} nats per token. A draft shows what a model learns first; "
        "for a verdict set --size small."
    )


def _finished(gap: FinishedGap | None, size: str) -> dict[str, Any] | None:
    """The gap between finished models, with what follows from it."""
    return gap and {**gap.plain(), "settled": gap.settled and size != DRAFT}


def _floor(found: Findings, exam: Exam) -> dict[str, Any] | None:
    """The gap of the reference at its second-best rate to itself, at each budget; smaller gaps mean nothing."""
    if exam.neighbour is None:
        return None
    gap = found.finished.get(exam.neighbour.name)
    return {
        "rate": exam.neighbour.rate,
        "budgets": [{"tokens": at.tokens, "mean": at.mean, "domains": at.domains} for at in gap.budgets] if gap else [],
        "refused": found.unfinished.get(exam.neighbour.name, "" if gap else "it is not trained yet"),
    }
