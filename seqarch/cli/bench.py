"""`seqarch bench`: the arguments of its commands."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from seqarch.bench.kernels import DEFAULT, STEPS, bench_kernels

KERNELS_HELP = "Check the kernels on a GPU against float64 references, then time them beside dense attention."


def add_arguments(parser: ArgumentParser) -> None:
    commands = parser.add_subcommands(dest="command")
    kernels = ArgumentParser(description=f"{KERNELS_HELP} Steps: {_steps()}.", exit_on_error=False)
    kernels.add_argument("steps", nargs="*", metavar="STEP", help=f"what to run; by default {' '.join(DEFAULT)}")
    kernels.add_argument("--csv", type=Path | None, default=None, help="write the rows to this file")
    commands.add_subcommand("kernels", kernels, help="check and time the kernels on a GPU")
    kernels.prog = "seqarch bench kernels"


def run(args: Namespace) -> None:
    bench_kernels(args.kernels.steps, args.kernels.csv)


def _steps() -> str:
    return "; ".join(f"{name}: {step.help}" for name, step in STEPS.items())
