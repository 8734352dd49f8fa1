"""Checks a command line and its recipes against the signatures of what they name, before the parser reads them.

Each error names the file and line of the mistake, and what would be right. What cannot be judged here
passes: the parser comes after, and `first_sentence` shortens what it says.
"""

import argparse
import collections.abc
import contextlib
import enum
import functools
import json
import re
import sys
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import Path_fr

from seqarch.errors import UserError, near, one_line, one_of
from seqarch.experiment.given import NUMBER, SEVERAL, Given, of_file, read
from seqarch.experiment.recipes import bundled_recipes, join_recipes
from seqarch.plugins import refusal, resolve

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
SCALARS: dict[Any, typing.Callable[[str], Any]] = {
    int: re.compile(r"[-+]?\d[\d_]*").fullmatch,
    float: NUMBER.fullmatch,
    bool: re.compile("true|false|yes|no|on|off", re.IGNORECASE).fullmatch,
    type(None): re.compile("null|~|", re.IGNORECASE).fullmatch,
}
SEQUENCES = (list, set, collections.abc.Sequence, collections.abc.Iterable)
HELP = ("-h", "--help")
SHAPE = "{class_path: NAME, init_args: {OPTION: VALUE}}"
MAPPINGS = (dict, collections.abc.Mapping)
UNSAID = ("Does not validate against", "Subtypes", "Errors")
"""Beginnings of lines of the parser's messages that come before the reason."""


class Option(NamedTuple):
    """An option of a command or a class."""

    hint: Any
    required: bool
    flag: str
    default: Any


def checked(parser: ArgumentParser, args: Sequence[str], allow: Collection[str] = ()) -> Namespace:
    """What the parser makes of a command line that passes `check`; its errors are a `UserError` too."""
    check(parser, args, allow)
    try:
        return parser.parse_args(join_recipes(args))
    except ArgumentError as error:
        raise UserError(first_sentence(str(error))) from error


def check(parser: ArgumentParser, args: Sequence[str], allow: Collection[str] = ()) -> None:
    """Raise `UserError` for the first thing that is wrong in a command line or in a recipe that it names.

    Args:
        parser: of the command.
        args: the command line without the command, recipes after what they extend.
        allow: packages whose classes may be named, next to those of seqarch and plug-ins.
    """
    commands = next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None)
    name = next((arg for arg in args if commands and arg in commands.choices), None)
    if commands and name:
        check(commands.choices[name], args[args.index(name) + 1 :], allow)
        args = args[: args.index(name)]
    given, words = read(parser, args)
    options = options_of(parser)
    if commands:
        _check_command(commands, words, done=name is not None or any(arg in HELP or "--print" in arg for arg in args))
    positional = [name for name, option in options.items() if not option.flag.startswith("-")]
    if words and not positional:
        is_recipe = "config" in options and (words[0].endswith((".yaml", ".yml")) or words[0] in bundled_recipes())
        hint = f": a recipe is given with --config {words[0]}" if is_recipe else ""
        raise UserError(f"unexpected argument '{words[0]}'{hint}")
    check_given(parser, given, allow)
    inner = (f"{key}.{name}" for key, each in given.value.items() for name in _entries(each))
    there = {*given.value, *inner, *(positional if words else ())}
    missing = [option.flag for name, option in options.items() if option.required and name not in there]
    if missing and not any(arg in HELP or ".help" in arg for arg in args):
        recipe = " (or a recipe that has them: --config FILE)" if "config" in options else ""
        raise UserError(f"missing {', '.join(missing)}{recipe}")


def check_given(parser: ArgumentParser, given: Given, allow: Collection[str] = ()) -> None:
    """Raise `UserError` for the first thing that is wrong in what is given, whatever else is missing."""
    _check_section(given, options_of(parser), "", allow)


def options_of(parser: Any) -> dict[str, Option]:
    """The options of a parser by their keys, sections too."""
    found = {}
    for action in parser._actions:
        flag = next((each for each in action.option_strings if each.startswith("--")), action.dest.upper())
        plain = action.type if action.option_strings and not action.nargs else None
        hint = getattr(action, "_typehint", None) or plain or Any
        if action.dest.rpartition(".")[2] != "help" and not isinstance(action, argparse._SubParsersAction):
            hint = list[hint] if action.nargs in SEVERAL and action.option_strings else hint
            found[action.dest] = Option(hint, action.required and action.nargs != "*", flag, action.default)
    return found


@functools.cache
def parser_of_class(target: type, caller_gives: int = 0) -> ArgumentParser:
    """A parser of the options of a class that a recipe sets: all but the first, which the caller gives."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(target, None, fail_untyped=False, skip={caller_gives} if caller_gives else None)
    return parser


def first_sentence(message: str) -> str:
    """The parser's message for a mistake that passed the check: the key, and the first line with content."""
    key = re.search(r'Parser key "([^"]+)"', message)
    lines = [one_line(re.sub(r"""Parser key "[^"]+"|<class '|'>""", "", line)) for line in message.splitlines()]
    lines = [line for each in lines if (line := each.strip(" :-")) and not line.startswith(UNSAID)]
    sentence = lines[0] if lines else "the command line is wrong; --help shows what is accepted"
    sentence = sentence.replace("Expected a str", "expected text: put it in quotes")
    if denied := re.search(r"Importing '([^']+)' is not allowed", message):
        sentence = refusal(denied[1])
    return f"{key[1]}: {sentence}" if key else sentence


def _check_command(commands: Any, words: Sequence[str], done: bool) -> None:
    if words:
        raise UserError(f"unknown command '{words[0]}'{near(words[0], commands.choices)}")
    if commands.required and not done:
        raise UserError(f"missing command: expected {one_of(list(commands.choices))}")


def _check_section(given: Given, options: dict[str, Option], prefix: str, allow: Collection[str]) -> None:
    known = {name.removeprefix(prefix).partition(".")[0] for name in options if name.startswith(prefix)}
    for name, each in given.value.items():
        key = prefix + name
        inside = any(option.startswith(f"{key}.") for option in options)
        if name not in known:
            what = f"{prefix[:-1]} has no option" if prefix else "there is no key"
            raise UserError(f"{each.where}{what} '{name}'{near(name, known)}")
        if not inside:
            _check_value(options[key].hint, each, key, allow)
            continue
        section = _section(each)
        if not isinstance(section.value, dict):
            raise UserError(f"{section.where}{key} is {_short(section)}: expected a mapping of its options")
        _check_section(section, options, f"{key}.", allow)


def _check_value(hint: Any, given: Given, key: str, allow: Collection[str]) -> None:
    """Refuse a value that does not fit any of the types."""
    kinds = _kinds_of(hint)
    if any(_is_plain(kind, given) for kind in kinds):
        return
    for kind in kinds:
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        fits = origin in SEQUENCES or (origin is tuple and (inner[-1] is ... or len(inner) == len(given.value)))
        if isinstance(given.value, list) and fits:
            hints = inner if origin is tuple and inner[-1] is not ... else inner[:1] * len(given.value)
            for each, one in zip(hints, given.value, strict=True):
                _check_value(each, one, key, allow)
            return
        if isinstance(given.value, dict) and origin in MAPPINGS:
            for name, each in given.value.items():
                _check_value(inner[1], each, f"{key}.{name}", allow)
            return
    bases = {base: caller_gives for base, caller_gives in map(_class_of, kinds) if base}
    spec: Any = {"class_path": given} if isinstance(given.value, str) else given.value
    named = spec.get("class_path") if isinstance(spec, dict) else given
    if bases and (named is None or re.fullmatch(r"[^\W\d][\w.]*", str(named.value))):
        _check_class(bases, spec, given, key, allow)
    else:
        raise UserError(f"{given.where}{key} is {_short(given)}: expected {_kinds(hint)}")


def _check_class(
    bases: dict[type, int], spec: dict[str, Given], given: Given, key: str, allow: Collection[str]
) -> None:
    if "class_path" not in spec:
        if "init_args" in spec or all(bases.values()):
            raise UserError(f"{given.where}{key}: class_path is missing: {SHAPE}")
        return
    named = spec["class_path"]
    try:
        target = resolve(named.value, tuple(bases), allow)
    except UserError as error:
        from seqarch.mixers.registry import broken_parts  # which imports PyTorch

        raise UserError(f"{named.where}{key}: {broken_parts().get(named.value, error)}") from error
    own = ("class_path", "init_args", "dict_kwargs")
    neighbours = {name: each for name, each in spec.items() if name not in own}
    if wrong := next((each for each in neighbours.values() if each.where), None):
        what = "only init_args, which holds the options, may stand next to class_path"
        raise UserError(f"{wrong.where}{key}: {what}: {SHAPE}")
    parser = parser_of_class(target, next(count for base, count in bases.items() if issubclass(target, base)))
    options = options_of(parser)
    _check_value(dict | None, spec.get("init_args", Given({})), f"{key}.init_args", allow)
    set_here = {**_entries(spec.get("init_args")), **neighbours}
    for name, each in set_here.items():
        if name not in options:
            raise UserError(f"{each.where}{key}: {target.__name__} has no option '{name}'{near(name, options)}")
        _check_value(options[name].hint, each, f"{key}.{name}", allow)
    there = {*set_here, *_entries(spec.get("dict_kwargs"))}
    unset = {name: one for name, one in options.items() if name not in there and one.default is not argparse.SUPPRESS}
    if missing := [name for name, option in unset.items() if option.required]:
        needs = f"{target.__name__} needs the option {', '.join(missing)}: give it in init_args"
        raise UserError(f"{named.where}{key}: {needs}")
    for name, option in unset.items():
        try:
            parser.validate(Namespace({name: option.default}), skip_required=True)
            _check_value(option.hint if isinstance(option.default, str) else Any, Given(option.default), name, allow)
        except (TypeError, UserError) as error:
            what = f"{target.__name__} has {option.default!r} as default of its option '{name}', which is not"
            raise UserError(f"{named.where}{key}: {what} {_kinds(option.hint)}: set the option") from error


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_plain(kind: Any, given: Given) -> bool:
    """Whether a value fits a type without inner types; a type that only the parser knows accepts any value."""
    value, origin = given.value, typing.get_origin(kind)
    if kind is str:
        return isinstance(value, str) or not given.where  # the command line's may look like a list
    if kind in SCALARS:
        return isinstance(value, str) and SCALARS[kind](value) is not None
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        return value in choices or str(value).lower() in map(json.dumps, choices)  # `True` of Python is `true` of YAML
    if not typing.get_args(kind) and (bare := origin or kind) in (*SEQUENCES, *MAPPINGS, tuple):
        return isinstance(value, dict if bare in MAPPINGS else list)
    return origin not in (*SEQUENCES, *MAPPINGS, tuple) and _class_of(kind)[0] is None


def _class_of(kind: Any) -> tuple[type | None, int]:
    """The class that a name or mapping describes, and the number of its first arguments that the caller gives."""
    if typing.get_origin(kind) is collections.abc.Callable and typing.get_args(kind):
        arguments, kind = typing.get_args(kind)
        return _class_of(kind)[0], 0 if arguments is ... else len(arguments)
    ours = isinstance(kind, type) and kind.__module__.partition(".")[0] not in sys.stdlib_module_names
    return (kind, 0) if ours and not issubclass(kind, (str, int, float, enum.Enum)) else (None, 0)


def _entries(given: Given | None) -> dict[str, Given]:
    return given.value if given and isinstance(given.value, dict) else {}


def _section(given: Given) -> Given:
    """The options of a section. The command line may name a file of them, which the parser reads; a file may not."""
    if isinstance(given.value, str) and not given.where:
        with contextlib.suppress(TypeError):
            return of_file(str(Path_fr(given.value).absolute))  # pyright: ignore[reportCallIssue]
    return given


def _kinds(hint: Any) -> str:
    """A type, or those of a union, in words."""
    literals = [kind for kind in _kinds_of(hint) if typing.get_origin(kind) is typing.Literal]
    words = [str(choice) for kind in literals for choice in typing.get_args(kind)]
    words += [_kind(kind) for kind in _kinds_of(hint) if kind not in literals]
    return one_of([word for word in dict.fromkeys(words) if word != "null" or len(words) == 1])


def _kind(kind: Any) -> str:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in SEQUENCES or (origin is tuple and inner[-1] is ...):
        return "a list, such as [a, b]"
    if origin is tuple:
        return f"a tuple with {len(inner)} elements"
    if origin in MAPPINGS:
        return "a mapping, such as {name: value}"
    if base := _class_of(kind)[0]:
        return f"{base.__name__}, as NAME or {{class_path: NAME, init_args: ...}}"
    return KINDS.get(kind) or getattr(kind, "__name__", str(kind))


def _short(given: Given) -> str:
    text = one_line(given.plain())
    return (text if len(text) <= 80 else text[:77] + "...") or "empty"
