"""`seqarch exam`: its arguments."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from seqarch.errors import UserError, check_counts, unknown
from seqarch.plugins import ALLOW_CODE, FLAG

SIZES = ("tiny", "draft", "small", "medium")


class ExamParser(ArgumentParser):
    """Takes `--mixer.OPTION VALUE` and `--SECTION.KEY VALUE` in addition to its own arguments, into `options`."""

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Split off what has a dot, then parse the rest."""
        rest, dotted = split_dotted(sys.argv[1:] if args is None else args)
        parsed = super().parse_args(rest, *more, **options)
        parsed["options"] = dotted
        return parsed


def split_dotted(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without `--mixer.x=1`, `--data.y 2` and the like, and these.

    Raises:
        UserError: one of them has no value.
    """
    rest: list[str] = []
    dotted: dict[str, str] = {}
    words = iter(args)
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if not (word.startswith("--") and re.match(r"\w+\.\w", key)):
            rest.append(word)
            continue
        if not equals and (value := next(words, "--")).startswith("--"):
            raise UserError(f"--{key} needs a value")
        dotted[key] = value
    return rest, dotted


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--mixer",
        nargs="+",
        required=True,
        help="what to examine: a mixer's class with its options as --mixer.OPTION VALUE, the name of a recipe (with or "
        "without _110m), or a recipe's file; you may give several",
    )
    parser.add_argument(
        "--recall",
        nargs="*",
        help="train small models from scratch on recall tasks instead of a language model (mqar, ngram, "
        "position, icll; by default all); settings as --recall.SETTING VALUE",
    )
    parser.add_argument("--against", default="TransformerPlusPlus", help="the reference, named like --mixer")
    parser.add_argument(
        "--size",
        default="tiny",
        help="tiny (minutes on a CPU), draft (minutes on a GPU, a first look), small (a GPU, 340M tokens per run) or "
        "medium (110M parameters, 1.05B tokens per run)",
    )
    parser.add_argument(
        "--data", type=str | None, default=None, help="folder of shards, or of text files called <domain>"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model")
    parser.add_argument(
        "--ladder",
        type=bool | None,
        default=None,
        help="whether each model trains at its own best learning rate, chosen in domain; by default at sizes with "
        "branches (small and medium)",
    )
    parser.add_argument(
        "--workers", type=int | None, default=None, help="runs made at the same time; by default one on each GPU"
    )
    parser.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)
    parser.add_argument("--out", default="runs/exam", help="folder of exams; those of one size share it")


def run(args: Namespace) -> None:
    asked = dict(vars(args))
    if (tasks := asked.pop("recall")) is not None:
        _run_recall(tasks, asked)
        return
    if args.size not in SIZES:
        raise unknown("size", args.size, SIZES)
    check_counts(**{"--seeds": args.seeds})
    from seqarch.exam.run import Request, run_exam

    run_exam(Request(mixers=asked.pop("mixer"), **asked))


def _run_recall(tasks: list[str], asked: dict[str, Any]) -> None:
    from seqarch.exam.run import Request as ExamRequest
    from seqarch.recall.run import Request, run_recall

    for field in dataclasses.fields(ExamRequest):
        if field.name in ("against", "data", "seeds", "workers") and asked[field.name] != field.default:
            raise UserError(f"--{field.name} belongs to the exam of language models, not to --recall: leave it out")
    run_recall(Request(asked["mixer"], tasks, asked["size"], asked["out"], asked["options"]))
