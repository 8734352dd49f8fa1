"""The verdict: what the finished runs of an exam say about a candidate beside the reference.

OUT/<size>/<candidate>/verdict.json, verdict.md      the numbers, and the same in words
OUT/<size>/<candidate>/index.html, scatter.png, ...  the report of both models (`seqarch.report`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqarch.exam.conduct import Entrant, Exam
from seqarch.exam.verdict_text import verdict_text
from seqarch.report import Findings, Group, compare, report
from seqarch.report.convergence import convergence
from seqarch.report.costs import costs
from seqarch.report.findings import ModelGaps
from seqarch.report.finished import FinishedGap
from seqarch.runs.files import write_json, write_text

DRAFT = "draft"
"""The size that is too short to settle anything."""


def judge(exam: Exam, candidate: Entrant, failed: Mapping[str, str]) -> dict[str, Any]:
    """The verdict on one candidate as plain values; writes its files where both models have a finished run.

    Args:
        exam: the exam.
        candidate: one of its candidates.
        failed: what went wrong, by run folder.
    """
    finished = [exam.finished(entrant) for entrant in (exam.reference, candidate)]
    verdict: dict[str, Any] = {
        "candidate": candidate.name,
        "reference": exam.reference.name,
        "size": exam.size,
        "folder": str(exam.folder / candidate.name),
        "missing": _missing(exam, candidate, failed),
        "parameters": {
            "candidate": candidate.parameters,
            "reference": exam.reference.parameters,
            "ratio": candidate.parameters / exam.reference.parameters,
        },
    }
    if all(finished):
        comparison = compare([run for side in finished for run in side], exam.reference.name)
        comparison.write(exam.folder / candidate.name)
        verdict |= _compared(comparison.found, exam.size)
    folder = exam.folder / candidate.name
    write_json(folder / "verdict.json", verdict)
    write_text(folder / "verdict.md", verdict_text(verdict) + "\n")
    return verdict


def _missing(exam: Exam, candidate: Entrant, failed: Mapping[str, str]) -> list[dict[str, str]]:
    """The runs that are not finished, and why."""
    runs = [exam.run(entrant, seed) for entrant in (exam.reference, candidate) for seed in range(exam.seeds)]
    there = {run for entrant in (exam.reference, candidate) for run in exam.finished(entrant)}
    return [{"run": str(run), "why": failed.get(str(run), "not trained")} for run in runs if run not in there]


def _compared(found: Findings, size: str) -> dict[str, Any]:
    reference, (group,) = found.reference, found.others
    comparison = found.comparisons[group.name]
    return {
        "seeds": {"candidate": _seeds(group), "reference": _seeds(reference)},
        "conclusion": _conclusion(comparison, size),
        "finished": _finished(comparison.finished, size),
        "gaps": [dataclasses.asdict(gap) for gap in comparison.gaps],
        "final": {"candidate": group.final_losses(), "reference": reference.final_losses()},
        "convergence": [
            {**dataclasses.asdict(level), "ratio": level.ratio}
            for level in convergence(group.evaluations, reference.evaluations)
        ],
        "costs": {"candidate": dataclasses.asdict(costs(group)), "reference": dataclasses.asdict(costs(reference))},
        "data": {
            "train": reference.runs[0].facts.get("train"),
            "ood": reference.runs[0].facts.get("ood"),
            "tokenizer": reference.runs[0].facts.get("tokenizer"),
            "tokens": reference.runs[0].tokens,
        },
    }


def _conclusion(comparison: ModelGaps, size: str) -> str:
    """What the verdict comes to, in a sentence; a draft is called neither better nor worse."""
    if not comparison.has_gap:
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
    if gap is None:
        return None
    return {**dataclasses.asdict(gap), "slope": gap.slope, "settled": gap.settled and size != DRAFT}


def _seeds(group: Group) -> list[int]:
    return [run.seed for run in group.runs]


def report_all(exam: Exam) -> Path | None:
    """The report of the reference and all candidates together, `None` where fewer than two have a finished run."""
    finished = [exam.finished(entrant) for entrant in exam.entrants]
    if not finished[0] or sum(map(bool, finished)) < 2:
        return None
    return report([run for side in finished for run in side], exam.folder / "report", exam.reference.name)[0]
