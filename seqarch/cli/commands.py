"""The commands that do not train: `exam`, `eval`, `data`, `report`, `bench`, `recipes`, `mixers` and others."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from seqarch.cli import bench, checkpoint, eval, exam, export, generate, mixer_list, scale
from seqarch.data.remote import is_remote
from seqarch.errors import UserError, check_known, say, several
from seqarch.experiment.help import Parser, subcommand
from seqarch.plugins import entries, import_entry, named, split_flags
from seqarch.runs.files import refuse_place
from seqarch.tables import listed


@dataclasses.dataclass(frozen=True)
class Command:
    """A command. A package declares one of its own in the entry points `seqarch.commands`, under its word.

    Args:
        help: what it does, in one line.
        add_arguments: adds its arguments to a parser.
        run: does it, with the parsed options.
        takes: whether it takes a flag with a value next to its arguments, such as `--mixer.chunk_size`; `run` finds
            these values as text in `options`, by name.
    """

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]
    takes: Callable[[str], object] | None = None

    def parser(self, prog: str) -> ArgumentParser:
        """A new parser of its arguments."""
        parser = Parser(prog=prog, description=self.help)
        self.add_arguments(parser)
        return parser


TRAINING = {
    "fit": "Train a model as a recipe says, or resume its run.",
    "validate": "Measure a checkpoint's loss on the evaluation set of each domain.",
    "test": "Measure a checkpoint's loss on the whole hold-out of each domain.",
}
"""The commands of `seqarch.cli.training`."""
GROUP = "seqarch.commands"
"""Entry points of commands."""
EMPTY = ("bos_token", "prompt", "stop")
"""Options for which an empty text is a value."""
WRITTEN, REMOTE = ("out", "csv"), ("prepare.out",)
DOTTED = re.compile(r"--\w+\.\w").match
"""Flags such as `--mixer.chunk_size` and `--trainer.max_steps`."""


def find_command(name: str) -> Command:
    """One of `COMMANDS`, or a command of another package.

    Raises:
        UserError: there is none, or its package is broken.
    """
    if name in COMMANDS:
        return COMMANDS[name]
    points = entries(GROUP)
    check_known("command", name, (*TRAINING, *COMMANDS, *points))
    command = import_entry(points[name])
    if not isinstance(command, Command):
        raise UserError(f"{named(points[name])} is not a seqarch.cli.commands.Command")
    return command


def parse(name: str, args: Sequence[str]) -> Namespace:
    """The options of a command.

    Raises:
        UserError: what is wrong in the arguments.
    """
    from seqarch.experiment.checker import parse_command

    command = find_command(name)
    rest, flags = split_flags(args, command.takes or (lambda _: False))
    options = parse_command(command.parser(f"seqarch {name}"), rest)
    for key, value in options.items():
        place = key.rpartition(".")[2]
        if place not in EMPTY and "" in several(value):  # it would stand for a default, or for the current folder
            raise UserError(f"{place} is empty: give it a value, or leave it out")
        if place in WRITTEN and value is not None and not (key in REMOTE and is_remote(value)):
            refuse_place(f"--{place}", str(value))
    if command.takes:
        options.options = {flag.removeprefix("--"): value for flag, value in flags}
    return options


def _data_arguments(parser: ArgumentParser) -> None:
    from seqarch.data.prepare import Preparation

    commands = parser.add_subcommands(dest="command")
    prepare = subcommand(commands, "data prepare", "Turn text files into shards of tokens.")
    prepare.add_argument(
        "files",
        nargs="+",
        help="JSONL (plain, .gz, .zst), Parquet, CSV, Arrow or text files (.txt, .md), folders of them, data sets of "
        "the Hugging Face Hub (hf://datasets/OWNER/NAME), or - for JSONL from standard input",
    )
    where = "condition that a row must meet, such as int_score>=4; may be repeated"
    prepare.add_argument("--where", action="append", default=[], help=where)
    append = "add the documents to a domain's training split, without those that its hold-out would take"
    prepare.add_argument("--append", action="store_true", help=append)
    prepare.add_class_arguments(Preparation, as_group=False, skip={"files", "where", "append"})
    for name, does in (
        ("show", "Domains, token counts and a decoded sample."),
        ("check", "Compare every file of shards with its checksum."),
        ("join", "Put the parts of a preparation together (`data prepare --part`)."),
    ):
        parser = subcommand(commands, f"data {name}", does)
        parser.add_argument("root", help="folder of shards, or embedded for the built-in corpus")
    rows = subcommand(commands, "data rows", "Make the rows of an evaluation task of its published file.")
    rows.add_argument("task", help="race, wsc273, swde, squad or fda")
    rows.add_argument("file", help="RACE.tar.gz, WSCollection.xml, or the Parquet file of Based's data set")
    rows.add_argument("--out", required=True, help="folder of rows, which `seqarch eval --rows` takes")


def _data(args: Namespace) -> None:
    from seqarch.data import show
    from seqarch.data.prepare import Preparation, join

    if args.command == "prepare":
        Preparation(**vars(args.prepare)).run()
    elif args.command == "join":
        join(args.join.root)
    elif args.command == "rows":
        from seqarch.evaluation.published import write_rows

        say(write_rows(args.rows.task, Path(args.rows.file), Path(args.rows.out)))
    else:
        say(getattr(show, args.command)(args[args.command].root))


def _report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", required=True, help="folder to write figures, tables and index.html into")
    parser.add_argument("--reference", type=str | None, help="run to compare with; by default the first")
    parser.add_argument(
        "--domains",
        nargs="+",
        default=[],
        help="domains to compare; by default all OOD domains, or without OOD domains the training domains' hold-outs",
    )


def _report(args: Namespace) -> None:
    from seqarch.report import compare

    comparison = compare(args.runs, args.reference, args.domains)
    written = comparison.write(Path(args.out))
    say(comparison.table)
    say("\n".join(f"wrote {path}" for path in written))


def _recipes_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subcommands(required=False, dest="command")
    copy = subcommand(commands, "recipes copy", "Write a recipe to a file of your own, to edit it.")
    copy.add_argument("name", help="the recipe, as `seqarch recipes` lists it")
    copy.add_argument("target", nargs="?", help="a new file, or a folder; by default ./NAME.yaml")


def _recipes(args: Namespace) -> None:
    from seqarch.experiment.recipes import bundled_recipes, copy_recipe

    if args.command == "copy":
        say(f"wrote {copy_recipe(args.copy.name, args.copy.target and Path(args.copy.target))}")
        return
    firsts = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in bundled_recipes().items()}
    names = sorted(firsts, key=lambda name: "/" in name)  # those in folders come last
    say(listed({name: firsts[name].removeprefix("# ") if firsts[name].startswith("#") else "" for name in names}))


COMMANDS: dict[str, Command] = {
    "exam": Command(
        "Examine a mixer: its base capabilities, speed and memory compared with a reference.",
        exam.add_arguments,
        exam.run,
        DOTTED,
    ),
    "scale": Command(
        "Compare models at several sizes: what a mixer saves, and whether small models predict larger ones.",
        scale.add_arguments,
        scale.run,
        DOTTED,
    ),
    "eval": Command("Score a checkpoint on tasks: few-shot, retrieval and others.", eval.add_arguments, eval.run),
    "data": Command("Prepare text as shards of tokens, look at shards, or check them.", _data_arguments, _data),
    "report": Command("Draw and tabulate what runs show.", _report_arguments, _report),
    "bench": Command("Time kernels and training steps side by side.", bench.add_arguments, bench.run),
    "recipes": Command("List the recipes that are installed, or copy one.", _recipes_arguments, _recipes),
    "mixers": Command("List the sequence mixers that are installed.", mixer_list.add_arguments, mixer_list.run),
    "generate": Command("Continue a text with a trained model.", generate.add_arguments, generate.run),
    "checkpoint": Command("List, check and merge the checkpoints of a run.", checkpoint.add_arguments, checkpoint.run),
    "export": Command("Write a model as a folder for Hugging Face's transformers.", export.add_arguments, export.run),
    "import": Command(
        "Make a run folder of a published model, without training.", export.add_import_arguments, export.run_import
    ),
}
