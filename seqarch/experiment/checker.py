"""Parses a tree by the signatures of what it names.

The names of classes are decided first, on the name. Then the parser judges the values, as data. If it complains, the
tree is read once more, value by value: the error names the file and line of the mistake and what would be right.
"""

import argparse
import collections.abc
import copy
import enum
import functools
import inspect
import re
import sys
import typing
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser, Namespace
from jsonargparse.typing import get_registered_type

from seqarch.arguments import Interval, Limited, check_limits, choices_of, has_limits, kinds_of, parts_of
from seqarch.errors import UserError, near, one_line, one_of
from seqarch.experiment.recipes import SEVERAL, bundled_recipes, compose, is_flag
from seqarch.experiment.tree import SPEC, Tree
from seqarch.plugins import FLAG, resolve, trust

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
SEQUENCES = (list, set, collections.abc.Sequence, collections.abc.Iterable)
MAPPINGS = (dict, collections.abc.Mapping)
CONTAINERS = (*SEQUENCES, *MAPPINGS, tuple)
NUMBERS = (int, float, list, dict)
"""Types of values that are numbers or may hold some."""
HELP = ("-h", "--help", "--help_all")
SHAPE = "{class_path: NAME, init_args: {OPTION: VALUE}}"
UNSAID = ("Does not validate against", "Subtypes", "Errors")
"""Beginnings of lines of the parser's messages that come before the reason."""


class Option(NamedTuple):
    """An option of a command or a class."""

    hint: Any
    required: bool
    flag: str
    default: Any


def parse_tree(parser: ArgumentParser, tree: Tree, allow: Collection[str] = ()) -> Namespace:
    """The values of a tree as the parser has them, and the defaults of all other options.

    Args:
        parser: of the options.
        tree: the values by section and option.
        allow: packages whose classes may be named, next to those of seqarch and plug-ins.

    Raises:
        UserError: the first thing that is wrong, with its file and line.
    """
    trust(allow)
    content = _Reader(allow).section(tree, options_of(parser))
    try:
        parsed = parser.parse_object(content, defaults=False)
    except ArgumentError as error:
        raise complaint(parser, tree, error, allow) from error
    values = _defaults(parser).clone()
    values.update(parsed)
    return values


def check_tree(parser: ArgumentParser, tree: Tree, allow: Collection[str] = ()) -> None:
    """Raise `UserError` for the first value of a tree that is wrong, whatever is missing."""
    trust(allow)
    _Reader(allow, judges=True).section(tree, options_of(parser))


def complaint(
    parser: ArgumentParser, tree: Tree, error: ArgumentError, allow: Collection[str] = (), words: Sequence[str] = ()
) -> UserError:
    """What is wrong in a tree that the parser refuses: a value, a missing option, or in the parser's own words."""
    try:
        check_tree(parser, tree, allow)
    except UserError as wrong:
        return wrong
    options = options_of(parser)
    present = {*tree.value, *(f"{key}.{name}" for key, part in tree.value.items() for name in part.entries())}
    present.update(name for name, option in options.items() if words and not option.flag.startswith("-"))
    missing = [option.flag for name, option in options.items() if option.required and name not in present]
    recipe = " (or a recipe that has them: --config FILE)" if "config" in options else ""
    return UserError(f"missing {', '.join(missing)}{recipe}" if missing else first_sentence(str(error)))


def parse_command(parser: ArgumentParser, args: Sequence[str]) -> Namespace:
    """The options of a command line without recipes; errors as for `parse_tree`."""
    inner, rest, name, names = parser, list(args), "", []
    while name is not None and (commands := _commands(inner)):
        name = next((arg for arg in rest if arg in commands.choices), None)
        before = rest[: rest.index(name)] if name else rest
        _check_command(commands, compose(inner, before)[1], done=name is not None or bool({*HELP} & {*args}))
        if name:
            names.append(name)
            inner, rest = commands.choices[name], rest[rest.index(name) + 1 :]
    tree, words = compose(inner, rest)
    check_words(inner, words)
    _check_groups(inner, rest, words)
    try:
        values = section = parser.parse_args(args)
    except ArgumentError as error:
        raise complaint(inner, tree, error, words=words) from error
    for name in names:
        section = section[name]
    for key, option in options_of(inner).items():
        check_limits(option.flag, section.get(key), option.hint)
    return values


def check_words(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Raise `UserError` for words of a command line that belong to no flag, where the command takes none."""
    options = options_of(parser)
    if words and not _commands(parser) and all(option.flag.startswith("-") for option in options.values()):
        is_recipe = "config" in options and (words[0].endswith((".yaml", ".yml")) or words[0] in bundled_recipes())
        hint = f": a recipe is given with --config {words[0]}" if is_recipe else ""
        raise UserError(f"unexpected argument '{words[0]}'{hint}")


def _check_groups(parser: ArgumentParser, args: Sequence[str], words: Sequence[str]) -> None:
    """Raise `UserError` for a flag of a group "with X" or "without X", a flag or a word, that has no effect there."""
    used = {re.split("[=.]", word)[0] for word in args if is_flag(word)}
    for group in parser._action_groups:
        when, _, other = (group.title or "").partition(" ")
        flags = {flag for action in group._group_actions for flag in action.option_strings}
        if when in ("with", "without") and (other in {*used, *words}) != (when == "with") and (wrong := used & flags):
            reverse = {"with": "without", "without": "with"}[when]
            raise UserError(f"{min(wrong)} has no effect {reverse} {other}: leave it out")


@functools.cache
def options_of(parser: Any) -> dict[str, Option]:
    """The options of a parser by their keys, sections too."""
    options = {}
    for action in parser._actions:
        flag = next((string for string in action.option_strings if string.startswith("--")), action.dest.upper())
        hint = hint_of(action)
        if action.dest.rpartition(".")[2] != "help" and not isinstance(action, argparse._SubParsersAction):
            hint = list[hint] if action.nargs in SEVERAL and action.option_strings else hint
            options[action.dest] = Option(hint, action.required and action.nargs != "*", flag, action.default)
    return options


def hint_of(action: argparse.Action) -> Any:
    """The type of the value of an option."""
    plain = action.type if action.option_strings and not action.nargs else None
    return getattr(action, "_typehint", None) or plain or Any


@functools.cache
def parser_of_class(target: type, caller_gives: int = 0) -> ArgumentParser:
    """A parser of the options of a class that a recipe sets: all but the first, which the caller gives."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(target, None, fail_untyped=False, skip={caller_gives} if caller_gives else None)
    return parser


def first_sentence(message: str) -> str:
    """The parser's message for a mistake that no type shows: the key, and the first line with content."""
    key = re.search(r'Parser key "([^"]+)"', message)
    lines = [one_line(re.sub(r"""Parser key "[^"]+"|<class '|'>""", "", line)) for line in message.splitlines()]
    lines = [line for each in lines if (line := each.strip(" :-")) and not line.startswith(UNSAID)]
    sentence = lines[0] if lines else "the command line is wrong; --help shows what is accepted"
    return f"{key[1]}: {sentence}" if key else sentence


def _import_path(target: type) -> str:
    """The shortest name by which a class can be imported, as configurations of runs have it."""
    parts = target.__module__.split(".")
    modules = (sys.modules.get(".".join(parts[:depth])) for depth in range(1, len(parts)))
    found = [each.__name__ for each in modules if each and vars(each).get(target.__name__) is target]
    return f"{(*found, target.__module__)[0]}.{target.__qualname__}"


def as_named(default: Any) -> Any:
    """A default as configurations have it, with the names of its classes; itself where it has none."""
    if isinstance(default, type):
        return _import_path(default)
    if not isinstance(default, dict | list | tuple):
        return default
    parts = default if isinstance(default, dict) else dict(enumerate(default))
    named = {name: as_named(each) for name, each in parts.items()}
    if all(named[name] is each for name, each in parts.items()):
        return default
    return named if isinstance(default, dict) else [*named.values()]


class _Reader(NamedTuple):
    """Turns a tree into plain data for the parser; `judges` also refuses the first value that does not fit its type."""

    allow: Collection[str]
    judges: bool = False

    def section(self, tree: Tree, options: dict[str, Option], prefix: str = "") -> dict[str, Any]:
        """The options of a section, or of the root."""
        rests = [name.removeprefix(prefix) for name in options if name.startswith(prefix)]
        names = {rest.partition(".")[0] for rest in rests}
        sections = {rest.partition(".")[0] for rest in rests if "." in rest}
        content = {}
        for name, part in tree.value.items():
            key = prefix + name
            if name not in names:
                raise UserError(f"{part.where}{prefix[:-1] or 'the recipe'} has no option '{name}'{near(name, names)}")
            if name not in sections:
                content[name] = self.of(options[key].hint, part, key)
            elif isinstance(part.value, dict):
                content[name] = self.section(part, options, f"{key}.")
            else:
                raise UserError(f"{part.where}{key} is {_short(part)}: expected a mapping of its options")
        return content

    def of(self, hint: Any, tree: Tree, key: str) -> Any:
        """The value of an option of this type."""
        kinds = kinds_of(hint)
        plain = self._parts(kinds, tree, key)
        if isinstance(plain, NUMBERS) and plain is not True and plain is not False and has_limits(hint):
            check_limits(tree.where + key, plain, hint)
        if self.judges and not _fits(hint, plain):
            raise _wrong(parts_of(hint), tree, key)
        return plain

    def _option(self, option: Option, tree: Tree, key: str) -> Any:
        """The value of an option of a class. A default may name its classes: their code is trusted already."""
        named = as_named(option.default)
        is_default = named is not option.default and tree.plain() == named
        return copy.deepcopy(option.default) if is_default else self.of(option.hint, tree, key)

    def _parts(self, kinds: Sequence[Any], tree: Tree, key: str) -> Any:
        choices = choices_of(kinds)
        is_scalar = not isinstance(tree.value, list | dict)
        if is_scalar and (type(tree.value) in kinds or tree.value in choices):
            return tree.value
        takes_text = tree.text in choices or (str in kinds and (is_scalar or {*kinds} <= {str, type(None)}))
        if tree.text is not None and takes_text:
            return tree.text  # the spelling, whatever YAML makes of it
        if tree.value is None and {int, float, bool, str} & {*kinds}:
            return "null"  # None would be an unset option
        if (items := self._items(kinds, tree, key)) is not None:
            return items
        bases = {base: caller_gives for base, caller_gives in map(class_of, kinds) if base}
        spec = {"class_path": tree} if isinstance(tree.value, str) else tree.entries()
        named = spec.get("class_path")
        is_name = named is None or (isinstance(named.value, str) and re.fullmatch(r"[^\W\d][\w.]*", named.value))
        if not (bases and spec and is_name):
            if isinstance(tree.value, str) and (bases or any(typing.get_origin(kind) in CONTAINERS for kind in kinds)):
                raise _wrong(kinds, tree, key)  # the parser would read it as YAML
            return tree.plain()
        if named is None:
            if "init_args" in spec or all(bases.values()):
                raise UserError(f"{tree.where}{key}: class_path is missing: {SHAPE}")
            return tree.plain()
        return self._class(bases, spec, named, key, choices)

    def _items(self, kinds: Sequence[Any], tree: Tree, key: str) -> Any:
        """A list or mapping whose items have a type; `None` for other values."""
        for kind in kinds:
            origin, inner = typing.get_origin(kind), typing.get_args(kind)
            if isinstance(tree.value, list) and origin in (*SEQUENCES, tuple):
                hints = inner if origin is tuple and inner[-1:] != (...,) else inner[:1] * len(tree.value)
                if len(hints) == len(tree.value):
                    return [self.of(hint, part, key) for hint, part in zip(hints, tree.value, strict=True)]
            if isinstance(tree.value, dict) and origin in MAPPINGS:
                return {name: self.of(inner[1], part, f"{key}.{name}") for name, part in tree.value.items()}
        return None

    def _class(
        self, bases: dict[type, int], spec: dict[str, Tree], named: Tree, key: str, words: Sequence[Any]
    ) -> dict[str, Any]:
        """A class with all of its options; one of `words` could stand in its place."""
        try:
            target = resolve(named.value, tuple(bases), self.allow, words)
        except UserError as error:
            from seqarch.mixers.registry import broken_parts  # which imports PyTorch

            raise UserError(f"{named.where}{key}: {broken_parts().get(named.value, error)}") from error
        if wrong := next((part for name, part in spec.items() if name not in SPEC), None):
            raise UserError(f"{wrong.where}{key}: the options of a class stand in init_args: {SHAPE}")
        caller_gives = next(count for base, count in bases.items() if issubclass(target, base))
        options = options_of(parser_of_class(target, caller_gives))
        own = spec.get("init_args", Tree({}))
        if own.value is not None and not isinstance(own.value, dict):
            raise _wrong((dict,), own, f"{key}.init_args")
        renamed = getattr(target, "renamed", {})
        named_options = {renamed.get(name, name): part for name, part in own.entries().items()}
        more = spec.get("dict_kwargs", Tree({}))
        named_here = {**named_options, **more.entries()} if more.value and not _takes_any(target) else named_options
        if wrong := next((name for name in named_here if name not in options), None):
            place = f"{named_here[wrong].where}{key}: {target.__name__}"
            raise UserError(f"{place} has no option '{wrong}'{near(wrong, options)}")
        set_here = {name: self._option(options[name], part, f"{key}.{name}") for name, part in named_options.items()}
        unset = {name: option for name, option in options.items() if name not in {*set_here, *more.entries()}}
        if missing := [name for name, option in unset.items() if option.required]:
            raise UserError(f"{named.where}{key}: {target.__name__} needs the option {', '.join(missing)} in init_args")
        defaults = {name: one.default for name, one in unset.items() if one.default is not argparse.SUPPRESS}
        if wrong := next((name for name in defaults if name in _wrong_defaults(target, caller_gives)), None):
            what = f"{target.__name__} has {defaults[wrong]!r} as default of its option '{wrong}', which is not"
            raise UserError(f"{named.where}{key}: {what} {_in_words(kinds_of(options[wrong].hint))}: set the option")
        # the parser would find several classes by a bare name that torch.optim has too
        path = named.value if "." in named.value else _import_path(target)
        plain = {"class_path": path, "init_args": {**copy.deepcopy(defaults), **set_here}}
        return {**plain, "dict_kwargs": more.plain()} if more.value else plain


@functools.cache
def _defaults(parser: ArgumentParser) -> Namespace:
    """The defaults of a parser that does not change any more."""
    return parser.get_defaults()


def _takes_any(target: type) -> bool:
    """Whether a class takes options that the parser does not know (`dict_kwargs`); one of ours names all of its own."""
    parameters = inspect.signature(target).parameters.values()
    return not issubclass(target, Limited) and any(each.kind is each.VAR_KEYWORD for each in parameters)


@functools.cache
def _wrong_defaults(target: type, caller_gives: int) -> set[str]:
    """The options of a class whose default is not of their type."""
    options = options_of(parser_of_class(target, caller_gives)).items()
    return {name for name, option in options if not (option.required or _fits(option.hint, option.default))}


def _fits(hint: Any, plain: Any) -> bool:
    """Whether the parser takes a value for an option of this type."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        parser.parse_object({"value": copy.deepcopy(plain)})
    except ArgumentError:
        return False
    return True


def _commands(parser: ArgumentParser) -> Any:
    """The commands below a command."""
    return next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)


def _check_command(commands: Any, words: Sequence[str], done: bool) -> None:
    if words:
        raise UserError(f"unknown command '{words[0]}'{near(words[0], commands.choices)}")
    if commands.required and not done:
        raise UserError(f"missing command: expected {one_of(list(commands.choices))}")


def class_of(kind: Any) -> tuple[type | None, int]:
    """The class that a name or mapping describes, and the number of its first arguments that the caller gives."""
    if typing.get_origin(kind) is collections.abc.Callable and typing.get_args(kind):
        arguments, kind = typing.get_args(kind)
        return class_of(kind)[0], 0 if arguments is ... else len(arguments)
    ours = isinstance(kind, type) and kind.__module__.partition(".")[0] not in sys.stdlib_module_names
    is_value = not ours or issubclass(kind, (str, int, float, enum.Enum)) or get_registered_type(kind)
    return (None, 0) if is_value else (kind, 0)


def _wrong(kinds: Sequence[Any], tree: Tree, key: str) -> UserError:
    return UserError(f"{tree.where}{key} is {_short(tree)}: expected {_in_words(kinds)}")


def _in_words(kinds: Sequence[Any]) -> str:
    """The types of an option."""
    words = [str(choice) for choice in choices_of(kinds)]
    words += [_kind(kind) for kind in kinds if typing.get_origin(kind) is not typing.Literal]
    return one_of([word for word in dict.fromkeys(words) if word != "null" or len(words) == 1])


def _kind(kind: Any) -> str:
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Annotated:
        return _kind(inner[0]) + "".join(f" ({limit})" for limit in inner[1:] if isinstance(limit, Interval))
    if origin in SEQUENCES or (origin is tuple and inner[-1] is ...):
        return "a list, such as [a, b]"
    if origin is tuple:
        return f"a list of {len(inner)} elements, such as [{', '.join('abcdefgh'[: len(inner)])}]"
    if origin in MAPPINGS:
        return "a mapping, such as {name: value}"
    if origin is type:
        return f"a class of seqarch, of a plug-in, or of a package that {FLAG} names"
    if base := class_of(kind)[0]:
        return f"{base.__name__}, as NAME or {{class_path: NAME, init_args: ...}}"
    return KINDS.get(kind) or getattr(kind, "__name__", str(kind))


def _short(tree: Tree) -> str:
    text = one_line(tree.plain() if tree.text is None else tree.text)
    return (text if len(text) <= 80 else text[:77] + "...") or "empty"
