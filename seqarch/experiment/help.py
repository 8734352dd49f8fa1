"""`--help` in plain words: what an option means, what it takes and its default, without the names of Python's types."""

from __future__ import annotations

import re
from argparse import SUPPRESS, Action
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from seqarch.arguments import Limit, choices_of, kinds_of, parts_of
from seqarch.experiment.checker import MAPPINGS, SEQUENCES, class_of, hint_of

WORDS = {int: "INT", float: "NUMBER", bool: "{true,false}"}
OWN = {
    ".help": "show the options of CLASS",
    "print_config": "print the whole configuration, which is a recipe; =skip_default leaves out what a default sets",
}
"""What we say in place of the parser's help."""
MANY = 6
SECTION = "Path to a configuration file."
"""The parser's help of a flag such as `--model`, which takes a file with a section of a recipe."""


class Parser(ArgumentParser):
    """A parser with our help, also of a class (`--model.mixers.help NSA`), that raises what is wrong."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Help, "exit_on_error": False, **options})


def subcommand(commands: Any, words: str, description: str) -> ArgumentParser:
    """Add the command `seqarch WORDS`, named by the last word, to its parent command; return its parser."""
    parser = Parser(description=description)
    sentence = description.partition(".")[0]
    commands.add_subcommand(words.rpartition(" ")[2], parser, help=sentence[0].lower() + sentence[1:])
    parser.prog = f"seqarch {words}"
    return parser


class Help(DefaultHelpFormatter):
    """Writes each option as `--data.num_workers INT  loader processes ... (in 0..256; default 0)`."""

    def add_argument(self, action: Action) -> None:
        if action.help != SECTION:
            super().add_argument(action)

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        return _word(hint_of(action)) or super()._get_default_metavar_for_optional(action)

    def _format_action_invocation(self, action: Action) -> str:
        text = super()._format_action_invocation(action)  # with a second name for a list, which we refuse
        return re.sub(r", --[\w.]+\+ \S+", "", text).replace("CLASS_PATH_OR_NAME", "CLASS")

    def _get_help_string(self, action: Action) -> str:
        facts = "; ".join(_facts(action))
        name = ".help" if action.dest.endswith(".help") else action.dest
        text = OWN.get(name, action.help or "").replace("``", "`").rstrip(".")
        return f"{text} ({facts})" if facts else text


def _word(hint: Any) -> str:
    """What stands for a value of this type, or nothing for a text or what has many forms."""
    kinds = [kind for kind in kinds_of(hint) if kind is not NoneType]
    choices = [str(choice) for choice in choices_of(kinds)]
    if choices or str in kinds:
        few = len(choices) < MANY and all(get_origin(kind) is Literal for kind in kinds)
        return f"{{{','.join(choices)}}}" if few else ""
    for kind in kinds:
        origin = get_origin(kind) or kind
        if origin in SEQUENCES or origin is tuple:
            return "LIST"
        if origin in MAPPINGS:
            return "MAPPING"
        if kind in WORDS or class_of(kind)[0]:
            return WORDS.get(kind, "CLASS")
    return ""


def _facts(action: Action) -> Iterator[str]:
    if action.required and action.option_strings:
        yield "required"
    for kind in parts_of(hint_of(action)):
        if get_origin(kind) is Annotated:
            yield from (str(limit) for limit in get_args(kind)[1:] if isinstance(limit, Limit))
    known = getattr(action, "extra_help", str)()
    if names := re.findall(r"(\w+)(?=,|$)", known.partition(": ")[2]):
        yield ", ".join(dict.fromkeys(names))
    if action.nargs != 0 and (default := _value(action.default)):
        yield f"default {default}"


def _value(default: Any) -> str:
    """A default as it is written in a recipe, or nothing where nothing is set."""
    if default in (None, SUPPRESS, ""):
        return ""
    if isinstance(default, list | tuple):
        return f"[{', '.join(map(str, default))}]" if default else ""
    return str(default).lower() if isinstance(default, bool) else str(default)
