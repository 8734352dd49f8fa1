"""The commands: fit, validate, test, exam, eval, data, report, bench, recipes, mixers, generate, checkpoint, export
and import."""

import argparse
import io
import os
import re
import sys
import warnings

import seqarch
from seqarch.cli.commands import COMMANDS, GROUP, TRAINING, find_command, parse
from seqarch.errors import SeqarchWarning, UserError, join_processes, of_memory, of_storage, one_line, say
from seqarch.plugins import described, entries

COMPLETION = "--completion"
LIGHT = ("-h", "--help", "--version", "data", "recipes", "mixers", "report")
"""Commands that do not import Lightning."""


def main(args: list[str]) -> None:
    """Run one command. An error of the user gives one line on stderr and exit status 2."""
    _prepare_output()
    try:
        with warnings.catch_warnings():
            _show_own_warnings()
            run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if (message := _of_the_user(error)) is None:
            raise
        say(f"seqarch: error: {message}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as stop:  # Lightning and rich exit with 1 for these
        sys.exit({KeyboardInterrupt: 130, BrokenPipeError: 0}.get(type(stop.__context__), stop.code))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _finish_output()


def _prepare_output() -> None:
    """Give a closed stream a place to write to, and write escapes for letters that the terminal cannot show."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _finish_output() -> None:
    """Write the rest of the output now, or drop it: Python would report an error at its exit, with status 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(args: list[str]) -> None:
    """Run one command; errors are raised."""
    command = args[0] if args else "--help"
    for arg in args:
        arg.encode()  # refuses bytes that are not UTF-8, before anything is written
    if command not in LIGHT:
        join_processes()
    if command in ("-h", "--help"):
        say(_overview().format_help().rstrip())
    elif command == "--version":
        say(f"seqarch {seqarch.__version__}")
    elif command == COMPLETION:
        from seqarch.cli.completion import completion

        print(completion(), end="")  # noqa: T201 - its lines are long
    elif command in TRAINING:
        from seqarch.cli.training import train

        train(command, args[1:])
    elif command.startswith("-"):
        raise UserError(f"{command} is in the place of the command: write seqarch fit {' '.join(args)}")
    else:  # these start at once: no training stack is imported
        find_command(command).run(parse(command, args[1:]))


def _of_the_user(error: Exception) -> str | None:
    """The message for an error that the user can fix, `None` for a bug."""
    if isinstance(error, UserError | argparse.ArgumentError):
        return "\n  ".join(map(one_line, (error, *getattr(error, "__notes__", ()))))
    if isinstance(error, OSError):
        return of_storage(error)
    if isinstance(error, UnicodeEncodeError):
        return f"the text {error.object!r} is not UTF-8"
    if isinstance(error, ValueError) and re.search("null (byte|character)", str(error)):
        return "the name of a file or folder holds a null byte: leave it out"
    return of_memory(error)


def _overview() -> argparse.ArgumentParser:
    """The parser behind `seqarch --help`; built without the training stack, which takes seconds to import."""
    parser = argparse.ArgumentParser(
        prog="seqarch",
        usage="seqarch COMMAND ...",
        description="What does a sequence mixer do to a language model's base capabilities? Train, measure, compare.",
        epilog="`seqarch COMMAND --help` shows the options of a command. First run: seqarch fit --config quickstart",
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.add_argument(COMPLETION, action="store_true", help="print a completion script for bash and zsh, and exit")
    commands = parser.add_subparsers(title="commands", metavar="")
    others = {name: f"A command of {described(point)}." for name, point in entries(GROUP).items()}
    for name, help in {**TRAINING, **{name: command.help for name, command in COMMANDS.items()}, **others}.items():
        commands.add_parser(name, help=help)
    return parser


def _show_own_warnings() -> None:
    """Show our own warnings as one line each, all others in Python's words."""

    def show_one_line(message, category, filename, lineno, file=None, line=None) -> None:
        others = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
        own = issubclass(category, SeqarchWarning)
        say(f"seqarch: warning: {one_line(message)}" if own else others, file or sys.stderr)

    warnings.showwarning = show_one_line
