"""What the tests of Triton kernels need."""

import importlib
from pathlib import Path

import pytest
import torch

from seqarch import kernels


@pytest.fixture
def interpreter(monkeypatch):
    """Our kernels and Triton's own library as the interpreter takes them, also where Triton was imported before."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("on a GPU, `seqarch bench kernels check` checks the kernels")
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in (triton.language, triton.language.standard):
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(value.fn))
    for path in Path(kernels.__path__[0]).glob("*/triton.py"):  # here, since a test may run without its coverage
        importlib.import_module(f"seqarch.kernels.{path.parent.name}.triton")
    # At every call of one function by another Triton maps its language to the interpreter anew, a fifth of all time:
    # a launch does it for its own functions, and once is enough for those of Triton's library.
    library = _patch_lang(triton.language.standard.sum.fn)
    monkeypatch.setattr(
        InterpretedFunction, "__call__", lambda self, *args, **options: self.rewrite()(*args, **options)
    )
    yield
    library.restore()


@pytest.fixture
def poison(monkeypatch):
    """Memory that nobody wrote is NaN, or an index far out of range."""
    empty = torch.empty
    empty_like = torch.empty_like

    def fill(t):
        return t.fill_(float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).min)

    monkeypatch.setattr(torch, "empty", lambda *args, **kw: fill(empty(*args, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kw: fill(empty_like(*args, **kw)))


@pytest.fixture
def fresh_compiler():
    """torch.compile without memory of other tests, whose shapes would make it compile for symbolic ones."""
    torch.compiler.reset()
