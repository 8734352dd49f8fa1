"""A tree of values that knows the file and line of each, and how one tree is laid over another."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import get_loader

from seqarch.errors import UserError
from seqarch.safe_yaml import TAGS, check_nodes, check_plain, compose, nodes, parts_of

NUMBER = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[-+]?\d+)?|[-+]?\.(inf|nan)", re.IGNORECASE)
SPEC = ("class_path", "init_args", "dict_kwargs")
"""The keys of a class and its options in a recipe."""
TYPED = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))
A_FLAG = "a value of the command line"


class Tree(NamedTuple):
    """A mapping or list of trees, or a scalar; `where` is "FILE:LINE: ", `text` the spelling of a scalar or a flag."""

    value: Any
    where: str = ""
    text: str | None = None

    def plain(self) -> Any:
        """The value as mappings, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: part.plain() for key, part in self.value.items()}
        return [part.plain() for part in self.value] if isinstance(self.value, list) else self.value

    def entries(self) -> "dict[str, Tree]":
        """The parts of a mapping; none of any other value."""
        return self.value if isinstance(self.value, dict) else {}


def read_file(path: Path) -> Tree:
    """The content of a YAML file."""
    root = compose(path)
    return _of_node(root, f"{path}:") if root is not None else Tree(None)


def read_text(text: str) -> Tree:
    """A value of the command line. What is not YAML, or is text in it, is text as it stands."""
    try:
        node = nodes(text, A_FLAG)
    except yaml.YAMLError:
        return Tree(text, text=text)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag not in TAGS):
        return Tree(text, text=text)
    check_nodes(A_FLAG, node)
    if isinstance(node, yaml.CollectionNode):
        return _of_node(node)._replace(text=text)
    value = _scalar(node)
    return Tree(text if isinstance(value, str) else value, text=text)


def read_plain(value: Any, name: str = "the recipe", *, arrays: bool = True) -> Tree:
    """A mapping, list or scalar of Python; a class becomes its name.

    Args:
        value: what is read.
        name: of what is read, for errors.
        arrays: whether numbers of NumPy and PyTorch count as those of Python.

    Raises:
        UserError: there is another value in it, or `check_plain` refuses it.
    """
    check_plain(name, value)
    return _of_plain(value, name, arrays)


def _of_plain(value: Any, name: str, arrays: bool) -> Tree:
    if isinstance(value, Mapping):
        return Tree({str(key): _of_plain(part, name, arrays) for key, part in value.items()})
    if arrays and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return Tree([_of_plain(part, name, arrays) for part in value])
    if isinstance(value, type):
        value = name_of_class(value)
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str | int | float | None):
        raise UserError(f"{name} holds {value!r}: expected plain values and classes")
    return Tree(value, text=value if isinstance(value, str) else None)


def name_of_class(value: type) -> str:
    """The name by which a class can be imported.

    Raises:
        UserError: there is none, as for a class that a function made.
    """
    path = f"{value.__module__}.{value.__qualname__}"
    if "<" in path:
        raise UserError(f"{path} cannot be imported by its name: define the class at the top of a module or script")
    return path


def modules_of_classes(value: Any) -> set[str]:
    """The modules of the classes in nested mappings and lists of Python."""
    return {part.__module__ for part in parts_of("the recipe", value) if isinstance(part, type)}


def _of_node(node: Any, path: str = "") -> Tree:
    """A node of YAML. The place of an entry is the place of its key."""
    where = f"{path}{node.start_mark.line + 1}: " if path else ""
    if isinstance(node, yaml.SequenceNode):
        return Tree([_of_node(item, path) for item in node.value], where)
    if not isinstance(node, yaml.MappingNode):
        return Tree(_scalar(node), where, node.value)
    parts = {key.value: _of_node(value, path) for key, value in node.value}
    if path:
        lines = {key.value: f"{path}{key.start_mark.line + 1}: " for key, _ in node.value}
        parts = {key: part._replace(where=lines[key]) for key, part in parts.items()}
    return Tree(parts, where)


def _scalar(node: yaml.ScalarNode) -> Any:
    """The value as jsonargparse reads it: `1e-3` is a number, a date is text."""
    is_typed = node.tag in TYPED or (not node.style and NUMBER.fullmatch(node.value))
    return get_loader("yaml")(node.value) if is_typed else node.value


def merge(old: Tree, new: Tree, depth: int = 0) -> Tree:
    """Lay one recipe over another: sections key by key, other values whole, but a class keeps the options before.

    It keeps those that were set for it or for the class that it replaces.
    """
    before, after = _spec(old), _spec(new)
    deeper = before and isinstance(new.value, dict) and (depth != 2 or "class_path" in before)
    if not deeper and not ("init_args" in before and after):
        return _with_classes(before, new, depth)
    merged = dict(before)
    for key, part in after.items():
        merged[key] = merge(before[key], part, depth + 1) if key in before else part
    return Tree(merged, new.where or old.where, new.text)


def _with_classes(before: Mapping[str, Tree], new: Tree, depth: int) -> Tree:
    """Mixers that replace those before; one that names no class is of the class that had its name."""
    if not isinstance(new.value, dict):
        return new
    kept = {}
    for name, part in new.value.items():
        options_only = "init_args" in _spec(part) and "class_path" not in _spec(part)
        kept[name] = merge(before[name], part, depth + 1) if options_only and name in before else part
    return Tree(kept, new.where, new.text)


def put(tree: Tree, keys: Sequence[str], value: Tree, depth: int = 0) -> Tree:
    """Set the value at a path of keys. A class that is named anew keeps its options, another class drops them."""
    before = _spec(tree)
    if not keys:
        after = _spec(value)
        changed = "class_path" in before and "class_path" in after and _name(before) != _name(after)
        return value if changed else merge(tree, value, depth)
    if "class_path" in before and keys[0] not in SPEC:
        keys = ["init_args", *keys]
    return Tree({**before, keys[0]: put(before.get(keys[0], Tree({})), keys[1:], value, depth + 1)}, tree.where)


def at(tree: Tree, keys: Sequence[str]) -> Tree:
    """The part at a path of keys, those of lists being indices; an empty mapping if there is none."""
    for key in keys:
        in_list = isinstance(tree.value, list) and key.isdecimal()
        tree = tree.value[int(key)] if in_list else tree.entries().get(key, Tree({}))
    return tree


def _spec(tree: Tree) -> Mapping[str, Tree]:
    """The parts of a mapping; the name of a class becomes one."""
    if isinstance(tree.value, str) and tree.value.replace(".", "").isidentifier():
        return {"class_path": tree}
    return tree.entries()


def _name(spec: Mapping[str, Tree]) -> str:
    """The last part of the name of a class."""
    return str(spec["class_path"].value).rpartition(".")[2]
