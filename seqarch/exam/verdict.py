"""The verdict: what the finished runs of an exam say about a candidate beside the reference.

OUT/<size>/<candidate>/verdict.json, verdict.md      the numbers, and the same in words
OUT/<size>/<candidate>/index.html, scatter.png, ...  the report of both models (`seqarch.report`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.exam.conduct import Entrant, Exam
from seqarch.exam.words import text
from seqarch.report import report
from seqarch.report.convergence import convergence
from seqarch.report.costs import costs
from seqarch.report.runs import Group, load_groups
from seqarch.report.tables import compare
from seqarch.report.tables import verdict as sentence
from seqarch.runs.files import write_json, write_text


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
        runs = [run for side in finished for run in side]
        report(runs, exam.folder / candidate.name, exam.reference.name)
        reference, group = load_groups(runs)
        verdict |= _compared(group, reference)
    folder = exam.folder / candidate.name
    write_json(folder / "verdict.json", verdict)
    write_text(folder / "verdict.md", text(verdict) + "\n")
    return verdict


def _missing(exam: Exam, candidate: Entrant, failed: Mapping[str, str]) -> list[dict[str, str]]:
    """The runs that are not finished, and why."""
    runs = [exam.run(entrant, seed) for entrant in (exam.reference, candidate) for seed in range(exam.seeds)]
    there = {run for entrant in (exam.reference, candidate) for run in exam.finished(entrant)}
    return [{"run": str(run), "why": failed.get(str(run), "not trained")} for run in runs if run not in there]


def _compared(group: Group, reference: Group) -> dict[str, Any]:
    (comparison,) = compare([reference, group], reference)
    overall = comparison.overall
    return {
        "seeds": {"candidate": _seeds(group), "reference": _seeds(reference)},
        "conclusion": sentence(overall, group) if overall else f"There is no verdict: {comparison.refusal}.",
        "gaps": [dataclasses.asdict(gap) for gap in comparison.gaps],
        "final": {"candidate": _final(group), "reference": _final(reference)},
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


def _seeds(group: Group) -> list[int]:
    return [run.seed for run in group.runs]


def _final(group: Group) -> dict[str, float]:
    """The losses of the last evaluation, averaged over the seeds, nats a token."""
    last = [one.at(np.array([-1])) for one in group.evaluations]
    ood = {name: float(np.mean([one.with_mean()[name][0] for one in last])) for name in last[0].with_mean()}
    return {"in_domain": float(np.mean([one.in_domain[0] for one in last])), **ood}


def report_all(exam: Exam) -> Path | None:
    """The report of the reference and all candidates together, `None` where fewer than two have a finished run."""
    finished = [exam.finished(entrant) for entrant in exam.entrants]
    if not finished[0] or sum(map(bool, finished)) < 2:
        return None
    return report([run for side in finished for run in side], exam.folder / "report", exam.reference.name)[0]
