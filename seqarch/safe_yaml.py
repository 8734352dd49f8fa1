"""Reads YAML of other people: only plain data, and not much more of it than the file is long.

Nested aliases can turn a file of a few lines into billions of entries ("billion laughs"), and a tag can ask for a
Python object. Both are refused before anything walks the content.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from seqarch.errors import UserError, refused

FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader of libyaml, which takes a thirtieth of the time; some builds of PyYAML do not have it."""
LARGEST = 20_000
"""Entries of a configuration, aliases counted as often as they are used; the longest of ours has some 200."""
DEEPEST = 50
LONGEST = 300
"""Digits of a whole number, which then has a value as a float too."""
MARKS = re.compile(r"[&\[{]")
TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge")
}


def load(path: Path) -> Any:
    """The content of a YAML file as plain data. Raises `UserError` as `compose` does."""
    node = compose(path)
    if node is None:
        return None
    # a date that there is not is a ValueError
    with refused(str(path), yaml.YAMLError, ValueError, why=lambda error: getattr(error, "problem", None) or error):
        return SafeConstructor().construct_document(node)


def is_word(text: str) -> bool:
    """Whether recipes read a name as itself, not as another value, such as no, 010, 1e3 or a date."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    number = re.fullmatch(r"[\d_.]+e[-+]?\d+", text, re.IGNORECASE)  # of YAML 1.2; the parser takes both versions
    return node is not None and node.tag == "tag:yaml.org,2002:str" and not number


def nodes(text: str, name: str) -> Any:
    """The nodes of a YAML text; `name` is what it is called if it nests too deeply."""
    with refused(f"{name} nests too deeply to be a configuration", RecursionError):
        try:
            return yaml.compose(text, Loader=FAST)
        except yaml.YAMLError:  # the other loader says what is wrong more clearly, and that nodes nest too deeply
            return yaml.compose(text, Loader=yaml.SafeLoader)


def compose(path: Path) -> yaml.Node | None:
    """The nodes of a YAML file, which know their lines.

    Raises:
        UserError: it is not YAML, has a tag, repeats a key or unfolds into more than `LARGEST` entries.
    """
    no_text = f"{path} is not text: a configuration is a YAML file, saved as UTF-8"
    with refused(no_text, UnicodeDecodeError, yaml.YAMLError):
        try:
            root = nodes(path.read_text(encoding="utf-8"), str(path))
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            tab = "; indent with spaces" if "\\t" in str(error.problem) else ""
            raise UserError(f"{path}:{line}: is not valid YAML: {error.problem}{tab}") from error
    if root is not None:
        check_nodes(str(path), root)
    return root


def check_nodes(name: str, root: yaml.Node) -> None:
    """Refuse nodes as `check_plain` does, and a tag, a repeated key or a key that is not a word."""
    for node in _parts(name, root, _children):
        where = f"{name}:{node.start_mark.line + 1}"
        if node.tag not in TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise UserError(f"{where}: '{tag}' is a tag; a configuration holds plain values only")
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST:  # Python refuses to print such a number
            raise UserError(f"{where}: a number has {len(node.value):,} digits, more than {LONGEST:,}")
        if isinstance(node, yaml.ScalarNode):
            _check_text(f"{where}: the text", node.value)
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"{name}:{line}: a key must be a word, not a list or a mapping")
            if key.value in lines:
                raise UserError(f"{name}:{line}: '{key.value}' is already in line {lines[key.value]}: keep one")
            lines[key.value] = line


def parts_of(name: str, tree: Any) -> list[Any]:
    """The parts of nested mappings and lists, each once; `UserError` if they nest too deeply or are too many."""
    return _parts(name, tree, _items)


def check_plain(name: str, tree: Any) -> None:
    """Refuse nested mappings and lists as `compose` does a file, and texts in them that are such YAML."""
    parts = parts_of(name, tree)
    if any(isinstance(part, int) and abs(part) >= 10**LONGEST for part in parts):
        raise UserError(f"{name}: a number has more than {LONGEST:,} digits")
    for text in {part for part in parts if isinstance(part, str)}:
        _check_text(name, text)


def _check_text(name: str, text: str) -> None:
    if MARKS.search(text):  # the parser reads such a text as YAML
        try:
            node = nodes(text, name)
        except yaml.YAMLError:
            return
        _parts(name, node, _children)


def _parts(name: str, tree: Any, children: Callable[[Any], list[Any]]) -> list[Any]:
    """All parts of a tree, each once.

    Args:
        name: of the tree.
        tree: the root; a part counts once for each place that it is in.
        children: the parts of a part.

    Raises:
        UserError: the tree contains itself, has more than `LARGEST` entries or is deeper than `DEEPEST`.
    """
    known: dict[int, tuple[int, int]] = {}
    parts: list[Any] = []

    def measure(part: Any, depth: int) -> tuple[int, int]:
        """The number of entries below a part, with itself, and their depth."""
        if id(part) not in known and depth <= DEEPEST:
            known[id(part)] = LARGEST + 1, 0  # until it is counted: what contains itself is too large
            parts.append(part)
            entries, levels = 1, 0
            for child in children(part):
                size, below = measure(child, depth + 1)
                entries, levels = entries + size, max(levels, below)
            known[id(part)] = entries, levels + 1
        size, below = known.get(id(part), (0, DEEPEST))
        if size > LARGEST:
            raise UserError(f"{name} stands for more than {LARGEST:,} entries: aliases in it repeat each other")
        if depth + below > DEEPEST + 1:
            raise UserError(f"{name} nests too deeply to be a configuration")
        return size, below

    measure(tree, 0)
    return parts


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _items(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [*tree.keys(), *tree.values()]
    return list(tree) if isinstance(tree, list | tuple | set | frozenset) else []
