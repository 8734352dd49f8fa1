"""`seqarch fit`, `validate` and `test`, and the script that completes command lines."""

import functools
import signal
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser, set_parsing_settings

from seqarch.cli.commands import COMMANDS, TRAINING
from seqarch.errors import UserError, check_package
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
    given = {arg.partition("=")[0] for arg in args}
    if command != "fit" and (wrong := given & {FROM, "--profile"}):
        raise UserError(f"{min(wrong)} has no effect on seqarch {command}: leave it out")
    experiment = Experiment(args, parser=parser_of(command))
    if command == "fit":
        experiment.fit()
        return
    if not experiment.options.ckpt_path:
        experiment.check_machine()
        raise UserError(f"{command} needs --ckpt_path, a checkpoint of a run")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Lightning by itself would go on
    named = "--ckpt_path" in given  # else the recipe's, from which its run began
    experiment.evaluate(None, experiment.options.ckpt_path if named else None, whole=command == "test", verbose=True)


def print_completion(args: list[str]) -> None:
    """Print what `--print_completion=shtab-SHELL` asks for: a script that completes command lines.

    Raises:
        UserError: the package that writes it is not installed.
    """
    check_package("shtab", "a completion script", "'seqarch[completion]'")
    set_parsing_settings(add_print_completion_argument=True)
    parser = ArgumentParser(prog="seqarch", exit_on_error=False)
    commands = parser.add_subcommands()
    for name, help in TRAINING.items():
        commands.add_subcommand(name, build_parser(*words(name)), help=help)
    for name, command in COMMANDS.items():
        subparser = ArgumentParser(description=command.help, exit_on_error=False)
        commands.add_subcommand(name, subparser, help=command.help)
        command.add_arguments(subparser)
    parser.parse_args(args)
