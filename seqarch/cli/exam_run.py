"""Running an exam from the command line: check every model, train, judge, say what came out."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from seqarch.cli import exam_worker
from seqarch.cli.exam_models import Checked, check, find_model, load_size, with_root
from seqarch.data.tokenizers import Tokenizer
from seqarch.errors import UserError, check_counts
from seqarch.exam.code import code_digest
from seqarch.exam.conduct import Entrant, Exam, conduct
from seqarch.exam.data import check_domains, checksums, find_shards
from seqarch.exam.derive import Recipe, Size
from seqarch.exam.verdict import judge, report_all
from seqarch.exam.verdict_text import verdict_text
from seqarch.exam.worker import VISIBLE


def run_exam(args: Namespace, options: dict[str, str]) -> None:
    """Make the exam, conduct it and print the verdicts.

    Args:
        args: of the command line.
        options: those of the one mixer that is examined.

    Raises:
        UserError: what is wrong, before anything is trained; or which runs failed, after the others are judged.
    """
    size = load_size(args.size, args.options)
    reference = find_model(size, args.against, {})
    candidates = [find_model(size, name, options) for name in args.mixer]
    names = [name for name, _ in (reference, *candidates)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"'{twice}' is named twice, so it would be compared with itself: name another --mixer or --against"
        )
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    exam = _prepare(args, size, reference, candidates)
    gpus = share_gpus(size.recipe["trainer"], args.workers)
    for entrant in exam.entrants:
        print(f"{entrant.name}: {entrant.parameters:,} parameters")
    try:
        failed = conduct(exam, exam_worker.work, gpus=gpus, progress=sys.stdout.isatty() and len(gpus) == 1)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", flush=True)
        raise
    verdicts = [judge(exam, candidate, failed) for candidate in exam.candidates]
    for verdict in verdicts:
        figures = ", index.html, scatter.png" if "final" in verdict else ""
        print(f"\n{verdict_text(verdict)}\n\nwrote {verdict['folder']}/verdict.md, verdict.json{figures}")
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
    checked: list[tuple[str, Recipe, Checked]] = []
    for name, recipe in (reference, *candidates):
        placed = with_root(recipe, root)
        checked.append((name, placed, check(name, placed, args.allow_code)))
    texts = checked[0][2].data
    texts.prepare_data()
    texts.evaluation_sets()
    _check_tokenizer(texts.tokenizer, size)
    entrants = [Entrant(name, recipe, it.parameters, code_digest(it.packages)) for name, recipe, it in checked]
    folder = Path(args.out) / size.name
    return Exam(
        folder,
        size.name,
        entrants[0],
        entrants[1:],
        args.seeds,
        checksums(root, [*train, *ood]),
        tuple(args.allow_code),
    )


def _check_tokenizer(tokenizer: Tokenizer, size: Size) -> None:
    """Raise `UserError` where the data's tokenizer has more entries than the models of this size."""
    vocab_size = size.model["vocab_size"]
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the data's tokenizer '{tokenizer.name}' has {tokenizer.vocab_size:,} entries and models of size "
            f"{size.name} have {vocab_size:,}: prepare the data with another tokenizer, or take another --size"
        )


def share_gpus(trainer: Mapping[str, Any], workers: int | None) -> list[str | None]:
    """For each run that is made at the same time the GPUs that it sees; `None`: all that there are.

    Args:
        trainer: the recipe's section of that name.
        workers: how many runs are made at the same time, `None`: as many as there are GPUs for, on a CPU one.

    Raises:
        UserError: there are too few GPUs.
    """
    check_counts(**{"--workers": workers})
    if trainer.get("accelerator") not in ("gpu", "cuda"):
        return [None] * (workers or 1)
    named = os.environ.get(VISIBLE)
    gpus = named.split(",") if named else [str(each) for each in range(torch.cuda.device_count())]
    devices = trainer.get("devices", 1)
    if not isinstance(devices, int) or devices < 1:  # such as "auto"
        devices = len(gpus)
    most = len(gpus) // devices
    if workers is not None and workers > most:
        raise UserError(
            f"--workers is {workers}, but PyTorch sees {len(gpus)} GPUs and a run takes {devices}: at most {most}"
        )
    count = workers or most
    return [",".join(gpus[n * devices : (n + 1) * devices]) for n in range(count)]
