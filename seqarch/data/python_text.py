"""Docstrings and bare code of Python files, by parsing only."""

import ast
import warnings
from pathlib import Path

Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings_of(path: Path) -> list[str]:
    """The docstrings of a file in their order; of `pydoc_data/topics.py` the topics. Empty if it cannot be parsed."""
    tree = _parse(path)
    if tree is None:
        return []
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return [text for text in strings if isinstance(text, str) and "\n" in text]
    owners = [node for node in ast.walk(tree) if isinstance(node, Documented)]
    owners.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in owners if (text := ast.get_docstring(node))]


def code_of(path: Path) -> str:
    """The code of a file without comments and docstrings, evenly laid out. Empty if it cannot be parsed."""
    tree = _parse(path)
    if tree is None:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
    return ast.unparse(tree)


def _parse(path: Path) -> ast.Module | None:
    with warnings.catch_warnings():
        # Old string escapes in other people's files are not this user's concern.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            return None
