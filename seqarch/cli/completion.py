"""`seqarch --print_completion=shtab-SHELL`: a script that completes command lines."""

from __future__ import annotations

import importlib.util

from jsonargparse import ArgumentParser, set_parsing_settings

from seqarch.cli.commands import COMMANDS, TRAINING
from seqarch.cli.training import words
from seqarch.errors import UserError
from seqarch.experiment.parser import build_parser

FLAG = "--print_completion"


def print_completion(args: list[str]) -> None:
    """Print the script that the arguments ask for.

    Raises:
        UserError: the package that writes it is not installed.
    """
    if importlib.util.find_spec("shtab") is None:
        raise UserError("completion scripts come from the package shtab: pip install 'seqarch[completion]'")
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
