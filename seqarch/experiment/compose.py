"""Composes recipes, mappings and a command line into one tree, which the parser gets as data."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

from seqarch.errors import UserError, near
from seqarch.experiment.recipes import find_recipe, over_base, read_recipe
from seqarch.experiment.tree import NUMBER, Tree, appended, at, merge, put, read_file, read_plain, read_text

PRINT = "--print_config"
"""The flag whose value may be left out."""
SEVERAL = ("+", "*")
"""The `nargs` of an option that takes several words."""


def compose(
    parser: ArgumentParser,
    args: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Tree, list[str]]:
    """The values of a recipe, a command line and overrides, later ones over earlier ones.

    Args:
        parser: of the command.
        args: flags, and recipes by `--config`, each over what it extends.
        recipe: a recipe as a file would hold it; its `extends` names another.
        overrides: values by their dotted keys; a text is read as on the command line.

    Returns:
        the tree, and the words that belong to no flag.

    Raises:
        UserError: a flag is unknown or has no value, or a recipe cannot be read.
    """
    tree = over_base(read_plain(recipe or {}))
    actions = {string: action for action in parser._actions for string in action.option_strings}
    words = []
    for flag, texts in _split(args, actions):
        if not flag:
            words += texts
            continue
        name = _option(flag, actions)
        action = actions[name]
        if isinstance(action, ActionConfigFile):
            tree = merge(tree, read_recipe(find_recipe(texts[0])))
            continue
        is_file = _is_section(flag, actions) and os.path.isfile(texts[0])
        parts = [read_file(Path(part)) if is_file else read_text(part) for part in texts]
        keys = f"{action.dest}{flag.removeprefix(name)}".split(".")
        value = Tree(parts) if action.nargs in SEVERAL else parts[0]
        tree = put(tree, keys, appended(at(tree, keys), value) if flag.endswith("+") else value)
    for key, value in (overrides or {}).items():
        tree = _overridden(tree, key, value)
    return tree, words


def _split(args: Sequence[str], actions: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The flags of a command line that have values, each with these; "" with each word that belongs to no flag."""
    rest = list(args)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not is_flag(flag):
            yield "", [flag + equals + text]
            continue
        if flag == PRINT:
            continue
        action = actions[_option(flag, actions)]
        missing = not equals and (not rest or is_flag(rest[0]))
        if action.nargs == 0 or flag.endswith(".help") or (missing and action.nargs == "*"):
            continue
        if missing or (not text and equals and isinstance(action, ActionConfigFile)):
            raise UserError(f"{flag} needs a value")
        texts = [text if equals else rest.pop(0)]
        while action.nargs in SEVERAL and rest and not is_flag(rest[0]):
            texts.append(rest.pop(0))
        yield flag, texts


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, not a value such as -1."""
    return word.startswith("-") and word != "-" and not NUMBER.fullmatch(word)


def _option(flag: str, actions: Mapping[str, Any]) -> str:
    """The option that a flag sets, whole or in part: `--model.mixers` of `--model.mixers.a.init_args.window`."""
    name = flag
    while name not in actions and "." in name:
        name = name.rpartition(".")[0]
    if name not in actions or (name != flag and _is_section(name, actions)):
        raise UserError(f"unknown option {flag}{near(flag, [other for other in actions if other.startswith('--')])}")
    return name


def _is_section(flag: str, actions: Mapping[str, Any]) -> bool:
    """Whether there are options below a flag; the parser takes a file of them too."""
    return any(other.startswith(f"{flag}.") and not other.endswith(".help") for other in actions)


def _overridden(tree: Tree, key: str, value: Any) -> Tree:
    """An override over what was there, a section's key by key; below, the names of a mapping stand as in a file."""
    if isinstance(value, Mapping) and "." not in key:
        for name, part in value.items():
            tree = _overridden(tree, f"{key}.{name}", part)
        return tree
    return put(tree, key.split("."), read_text(value) if isinstance(value, str) else read_plain(value, key))
