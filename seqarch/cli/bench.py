"""`seqarch bench`: the arguments of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from seqarch.bench.kernels import DEFAULT, STEPS, bench_kernels
from seqarch.bench.mixers import bench_mixers, find_recipes, recipe_job
from seqarch.errors import UserError, check_counts
from seqarch.plugins import ALLOW_CODE, FLAG

KERNELS = "Check the kernels on a GPU against float64 references, then time them next to dense attention."
GENERATION = "Time reading prompts and drawing tokens with recipes, each in its own process."
MIXERS = "Time a training step of recipes: forward, backward and AdamW on random tokens, each in its own process."


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
        help="a file, the name of a recipe with or without _110m, or a mixer; by default all bundled *_110m",
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
        help="fla: time the models of flash-linear-attention of the same size next to ours",
    )
    mixers.add_argument(
        "--own_caches", action="store_true", help="use the compile caches of earlier runs; otherwise they start empty"
    )
    mixers.add_argument(
        "--model",
        type=dict[str, Any],
        default={},
        help="options of the model to set in each recipe, as in --model.n_layers=2",
    )
    commands.add_subcommand("mixers", mixers, help="time a training step of recipes")
    mixers.prog = "seqarch bench mixers"
    generation = ArgumentParser(description=GENERATION, exit_on_error=False)
    generation.add_argument(
        "recipes", nargs="*", default=[], metavar="RECIPE", help="as for bench mixers; by default all bundled *_110m"
    )
    generation.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)
    generation.add_argument("--csv", type=Path | None, default=None, help="write the rows to this file")
    generation.add_argument("--prompt", type=int, default=50_000, help="tokens of a prompt")
    generation.add_argument("--new", type=int, default=5_000, help="tokens to draw")
    generation.add_argument("--batch", type=int, default=64, help="prompts, or the most that fit in memory")
    generation.add_argument("--steps", type=int, default=200, help="steps to time, in the middle of the new tokens")
    generation.add_argument(
        "--modes",
        nargs="+",
        type=Literal["python", "graph", "compiled"],
        default=["graph", "compiled"],
        help="steps from Python, from a CUDA graph, or compiled from a CUDA graph",
    )
    generation.add_argument(
        "--against", type=Literal["llama"] | None, default=None, help="llama: time one of transformers as well"
    )
    generation.add_argument(
        "--model", type=dict[str, Any], default={}, help="options of the model to set in each recipe"
    )
    commands.add_subcommand("generation", generation, help="time prompts and decoding steps of recipes")
    generation.prog = "seqarch bench generation"


def run(args: Namespace) -> None:
    if args.command == "kernels":
        bench_kernels(args.kernels.steps, args.kernels.csv)
        return
    if args.command == "generation":
        _generation(args.generation)
        return
    options = args.mixers
    data = {key: getattr(options, key) for key in ("micro_batch_size", "sequence_length")}
    check_counts(**{f"--{key}": value for key, value in {"steps": options.steps, **data}.items()})
    if options.against and options.model:
        raise UserError("--against compares recipes as they are: leave out the options of --model")
    overrides = {"model": options.model, "data": {key: value for key, value in data.items() if value}}
    jobs = [recipe_job(path, overrides, options.steps, options.allow_code) for path in find_recipes(options.recipes)]
    bench_mixers(jobs, options.csv, against_fla=options.against == "fla", own_caches=options.own_caches)


def _generation(options: Namespace) -> None:
    from seqarch.bench.generation import bench_generation, check_sizes, generation_job

    check_sizes(options.prompt, options.new, options.batch, options.steps)
    sizes = {"prompt": options.prompt, "new": options.new, "batch_size": options.batch, "steps": options.steps}
    recipes: list[Path | None] = [*find_recipes(options.recipes), *([None] if options.against else [])]
    overrides = {"model": options.model}
    jobs = [generation_job(each, options.modes, overrides, options.allow_code, **sizes) for each in recipes]
    bench_generation(jobs, options.csv)


def _steps() -> str:
    return "; ".join(f"{name}: {step.help}" for name, step in STEPS.items())
