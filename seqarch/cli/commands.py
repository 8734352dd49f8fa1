"""The commands that do not train: `exam`, `eval`, `data`, `report`, `bench`, `recipes`, `mixers`, `generate`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from seqarch.cli import bench, eval, exam, generate


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: one line of help, its arguments, what it does."""

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], None]
    parser: type[ArgumentParser] = ArgumentParser


TRAINING = {
    "fit": "Train a model as a recipe says, or go on where the run stopped.",
    "validate": "Measure a checkpoint's loss on the evaluation set of each domain.",
    "test": "Measure a checkpoint's loss on the whole hold-out of each domain.",
}
"""The commands of `seqarch.cli.training`."""


def build_parser(name: str) -> ArgumentParser:
    """The argument parser of one of `COMMANDS`."""
    command = COMMANDS[name]
    parser = command.parser(prog=f"seqarch {name}", description=command.help, exit_on_error=False)
    command.add_arguments(parser)
    return parser


def _data_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subcommands(dest="command")
    prepare = ArgumentParser(description="Turn text files into shards of tokens.", exit_on_error=False)
    prepare.add_argument("files", nargs="+", help="JSONL, JSONL.zst or Parquet files, one document per row")
    prepare.add_argument("--out", required=True, help="folder of shards or s3://..., with a folder for each domain")
    prepare.add_argument("--domain", required=True, help="name of the domain, for instance web")
    prepare.add_argument("--tokenizer", default="mixtral", help="mixtral (32,000 entries) or byte")
    prepare.add_argument("--text_field", default="text", help="field that holds the text of a document")
    prepare.add_argument("--holdout", type=float, default=0.02, help="share of the documents never trained on")
    prepare.add_argument("--min_tokens", type=int | None, default=None, help="leave out documents with fewer tokens")
    prepare.add_argument("--max_tokens", type=int | None, default=None, help="leave out documents with more tokens")
    prepare.add_argument("--workers", type=int | None, default=None, help="processes; by default one per core")
    commands.add_subcommand("prepare", prepare, help="turn text files into shards of tokens")
    prepare.prog = "seqarch data prepare"
    show = ArgumentParser(description="Domains, token counts and a decoded sample.", exit_on_error=False)
    show.add_argument("root", help="folder of shards, or embedded for the built-in corpus")
    commands.add_subcommand("show", show, help="domains, token counts and a decoded sample")
    show.prog = "seqarch data show"
    check = ArgumentParser(description="Compare every file of shards with its checksum.", exit_on_error=False)
    check.add_argument("root", help="folder of shards, or embedded for the built-in corpus")
    commands.add_subcommand("check", check, help="compare every file with its checksum")
    check.prog = "seqarch data check"


def _data(args: Namespace) -> None:
    if args.command == "show":
        from seqarch.data.show import show

        print(show(args.show.root))
        return
    if args.command == "check":
        from seqarch.data.show import check

        print(check(args.check.root))
        return
    from seqarch.data.prepare import prepare

    options: dict[str, Any] = dict(vars(args.prepare))
    prepare([Path(file) for file in options.pop("files")], **options)


def _report_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", help="run folders")
    parser.add_argument("--out", required=True, help="folder to write figures, tables and index.html into")
    parser.add_argument("--reference", default=None, type=str | None, help="run to compare with; the first by default")
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
    print(comparison.table)
    print("\n".join(f"wrote {path}" for path in written))


def _recipes_arguments(parser: ArgumentParser) -> None:
    copy = ArgumentParser(description="Write a recipe to a file of your own, to edit it.", exit_on_error=False)
    copy.add_argument("name", help="the recipe, as `seqarch recipes` lists it")
    copy.add_argument("target", nargs="?", default=None, help="a new file, or a folder; by default ./NAME.yaml")
    commands = parser.add_subcommands(required=False, dest="command")
    commands.add_subcommand("copy", copy, help="write a recipe to a file of your own")
    copy.prog = "seqarch recipes copy"


def _recipes(args: Namespace) -> None:
    from seqarch.experiment.recipes import bundled_recipes, copy_recipe

    if args.command == "copy":
        print(f"wrote {copy_recipe(args.copy.name, args.copy.target and Path(args.copy.target))}")
        return
    for name, path in bundled_recipes().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:48} {first.removeprefix('# ') if first.startswith('#') else ''}".rstrip())


def _mixers_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--costs", action="store_true", help="print the costs and abilities of each mixer, by device")
    parser.add_argument("--d_model", type=int, default=768, help="width at which --costs builds the mixers")
    new = ArgumentParser(description="Write a package with a mixer of your own.", exit_on_error=False)
    new.add_argument("name", help="the class, for instance RunningMean")
    new.add_argument("--out", type=str | None, default=None, help="its folder; by default running-mean")
    commands = parser.add_subcommands(required=False, dest="command")
    commands.add_subcommand("new", new, help="write a package with a mixer of your own")
    new.prog = "seqarch mixers new"


def _mixers(args: Namespace) -> None:
    if args.command == "new":
        from seqarch.cli.new_mixer import new_mixer

        options = args.new
        print("\n".join(f"wrote {path}" for path in new_mixer(options.name, options.out and Path(options.out))))
        return
    from seqarch.cli.mixer_table import mixer_json, mixer_table

    if args.costs:
        from seqarch.cli.mixer_costs import cost_table, mixer_costs

        print(json.dumps(mixer_costs(args.d_model), indent=2) if args.json else cost_table(args.d_model))
        return

    print(mixer_json() if args.json else mixer_table())


COMMANDS: dict[str, Command] = {
    "exam": Command(
        "Examine a mixer: its base capabilities, speed and memory compared with a reference.",
        exam.add_arguments,
        exam.run,
        exam.ExamParser,
    ),
    "eval": Command("Score a checkpoint on tasks: few-shot, retrieval and others.", eval.add_arguments, eval.run),
    "data": Command("Prepare text as shards of tokens, look at shards, or check them.", _data_arguments, _data),
    "report": Command("Draw and tabulate what runs show.", _report_arguments, _report),
    "bench": Command("Time kernels and training steps side by side.", bench.add_arguments, bench.run),
    "recipes": Command("List the recipes that are installed, or copy one.", _recipes_arguments, _recipes),
    "mixers": Command("List the sequence mixers that are installed.", _mixers_arguments, _mixers),
    "generate": Command("Continue a text with a trained model.", generate.add_arguments, generate.run),
}
