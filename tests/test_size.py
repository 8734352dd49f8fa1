"""Functions, files and the package stay short enough to be read whole. Triton kernels may be longer."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import seqarch

FUNCTION, FILE, PACKAGE = 50, 420, 20_020
"""The most lines: of a function from `def` on with its docstring, of the package by `code_lines`."""
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SOURCES = sorted(Path(seqarch.__file__).parent.rglob("*.py"))


def too_long(source: str, most: int = FUNCTION) -> Iterator[str]:
    """The functions outside of Triton kernels that have more lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > most and not any("triton" in ast.unparse(each) for each in node.decorator_list):
                yield f"{node.name}: {lines}"


def test_no_function_and_no_file_is_long():
    assert len(SOURCES) > 200
    sources = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert {path: found for path, source in sources.items() if (found := list(too_long(source)))} == {}
    assert {path: lines for path, source in sources.items() if (lines := source.count("\n")) > FILE} == {}


def code_lines(source: str) -> int:
    """The number of lines with code, without docstrings (of attributes too), comments and blank lines."""
    words = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in NO_CODE]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - words)


def test_the_package_is_small():
    assert sum(code_lines(path.read_text(encoding="utf-8")) for path in SOURCES) <= PACKAGE


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""Module.\n\nMore.\n"""\n\nimport os  # why\n', 1),
        ('X = 1\n"""Of an attribute."""\n# a comment\n', 1),
        ('def f():\n    """Doc."""\n\n    return (\n        1,\n        # one\n    )\n', 4),
        ('TEXT = """\n\nthree lines\n"""\n', 4),
    ],
)
def test_what_counts_as_a_line_of_code(source, lines):
    assert code_lines(source) == lines


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f():\n    x = 1\n    return x\n", ["f: 3"]),
        ("async def f():\n    x = 1\n    return x\n", ["f: 3"]),
        ("class C:\n    @property\n    def f(self):\n        x = 1\n        return x\n", ["f: 3"]),
        ("@triton.jit\ndef f():\n    x = 1\n    return x\n", []),
        ("def f():\n    return 1\n", []),
    ],
)
def test_a_long_function_is_found(source, found):
    assert list(too_long(source, most=2)) == found
