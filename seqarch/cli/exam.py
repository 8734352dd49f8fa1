"""`seqarch exam`: its arguments, which models are meant, and that each of them can be built before any is trained."""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser, Namespace

from seqarch.cli.recipes import merged_recipe, recipes_folder
from seqarch.errors import UserError, unknown
from seqarch.exam.derive import SHAPES, Recipe, Size, from_mixer, from_recipe, set_option
from seqarch.mixers.registry import mixer_entries

SIZES = ("tiny", "small", "medium")
ALIASES = {"TransformerPlusPlus": "transformer_pp", "Transformer++": "transformer_pp", "Transformer": "transformer"}
SHARED = ("trainer", "model", "data", "ood_loss", "attention_entropy", "train_loss", "throughput", "checkpoint")
"""Sections of a recipe whose keys may be given on the command line; they hold for every model of the exam."""
EXAMINED = ("model.mixers", "model.pattern", "model.vocab_size")


class ExamParser(ArgumentParser):
    """Takes `--mixer.OPTION VALUE` and `--SECTION.KEY VALUE` beside its own arguments, into `options`."""

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
        if not (word.startswith("--") and key.partition(".")[0] in ("mixer", *SHARED) and "." in key):
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
        help="what is examined: a mixer's class with its options as --mixer.OPTION VALUE, the name of a recipe (_110m "
        "may be left out) or a recipe's file; several may be given",
    )
    parser.add_argument("--against", default="TransformerPlusPlus", help="the reference, in the same words")
    parser.add_argument(
        "--size", default="tiny", help="tiny (a CPU), small (minutes on a GPU) or medium (110M parameters)"
    )
    parser.add_argument(
        "--data", type=str | None, default=None, help="folder of shards, or of text files called <domain>"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model")
    parser.add_argument(
        "--workers", type=int | None, default=None, help="runs made at the same time; by default one on each GPU"
    )
    parser.add_argument("--out", default="runs/exam", help="folder of exams; those of one size share it")


def run(args: Namespace) -> None:
    from seqarch.cli.exam_run import run_exam

    if args.size not in SIZES:
        raise unknown("size", args.size, SIZES)
    if args.seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {args.seeds}")
    size = load_size(args.size, getattr(args, "options", {}))
    options = {key.removeprefix("mixer."): value for key, value in args.options.items() if key.startswith("mixer.")}
    if options and len(args.mixer) > 1:
        raise UserError("--mixer.OPTION belongs to one mixer, but --mixer names several: examine them one by one")
    reference = find_model(size, args.against, {})
    candidates = [find_model(size, name, options) for name in args.mixer]
    names = [name for name, _ in (reference, *candidates)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(
            f"'{twice}' is named twice, so it would be compared with itself: name another --mixer or --against"
        )
    run_exam(args, size, reference, candidates)


def load_size(name: str, options: dict[str, str]) -> Size:
    """A size of the exam with the keys of the command line laid over its recipe.

    Raises:
        UserError: a key that is the exam's own to set.
    """
    recipe = merged_recipe(recipes_folder() / "exam" / f"{name}.yaml")
    for key, value in options.items():
        section, *path = key.split(".")
        if section == "mixer":
            continue
        if key.startswith(EXAMINED):
            raise UserError(f"--{key}: that is what the exam compares: say it with --mixer, or in a recipe of your own")
        branch = recipe.setdefault(section, {})
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = parsed(key, value)
    return Size(name, recipe)


def find_model(size: Size, name: str, options: dict[str, str]) -> tuple[str, Recipe]:
    """The model that a word of the command line means: its name in the exam, and the exam's recipe for it.

    Raises:
        UserError: the word is neither a mixer nor a recipe, or the options fit none.
    """
    folder = recipes_folder()
    word = ALIASES.get(name, name)
    mixers = [entry.name for entry in mixer_entries()]
    recipes = {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.yaml"))}
    recipes = {stem: path for stem, path in recipes.items() if not stem.startswith(("base/", "exam/"))}
    if word.endswith((".yaml", ".yml")):
        title, recipe = Path(word).stem, from_recipe(size, merged_recipe(Path(word)))
    elif word in mixers:
        title, recipe = word, from_mixer(size, word, published(recipes))
    elif path := recipes.get(f"{word}_110m") or recipes.get(word):
        title, recipe = path.stem.removesuffix("_110m"), from_recipe(size, merged_recipe(path))
    else:
        stems = {stem.removesuffix("_110m") for stem in recipes}
        raise unknown("mixer or recipe", name, {*mixers, *stems, *ALIASES})
    for option, value in options.items():
        set_option(recipe, option, parsed(f"mixer.{option}", value))
    parts = [title, *(f"{option}={value}" for option, value in options.items())]
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", "-".join(parts)), recipe


def published(recipes: dict[str, Path]) -> list[Recipe]:
    """The recipes that tell a mixer's shell: those of 110M parameters, then those of the long sequences."""
    paths = [path for ending in ("_110m", "_100k") for stem, path in recipes.items() if stem.endswith(ending)]
    return [recipe for recipe in map(merged_recipe, paths) if recipe["model"].get("d_model") in SHAPES]


def parsed(key: str, value: str) -> Any:
    """A value of the command line, as YAML has it; numbers such as 1e-3 too.

    Raises:
        UserError: it is no YAML.
    """
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise UserError(f"--{key} is {value}: expected a value as in a recipe") from error


class Checked(NamedTuple):
    """What a recipe turned out to be: parameters, the packages beside seqarch and torch in its model, and its data."""

    parameters: int
    packages: set[str]
    data: Any


def check(name: str, recipe: Recipe) -> Checked:
    """Parse a recipe and build its model without memory.

    Raises:
        UserError: what is wrong in it.
    """
    import torch

    from seqarch.cli.checks import check_accelerator
    from seqarch.cli.training import TrainingCLI

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        try:
            cli = TrainingCLI(["--config", str(path)], run=False)
            check_accelerator(cli.config)
            cli.model.check_schedule(cli.config.trainer.max_steps)
            devices = str(cli.config.trainer.devices)
            cli.datamodule.accumulation(int(devices) if devices.isdigit() else 1)
            with torch.device("meta"):
                model = cli.model.build()
        except UserError as error:
            said = re.sub(rf"{re.escape(str(path))}(:\d+)?:? ?", "", str(error))
            raise UserError(f"{name}: {said}") from error
    packages = {type(part).__module__.partition(".")[0] for part in model.modules()}
    return Checked(model.n_parameters(), packages - {"seqarch", "torch"}, cli.datamodule)


def with_root(recipe: Recipe, root: str) -> Recipe:
    """The recipe with its data in `root`."""
    placed = copy.deepcopy(recipe)
    placed["data"]["root"] = root
    return placed
