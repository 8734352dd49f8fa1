"""`seqarch fit`, `validate` and `test`."""

import functools
import signal
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from seqarch.cli.commands import TRAINING
from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.parser import FROM, build_parser


def words(command: str) -> tuple[str, str, str]:
    """The name, usage and description of `fit`, `validate` or `test`, for its parser."""
    return f"seqarch {command}", f"seqarch {command} --config RECIPE [--KEY VALUE ...]", TRAINING[command]


@functools.cache
def parser_of(command: str) -> ArgumentParser:
    """The parser of `fit`, `validate` or `test`."""
    return build_parser(*words(command))


def train(command: str, args: Sequence[str]) -> None:
    """Run `fit`, `validate` or `test`."""
    flags = {arg.partition("=")[0] for arg in args}
    if command != "fit" and (wrong := flags & {FROM, "--profile"}):
        raise UserError(f"{min(wrong)} has no effect on seqarch {command}: leave it out")
    experiment = Experiment(args, parser=parser_of(command))
    if command == "fit":
        experiment.fit()
        return
    if not experiment.options.ckpt_path:
        raise UserError(f"{command} needs --ckpt_path, a checkpoint of a run")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Lightning by itself would go on
    named = "--ckpt_path" in flags  # else the recipe's, from which its run began
    experiment.evaluate(None, experiment.options.ckpt_path if named else None, whole=command == "test", verbose=True)
