"""Functions and files stay short enough to be read whole. Triton kernels may be longer."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import seqarch

FUNCTION, FILE = 50, 420
"""The most lines; a function counts from `def` on, with its docstring."""
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
