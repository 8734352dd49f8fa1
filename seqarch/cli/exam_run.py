"""Running an exam from the command line: check every model, train, judge, say what came out."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from seqarch.cli import exam_worker
from seqarch.cli.exam import check, own_code, with_root
from seqarch.errors import UserError
from seqarch.exam.conduct import Entrant, Exam, conduct
from seqarch.exam.data import check_domains, checksums, find_shards
from seqarch.exam.derive import Recipe, Size
from seqarch.exam.verdict import judge, report_all
from seqarch.exam.words import text


def run_exam(args: Namespace, size: Size, reference: tuple[str, Recipe], candidates: list[tuple[str, Recipe]]) -> None:
    """Make the exam, conduct it and print the verdicts.

    Raises:
        UserError: what is wrong, before anything is trained; or which runs failed, after the others are judged.
    """
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    exam = _prepare(args, size, reference, candidates)
    for entrant in exam.entrants:
        print(f"{entrant.name}: {entrant.parameters:,} parameters")
    try:
        failed = conduct(exam, exam_worker.work, progress=sys.stdout.isatty())
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", flush=True)
        raise
    verdicts = [judge(exam, candidate, failed) for candidate in exam.candidates]
    for verdict in verdicts:
        print(f"\n{text(verdict)}\n\nwrote {verdict['folder']}/verdict.md, verdict.json, index.html, scatter.png")
    if len(verdicts) > 1 and (page := report_all(exam)) is not None:
        print(f"\nall models together: {page}")
    if failed:
        first, why = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(f"{first}{more} not finished ({why}); the same command makes what is missing")


def _prepare(args: Namespace, size: Size, reference: tuple[str, Recipe], candidates: list[tuple[str, Recipe]]) -> Exam:
    """The exam, with every model built once without memory and every domain opened."""
    data = size.recipe["data"]
    train, ood = list(data["train"]), list(data["ood"])
    check_domains(train, ood)
    root = str(data["root"])
    if args.data is not None:
        tokenizer = "byte" if size.name == "tiny" else "mixtral"
        root = str(find_shards(Path(args.data), train, ood, tokenizer, Path(args.out) / "shards"))
    checked: list[tuple[str, Recipe, int, Any]] = []
    for name, recipe in (reference, *candidates):
        placed = with_root(recipe, root)
        checked.append((name, placed, *check(name, placed)))
    checked[0][3].prepare_data()
    checked[0][3].evaluation_sets()
    entrants = [Entrant(name, recipe, parameters, own_code(recipe)) for name, recipe, parameters, _ in checked]
    folder = Path(args.out) / size.name
    return Exam(folder, size.name, entrants[0], entrants[1:], args.seeds, checksums(root, [*train, *ood]))
