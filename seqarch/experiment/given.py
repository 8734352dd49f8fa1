"""Composes recipes and a command line into one tree that knows the place of each value."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

from seqarch.errors import UserError, near
from seqarch.safe_yaml import check_nodes, check_plain, compose

NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[-+]?\d+)?|[-+]?\.(inf|nan)", re.IGNORECASE)
PRINTS = ("--print_config", "--print_completion")
"""Flags that jsonargparse answers before it parses."""
SEVERAL = ("+", "*")
"""The `nargs` of an option that takes several words."""


class Given(NamedTuple):
    """The value at a key: a mapping or list of `Given`, or the text of a scalar; `where` is "FILE:LINE: "."""

    value: Any
    where: str = ""

    def plain(self) -> Any:
        """The value as plain mappings, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: given.plain() for key, given in self.value.items()}
        if isinstance(self.value, list):
            return [given.plain() for given in self.value]
        return yaml.safe_load(self.value) if NUMBER.fullmatch(self.value) else self.value


def read(parser: ArgumentParser, args: Sequence[str]) -> tuple[Given, list[str]]:
    """The values of all flags and recipes, later ones over earlier ones; and the words that belong to no flag.

    Raises:
        UserError: a flag is unknown or has no value, or a recipe names another one in `config`.
    """
    actions = {string: action for action in parser._actions for string in action.option_strings}
    given, words, rest = Given({}), [], list(args)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not is_flag(flag):
            words.append(flag + equals + text)
            continue
        if flag in PRINTS:
            continue
        name = _option(flag, actions)
        action = actions[name]
        missing = not equals and (not rest or is_flag(rest[0]))
        if action.nargs == 0 or flag.endswith(".help") or (missing and action.nargs == "*"):
            continue
        if missing:
            raise UserError(f"{flag} needs a value")
        text = text if equals else rest.pop(0)
        texts = [text]
        while action.nargs in SEVERAL and rest and not is_flag(rest[0]):
            texts.append(rest.pop(0))
        if isinstance(action, ActionConfigFile):
            given = merge(given, _recipe(text, action.dest))
        elif not flag.endswith("+"):  # what is appended to a list is the parser's to check
            value = Given([of_text(each) for each in texts]) if action.nargs in SEVERAL else of_text(text)
            given = merge(given, _under(action.dest + flag.removeprefix(name), value), deep=True)
    return given, words


def _option(flag: str, actions: Mapping[str, Any]) -> str:
    """The option that a flag sets, whole or in part: `--model.mixers` of `--model.mixers.a.init_args.window`."""
    name = flag
    while name not in actions and "." in name:
        name = name.rpartition(".")[0]
    is_section = any(each.startswith(f"{name}.") and not each.endswith(".help") for each in actions)
    if name not in actions or (name != flag and is_section):
        raise UserError(f"unknown option {flag}{near(flag, [each for each in actions if each.startswith('--')])}")
    return name


def _recipe(text: str, key: str) -> Given:
    """A recipe, which must not have the key that would make the parser read another one."""
    recipe = of_file(text)
    if isinstance(recipe.value, dict) and (other := recipe.value.get(key)):
        raise UserError(f"{other.where}{key} belongs on the command line only: a recipe has 'extends'")
    return recipe


def is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not NUMBER.fullmatch(word)


def of_file(name: str) -> Given:
    """The recipe in a file, or in a text of several lines, which Python callers give for a mapping."""
    if "\n" in name:
        return of_text(name)
    root = compose(Path(name))
    return of_node(root, f"{name}:") if root is not None else Given({})


def of_text(text: str) -> Given:
    """A value of the command line."""
    check_plain("a value of the command line", text)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return Given(text)
    if not isinstance(node, yaml.CollectionNode):
        return Given(text)
    check_nodes("a value of the command line", node, set())
    return of_node(node)


def of_node(node: Any, path: str = "") -> Given:
    """A node of YAML. The place of an entry is the place of its key."""
    where = f"{path}{node.start_mark.line + 1}: " if path else ""
    if isinstance(node, yaml.MappingNode):
        pairs = [(key.value, of_node(value, path), f"{path}{key.start_mark.line + 1}: ") for key, value in node.value]
        return Given({key: value._replace(where=line if path else "") for key, value, line in pairs}, where)
    return Given(
        [of_node(item, path) for item in node.value] if isinstance(node, yaml.SequenceNode) else node.value, where
    )


def merge(old: Given, new: Given, *, deep: bool = False, depth: int = 0) -> Given:
    """Lay one over the other: sections key by key, other values whole, unless a flag (`deep`) or class goes deeper.

    A class keeps the options that were given before, to it or to the class that it replaces.
    """
    before, after = (_spec(each.value) for each in (old, new))
    deeper = before and isinstance(new.value, dict) and (deep or depth != 2 or "init_args" in before)
    if not deeper and not ("init_args" in before and after):
        return new
    merged = dict(before)
    for key, each in after.items():
        merged[key] = merge(before[key], each, deep=deep, depth=depth + 1) if key in before else each
    return Given(merged, new.where or old.where)


def merged(layers: Iterable[Any]) -> Any:
    """Plain mappings merged in their order by `merge`."""
    return _plain(functools.reduce(merge, map(_of_plain, layers)))


def _of_plain(value: Any) -> Given:
    return Given({key: _of_plain(each) for key, each in value.items()} if isinstance(value, dict) else value)


def _plain(given: Given) -> Any:
    return {key: _plain(each) for key, each in given.value.items()} if isinstance(given.value, dict) else given.value


def _spec(value: Any) -> Mapping[str, Any]:
    """A mapping; the name of a class becomes one, but not a word such as null."""
    if isinstance(value, str) and value.replace(".", "").isidentifier() and isinstance(yaml.safe_load(value), str):
        return {"class_path": Given(value)}
    return value if isinstance(value, dict) else {}


def _under(key: str, given: Given) -> Given:
    for part in reversed(key.split(".")):
        given = Given({part: given})
    return given
