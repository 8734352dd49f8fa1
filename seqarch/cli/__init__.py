"""The command line: `seqarch fit | validate | test | data | report | mixers | generate`."""

from __future__ import annotations

import logging
import sys
import warnings

from jsonargparse import ArgumentError

from seqarch.cli.commands import COMMANDS, build_parser
from seqarch.cli.messages import one_line
from seqarch.errors import UserError

TRAINING = ("fit", "validate", "test")


def main(args: list[str] | None = None) -> None:
    """Run one command. What is the user's to mend is one line on stderr and exit status 2."""
    args = sys.argv[1:] if args is None else args
    try:
        run(args)
    except ArgumentError as error:
        _exit(one_line(str(error)))
    except UserError as error:
        _exit(str(error))
    except BrokenPipeError:
        sys.exit(0)


def run(args: list[str]) -> None:
    """Run one command; errors are raised."""
    if args and args[0] in COMMANDS:  # these start at once: no training stack is imported
        parser = build_parser(args[0])
        COMMANDS[args[0]].run(parser.parse_args(args[1:]))
        return
    warnings.filterwarnings("ignore", module="lightning")
    from seqarch.cli.training import TrainingCLI

    for name in ("lightning.pytorch", "lightning.fabric"):  # they set their level when they are imported
        logging.getLogger(name).setLevel(logging.WARNING)
    TrainingCLI(args)


def _exit(message: str) -> None:
    print(f"seqarch: error: {message}", file=sys.stderr)
    sys.exit(2)
