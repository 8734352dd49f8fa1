"""`seqarch bench`: the arguments of its commands, and which recipes are meant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from seqarch.bench.kernels import DEFAULT, STEPS, bench_kernels
from seqarch.bench.mixers import Job, bench_mixers
from seqarch.cli.recipes import expand_recipes, given_recipes
from seqarch.errors import UserError, check_counts, unknown
from seqarch.plugins import ALLOW_CODE, FLAG, allow_flags
from seqarch.safe_yaml import load

KERNELS = "Check the kernels on a GPU against float64 references, then time them beside dense attention."
MIXERS = "Time a training step of recipes: forward, backward and AdamW on random tokens, each in its own process."
RECIPES = Path("recipes")
SIZE = "_110m"
"""What the names of the recipes end with that are timed by default."""


def add_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subcommands(dest="command")
    kernels = ArgumentParser(description=f"{KERNELS} Steps: {_steps()}.", exit_on_error=False)
    kernels.add_argument("steps", nargs="*", default=list(DEFAULT), metavar="STEP", help="what to run")
    kernels.add_argument("--csv", type=Path | None, default=None, help="write the rows to this file")
    commands.add_subcommand("kernels", kernels, help="check and time the kernels on a GPU")
    kernels.prog = "seqarch bench kernels"
    mixers = ArgumentParser(description=MIXERS, exit_on_error=False)
    mixers.add_argument(
        "recipes",
        nargs="*",
        default=[],
        metavar="RECIPE",
        help="a file, the name of a recipe with or without _110m, or a mixer; by default all of recipes/*_110m.yaml",
    )
    mixers.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)
    mixers.add_argument("--csv", type=Path | None, default=None, help="write the rows to this file")
    mixers.add_argument("--steps", type=int, default=20, help="steps to time after the first, which compiles")
    mixers.add_argument("--micro_batch_size", type=int | None, default=None, help="sequences; the recipe's by default")
    mixers.add_argument("--sequence_length", type=int | None, default=None, help="tokens; the recipe's by default")
    mixers.add_argument(
        "--against",
        type=Literal["fla"] | None,
        default=None,
        help="fla: time the models of flash-linear-attention of the same size beside ours",
    )
    mixers.add_argument(
        "--own_caches", action="store_true", help="use the compile caches of earlier runs; otherwise they start empty"
    )
    mixers.add_argument(
        "--model", type=dict[str, Any], default={}, help="options laid over each recipe, as in --model.n_layers=2"
    )
    commands.add_subcommand("mixers", mixers, help="time a training step of recipes")
    mixers.prog = "seqarch bench mixers"


def run(args: Namespace) -> None:
    if args.command == "kernels":
        bench_kernels(args.kernels.steps, args.kernels.csv)
        return
    options = args.mixers
    data = {key: getattr(options, key) for key in ("micro_batch_size", "sequence_length")}
    check_counts(**{f"--{key}": value for key, value in {"steps": options.steps, **data}.items()})
    if options.against and options.model:
        raise UserError("--against compares recipes as they are: leave out the options of --model")
    flags = [*_flags("model", options.model), *_flags("data", {key: value for key, value in data.items() if value})]
    flags += allow_flags(options.allow_code)
    jobs = [
        Job(path.stem, "seqarch.cli.bench_step", {"recipe": str(path), "flags": flags, "steps": options.steps})
        for path in find_recipes(options.recipes)
    ]
    bench_mixers(jobs, options.csv, against_fla=options.against == "fla", own_caches=options.own_caches)


def find_recipes(names: Sequence[str]) -> list[Path]:
    """The recipes that are meant: files, names of recipes (`_110m` may be left out) or mixers; all `_110m` for none.

    Raises:
        UserError: a name that is none of these.
    """
    recipes = {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}
    sized = {stem: path for stem, path in recipes.items() if stem.endswith(SIZE)}
    if not names and not sized:
        raise UserError(f"there is no {RECIPES}/*{SIZE}.yaml here: go to the folder of {RECIPES}, or name recipes")
    found: list[Path] = [] if names else list(sized.values())
    for name in names:
        of_mixer = [path for path in sized.values() if name in mixer_classes(path)]
        if name.endswith((".yaml", ".yml")):
            found.append(Path(name))
        elif path := recipes.get(name) or recipes.get(name + SIZE):
            found.append(path)
        elif of_mixer:
            found += of_mixer
        else:
            classes = [each for path in sized.values() for each in mixer_classes(path)]
            raise unknown("recipe or mixer", name, {*recipes, *classes})
    return list(dict.fromkeys(found))


def mixer_classes(recipe: Path) -> list[str]:
    """Names of the mixer classes of a recipe."""
    mixers: dict[str, Any] = {}
    for path in given_recipes(expand_recipes(["--config", str(recipe)])):
        mixers = (load(path).get("model") or {}).get("mixers") or mixers
    paths = [each if isinstance(each, str) else each["class_path"] for each in mixers.values()]
    return [path.rpartition(".")[2] for path in paths]


def _flags(key: str, value: Any) -> Iterator[str]:
    """The options as the command line of `fit` takes them."""
    if isinstance(value, Mapping) and (key in ("model", "data") or any("." in name for name in value)):
        for name, each in value.items():
            yield from _flags(f"{key}.{name}", each)
    else:
        yield f"--{key}={value if isinstance(value, str) else json.dumps(value)}"


def _steps() -> str:
    return "; ".join(f"{name}: {step.help}" for name, step in STEPS.items())
