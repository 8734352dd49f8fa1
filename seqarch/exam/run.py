"""An exam from beginning to end: check every model, train, judge, print the verdicts."""

import dataclasses
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from seqarch.errors import UserError, say
from seqarch.exam.code import code_digest
from seqarch.exam.conduct import conduct
from seqarch.exam.data import checksums, find_shards
from seqarch.exam.derive import Recipe, Size
from seqarch.exam.entrants import Entrant, Exam, Request
from seqarch.exam.models import check, find_model, load_size, mixer_options
from seqarch.exam.verdict import LIMITS, compared, judge
from seqarch.exam.verdict_text import verdict_text
from seqarch.exam.work import work
from seqarch.exam.worker import VISIBLE
from seqarch.report import Comparison


def run_exam(asked: Request) -> None:
    """Make the exam, conduct it and print the verdicts.

    Raises:
        UserError: what is wrong, before anything is trained; or which runs failed, after the others are judged.
    """
    options = mixer_options(asked.mixers, asked.options)
    size = load_size(asked.size, asked.options)
    if asked.options:
        check(f"size {asked.size}", size.recipe, asked.allow_code)  # models are derived from numbers that it gives
    reference = find_model(size, asked.against, {}, asked.allow_code)
    candidates = [find_model(size, name, options, asked.allow_code) for name in asked.mixers]
    for (one, recipe), (other, same) in itertools.combinations((reference, *candidates), 2):
        if one == other or recipe == same:
            again = "named twice" if one == other else f"the same model as '{one}'"
            raise UserError(f"'{other}' is {again}, which compares it with itself: name another --mixer or --against")
    exam = _prepare(asked, size, reference, candidates)
    gpus = share_gpus(size.recipe["trainer"], asked.workers)
    for entrant in exam.entrants:
        share = "no known decoding state" if (part := entrant.state_share) is None else f"state {part:.1%} of the cache"
        say(f"{entrant.name}: {entrant.parameters:,} parameters, {share}")
    try:
        exam, failed = conduct(exam, work, gpus=gpus, progress=sys.stdout.isatty() and len(gpus) == 1)
    except KeyboardInterrupt:
        say("stopped; the same command resumes from the last checkpoint")
        raise
    found = compared(exam)
    for verdict in [judge(exam, candidate, failed, found) for candidate in exam.candidates]:
        figures = ", index.html, scatter.png" if verdict.compared else ""
        say(f"\n{verdict_text(verdict)}\n\nwrote {verdict.folder}/verdict.md, verdict.json{figures}")
    if found is not None and len(found.groups) > 2:
        page, *_ = Comparison(found.only([each.name for each in exam.entrants])).write(exam.folder / "report")
        say(f"\nall models together: {page}")
    if failed:
        first, why = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise UserError(f"{first}{more} not finished ({why}); the same command makes the missing runs")


def _prepare(asked: Request, size: Size, reference: tuple[str, Recipe], candidates: list[tuple[str, Recipe]]) -> Exam:
    """The exam, with every model built once without memory and every domain opened."""
    data = size.recipe["data"]
    train, ood = list(data["train"]), list(data["ood"])
    if len(train) == 1 and not ood:
        raise UserError(
            f"only {train[0]} and no OOD domain leave nothing to compare: name some with --data.ood, "
            "or several with --data.train, whose hold-outs are then compared"
        )
    budgets = (size.recipe.get("branches") or {}).get("at")
    ladder = bool(budgets) and asked.size not in LIMITS if asked.ladder is None else asked.ladder
    if ladder and not budgets:
        raise UserError(
            "--ladder compares rates after the shortest branch: set --branches.at '[0.125, 0.25, 0.5]' and "
            "--model.decay_share 0.2"
        )
    recipes = dict((reference, *candidates))
    checked = {name: check(name, recipe, asked.allow_code) for name, recipe in recipes.items()}
    texts = checked[reference[0]].data
    if asked.data is not None:
        tokenizer = "byte" if asked.size == "tiny" else "mixtral"
        texts.root = str(find_shards(Path(asked.data), train, ood, tokenizer, Path(asked.out) / "shards"))
    for recipe in recipes.values():
        recipe["data"] = {**recipe["data"], "root": texts.root}
    texts.prepare_data()
    texts.setup("fit")
    texts.evaluation_sets()
    if texts.tokenizer.vocab_size > (most := size.model["vocab_size"]):
        raise UserError(
            f"the data's tokenizer '{texts.tokenizer.name}' has {texts.tokenizer.vocab_size:,} entries and models of "
            f"size {asked.size} have {most:,}: prepare the data with another tokenizer, or take another --size"
        )
    first, *others = [
        Entrant(name, recipes[name], it.parameters, code_digest(it.packages), it.state and it.state / size.cache)
        for name, it in checked.items()
    ]
    return Exam(
        folder=Path(asked.out) / asked.size,
        size=asked.size,
        reference=dataclasses.replace(first, remembered=True),
        candidates=others,
        seeds=asked.seeds,
        checksums=checksums(texts.root, [*train, *ood]),
        allow_code=tuple(asked.allow_code),
        ladder=ladder,
    )


def share_gpus(trainer: Mapping[str, Any], workers: int | None) -> list[str | None]:
    """The GPUs that each simultaneous run sees; `None` for all GPUs.

    By default there are as many runs as the GPUs allow, and one on a CPU. More runs than that share GPUs. `trainer` is
    the recipe's section.
    """
    if trainer.get("accelerator") not in ("gpu", "cuda"):
        return [None] * (workers or 1)
    named = os.environ.get(VISIBLE)
    gpus = named.split(",") if named else [str(each) for each in range(torch.cuda.device_count())]
    devices = trainer.get("devices", 1)
    if not isinstance(devices, int) or devices < 1:  # such as "auto"
        devices = len(gpus)
    shares = [",".join(gpus[n : n + devices]) for n in range(0, len(gpus) - devices + 1, devices)]
    return list(itertools.islice(itertools.cycle(shares), workers or len(shares)))
