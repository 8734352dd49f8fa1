"""`seqarch recall`: its arguments."""

from jsonargparse import ArgumentParser, Namespace

from seqarch.cli.commands import Command


def add_arguments(parser: ArgumentParser) -> None:
    tasks = "mqar, ngram, position or icll, or several of them; by default all"
    parser.add_argument("tasks", nargs="*", default=[], metavar="TASK", help=tasks)
    parser.add_argument(
        "--mixer",
        action="extend",
        nargs="+",
        required=True,
        help="what to examine: mixers by their class; options of one mixer as --mixer.OPTION VALUE",
    )
    sizes = "tiny (for a CPU), small (as published) or zoology (mqar only); --epochs, --widths and so on change it"
    parser.add_argument("--size", default="tiny", help=sizes)
    parser.add_argument("--out", default="runs/exam", help="folder of exams; those of recall have a folder in it")


def is_setting(flag: str) -> bool:
    """Whether a flag sets an option of the mixer or a setting of the task."""
    from seqarch_recall.settings import CHANGEABLE

    return flag.startswith("--mixer.") or flag.removeprefix("--") in CHANGEABLE


def run(args: Namespace) -> None:
    from seqarch_recall.run import run_recall

    run_recall(args.mixer, args.tasks, args.size, args.out, args.options)


COMMAND = Command(
    "Train small models on synthetic tasks that measure what a mixer remembers.", add_arguments, run, is_setting
)
