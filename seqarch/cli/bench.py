"""`seqarch bench`: the arguments of its commands."""

from pathlib import Path
from typing import Annotated, Any, Literal

from jsonargparse import ArgumentParser, Namespace

from seqarch.arguments import Interval
from seqarch.bench.kernels import STEPS, bench_kernels
from seqarch.bench.mixers import bench_mixers, find_recipes, recipe_job
from seqarch.experiment.help import subcommand
from seqarch.plugins import ALLOW_CODE, FLAG
from seqarch.runs.keys import flatten

Size = Annotated[int, Interval(1, 2**31, "[]")]
New = Annotated[int, Interval(6, 2**31, "[]")]
"""Tokens of which some are timed: five warm up."""


def add_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subcommands(dest="command")
    steps = "; ".join(f"{name}: {step.help}" for name, step in STEPS.items())
    kernels = subcommand(commands, "bench kernels", f"Time kernels on a GPU next to dense attention. Steps: {steps}.")
    mixers = subcommand(
        commands,
        "bench mixers",
        "Time a training step of recipes: forward, backward and AdamW on random tokens, each in its own process.",
    )
    generation = subcommand(
        commands, "bench generation", "Time reading prompts and drawing tokens with recipes, each in its own process."
    )
    kernels.add_argument("steps", nargs="*", default=list(STEPS), metavar="STEP", help="what to run")
    for each in (mixers, generation):
        each.add_argument(
            "recipes",
            nargs="*",
            default=[],
            metavar="RECIPE",
            help="a file, the name of a recipe with or without _110m, or a mixer; by default all bundled *_110m",
        )
        each.add_argument(FLAG, action="append", default=[], help=ALLOW_CODE)
        target: Any = each.add_argument_group("without --against") if each is mixers else each
        target.add_argument(
            "--model",
            type=dict[str, Any],
            default={},
            help="options of the model to set in each recipe, as in --model.n_layers=2",
        )
        if each is mixers:
            target.add_argument(
                "--documents", type=Size | None, help="train with a document mask, on documents of this mean length"
            )
    for each in (kernels, mixers, generation):
        each.add_argument("--csv", type=Path | None, help="write the rows to this file")
    _add_mixer_arguments(mixers)
    _add_generation_arguments(generation)


def _add_mixer_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--steps", type=Size, default=20, help="steps to time after the first, which compiles")
    parser.add_argument("--micro_batch_size", type=Size | None, help="sequences; by default the recipe's")
    parser.add_argument("--sequence_length", type=Size | None, help="tokens; by default the recipe's")
    parser.add_argument(
        "--against",
        type=Literal["fla"] | None,
        help="fla: also time the models of flash-linear-attention, at the same size",
    )
    parser.add_argument(
        "--own_caches", action="store_true", help="use the compile caches of earlier runs; otherwise they start empty"
    )


def _add_generation_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--prompt", type=Size, default=50_000, help="tokens of a prompt")
    parser.add_argument("--new", type=New, default=5_000, help="tokens to draw")
    parser.add_argument("--batch", type=Size, default=64, help="prompts at once; fewer if they do not fit in memory")
    parser.add_argument("--steps", type=Size, default=200, help="steps to time, in the middle of the new tokens")
    parser.add_argument(
        "--modes",
        nargs="+",
        type=Literal["python", "graph", "compiled"],
        default=["graph", "compiled"],
        help="steps from Python, or on a GPU from a CUDA graph, or compiled from a CUDA graph",
    )
    parser.add_argument("--against", type=Literal["llama"] | None, help="llama: also time the Llama of transformers")


def run(args: Namespace) -> None:
    if args.command == "kernels":
        bench_kernels(args.kernels.steps, args.kernels.csv)
    elif args.command == "generation":
        _generation(args.generation)
    else:
        _mixers(args.mixers)


def _mixers(options: Namespace) -> None:
    data = {key: getattr(options, key) for key in ("micro_batch_size", "sequence_length")}
    overrides = flatten({"model": options.model, "data": {key: value for key, value in data.items() if value}})
    recipes = find_recipes(options.recipes)
    jobs = [recipe_job(each, overrides, options.steps, options.allow_code, options.documents) for each in recipes]
    bench_mixers(jobs, options.csv, against_fla=options.against == "fla", own_caches=options.own_caches)


def _generation(options: Namespace) -> None:
    from seqarch.bench.generation import bench_generation, generation_job

    sizes = {"prompt": options.prompt, "new": options.new, "batch_size": options.batch, "steps": options.steps}
    recipes: list[Path | None] = [*find_recipes(options.recipes), *([None] if options.against else [])]
    overrides = flatten({"model": options.model})
    jobs = [generation_job(each, options.modes, overrides, options.allow_code, **sizes) for each in recipes]
    bench_generation(jobs, options.csv)
