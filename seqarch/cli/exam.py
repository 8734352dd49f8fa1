"""`seqarch exam`: its arguments."""

from jsonargparse import ArgumentParser, Namespace

from seqarch.errors import check_known
from seqarch.exam.request import Request, meant
from seqarch.plugins import ALLOW_CODE, FLAG

SIZES = ("tiny", "draft", "small", "medium", "long")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--mixer",
        action="extend",
        nargs="+",
        required=True,
        help="what to examine: a mixer's class with its options as --mixer.OPTION VALUE, the name of a recipe (with or "
        "without _110m), or a recipe's file; you may give several",
    )
    parser.add_class_arguments(Request, as_group=False, skip={"mixers", "allow_code", "options"})
    parser.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)


def run(args: Namespace) -> None:
    check_known("size", args.size, SIZES)
    for name in (args.against, *args.mixer):
        meant(name)  # refuses an unknown one before PyTorch is imported
    from seqarch.exam.run import run_exam

    options = dict(vars(args))
    run_exam(Request(options.pop("mixer"), **options))
