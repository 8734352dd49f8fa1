"""`seqarch exam`: its arguments."""

import re
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from seqarch.errors import check_count, unknown
from seqarch.exam.entrants import Request
from seqarch.plugins import ALLOW_CODE, FLAG, split_flags

SIZES = ("tiny", "draft", "small", "medium")
MOST = 1000
"""Seeds, and workers, at most: each is in memory before the first run."""


def split_dotted(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arguments without options such as `--mixer.x=1` or `--data.y 2`, and these options.

    Raises:
        UserError: one of them has no value.
    """
    rest, found = split_flags(args, re.compile(r"--\w+\.\w").match)
    return rest, {flag.removeprefix("--"): value for flag, value in found}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--mixer",
        action="extend",
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
    parser.add_class_arguments(Request, as_group=False, skip={"mixers", "allow_code", "options"})
    parser.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)


def run(args: Namespace) -> None:
    asked = dict(vars(args))
    mixers, tasks = asked.pop("mixer"), asked.pop("recall")
    if tasks is None:
        if args.size not in SIZES:
            raise unknown("size", args.size, SIZES)
        check_count("--seeds", args.seeds, MOST)
        check_count("--workers", args.workers, MOST)
    from seqarch.exam.run import run_exam
    from seqarch.recall.run import run_recall

    request = Request(mixers, **asked)
    if tasks is None:
        run_exam(request)
    else:
        run_recall(request, tasks)
