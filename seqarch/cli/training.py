"""`seqarch fit`, `validate` and `test`: an `Experiment` from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from seqarch.cli.commands import TRAINING
from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.parser import build_parser


def words(command: str) -> tuple[str, str, str]:
    """The name, usage and description of `fit`, `validate` or `test`, for its parser."""
    return f"seqarch {command}", f"seqarch {command} --config RECIPE [--KEY VALUE ...]", TRAINING[command]


def train(command: str, args: Sequence[str]) -> None:
    """Run `fit`, `validate` or `test`."""
    experiment = Experiment(args, parser=build_parser(*words(command)))
    if command == "fit":
        experiment.fit()
        return
    if experiment.options.ckpt_path is None:
        experiment.check_machine()
        raise UserError(f"{command} needs --ckpt_path, a checkpoint of a run")
    experiment.evaluate(whole=command == "test", verbose=True)
