"""Which backend runs: the one asked for, or a refusal; with "auto" the fastest that can, with a warning if slower."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import math
import warnings
from pathlib import Path

import pytest
import torch

from seqarch import kernels
from seqarch.errors import UserError
from seqarch.kernels import OPS, Backend, Op, kernels_of, op, packages


class OnGPU:
    """The attributes of a GPU tensor that decide which backend runs."""

    is_cuda = True
    device = torch.device("cuda")

    def __init__(self, dtype=torch.bfloat16, shape=()):
        self.dtype = dtype
        self.shape = shape


def reference(x, size=0):
    return "reference"


def runs(name):
    return lambda x, size=0: name


def at_most(limit):
    return lambda x, size=0: f"it takes {limit} at most" if size > limit else None


DOUBLER = Op(
    "doubler",
    reference,
    (
        Backend("own", runs("own"), "triton", obstacle=at_most(10)),
        Backend("other", runs("other"), "fla", obstacle=at_most(20)),
        Backend("asked", runs("asked"), automatic=False),
    ),
)
PEERS = Op(
    "peers",
    reference,
    (Backend("first", runs("first"), obstacle=at_most(10)), Backend("second", runs("second"), peer=True)),
)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(op, "WARNED", set())


@pytest.fixture
def installed(monkeypatch):
    """Sets what counts as installed."""

    def install(*names):
        for package in packages.FOUND:
            monkeypatch.setitem(packages.FOUND, package, package in names)

    return install


def quiet(run):
    """What the call gives; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return run()


def test_the_reference_runs_where_asked_for_and_on_a_cpu():
    assert quiet(lambda: DOUBLER.run("auto", torch.ones(1))) == "reference"
    assert quiet(lambda: DOUBLER.run("reference", OnGPU())) == "reference"


def test_auto_takes_the_fastest_that_takes_the_call(installed):
    installed("triton", "fla")
    assert quiet(lambda: DOUBLER.run("auto", OnGPU())) == "own"
    assert quiet(lambda: PEERS.run("auto", OnGPU(), 10)) == "first"
    assert quiet(lambda: PEERS.run("auto", OnGPU(), 11)) == "second", "nothing is slower, and nothing to say"


def test_a_slower_way_is_said_once_with_the_reason(installed):
    installed("triton", "fla")
    with pytest.warns(op.SlowPathWarning, match="'own' cannot run this: it takes 10 at most; 'other' runs instead"):
        assert DOUBLER.run("auto", OnGPU(), 11) == "other"
    assert quiet(lambda: DOUBLER.run("auto", OnGPU(), 12)) == "other"


def test_plain_pytorch_on_a_gpu_is_said(installed):
    installed("triton", "fla")
    with pytest.warns(op.SlowPathWarning, match=r"takes 10 at most; .*takes 20 at most; plain PyTorch runs instead"):
        assert DOUBLER.run("auto", OnGPU(), 21) == "reference"


def test_float64_is_what_most_backends_do_not_take(installed):
    installed("triton", "fla")
    with pytest.warns(op.SlowPathWarning, match="it does not take float64"):
        assert DOUBLER.run("auto", OnGPU(torch.float64)) == "reference"


def test_a_missing_package_is_refused_with_the_command_and_said_where_another_runs(installed):
    installed("fla")
    with pytest.warns(op.SlowPathWarning, match="it is not installed: pip install triton; 'other' runs instead"):
        assert DOUBLER.run("auto", OnGPU()) == "other"
    installed()
    with pytest.raises(
        UserError, match=r'no backend for CUDA is here: .*pip install triton; or pip install "fla-core"'
    ):
        DOUBLER.run("auto", OnGPU())
    with pytest.raises(UserError, match=r'is here: pip install "fla-core"'):
        DOUBLER.run("auto", OnGPU(), 11)


@pytest.mark.parametrize(
    ("backend", "x", "size", "message"),
    [
        ("own", OnGPU(), 11, "backend 'own' cannot run this: it takes 10 at most"),
        ("own", OnGPU(torch.float64), 1, "it does not take float64"),
        ("other", OnGPU(), 1, "backend 'other' cannot run this: it is not installed: pip install"),
        ("asked", torch.ones(1), 1, "the tensors are on cpu, not on a CUDA device"),
        ("cuda", OnGPU(), 1, "unknown backend 'cuda'"),
    ],
)
def test_what_is_asked_for_runs_or_is_refused(installed, backend, x, size, message):
    installed("triton")
    assert DOUBLER.run("own", OnGPU(), 10) == "own"
    assert DOUBLER.run("asked", OnGPU()) == "asked"
    with pytest.raises(UserError, match=message):
        DOUBLER.run(backend, x, size)


def test_the_interpreter_takes_what_needs_triton_to_the_cpu(monkeypatch, installed):
    installed("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert DOUBLER.run("own", torch.ones(1)) == "own"
    assert DOUBLER.run("auto", torch.ones(1)) == "reference"
    with pytest.raises(UserError, match="not on a CUDA device"):
        DOUBLER.run("asked", torch.ones(1))


def test_a_compiled_graph_warns_when_it_is_traced():
    """Tensors on a GPU; here the op takes every tensor for one."""
    doubled = Op("doubled", lambda x: 2 * x, (Backend("own", lambda x: 3 * x, obstacle=lambda x: "it never runs"),))
    compiled = torch.compile(lambda x: doubled._fastest(x)(x), fullgraph=True, backend="eager")
    with pytest.warns(op.SlowPathWarning, match="doubled: backend 'own' cannot run this: it never runs; plain PyTorch"):
        assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert quiet(lambda: compiled(torch.ones(3))).tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", OPS)
def test_ops_are_those_of_the_public_functions(name):
    function = getattr(kernels, name)
    assert OPS[name].name == name == function.__name__
    options = inspect.signature(function).parameters
    assert ("backend" in options) == bool(OPS[name].backends)
    assert all(p.kind is p.KEYWORD_ONLY for p in options.values() if p.default is not p.empty and p.name != "bias")


def test_every_public_function_is_an_op():
    functions = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))} - {"kernels_of"}
    assert functions == set(OPS)


def positional(name):
    """Fewest and most arguments of a function "package.module:function" by position, from its source: no import."""
    module, _, function = name.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (found,) = (node.args for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    most = len(found.posonlyargs) + len(found.args)
    return most - len(found.defaults), math.inf if found.vararg else most


@pytest.mark.parametrize("name", OPS)
def test_backends_take_the_arguments_of_the_reference(name):
    """`run` and `obstacle` get the arguments by position."""
    op = OPS[name]
    count = len(inspect.signature(op.reference).parameters)
    for backend in op.backends:
        if isinstance(backend.run, str):
            fewest, most = positional(backend.run)
            assert fewest <= count <= most
        for function in {backend.run, backend.obstacle}:
            if callable(function):
                inspect.signature(function).bind(*range(count))


def test_a_backend_is_imported_at_its_first_call():
    """Only the modules of Triton kernels import what a backend needs, and nothing imports them."""
    files = [path for path in Path(kernels.__path__[0]).rglob("*.py") if not path.stem.startswith("triton")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    statements = [node for tree in trees for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {name for node in statements for name in [getattr(node, "module", None), *(a.name for a in node.names)]}
    assert {"seqarch.kernels.ssd.op", "torch"} <= imported
    assert not [name for name in imported if name and {*name.split(".")} & {"triton", "fla", "mamba_ssm"}]
    assert Backend("own", "math:isqrt").function() is math.isqrt


def test_tables_name_what_runs():
    assert kernels_of([OPS["delta_rule"], OPS["qkv_convolution"]]) == {"cpu": "PyTorch", "cuda": "fla, own Triton"}
    assert kernels_of([]) == {"cpu": "PyTorch", "cuda": "PyTorch"}


def test_a_compiled_decoding_step_is_plain_pytorch(installed, monkeypatch):
    installed("triton", "fla")
    fusing = dataclasses.replace(DOUBLER, fuses=True)
    few, many = OnGPU(shape=(2, 1, 8)), OnGPU(shape=(2, 64, 8))
    with torch.no_grad():
        assert fusing.choose("auto", few) is not reference
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert fusing.choose("auto", few) is reference
        assert fusing.choose("auto", many) is not reference
        assert DOUBLER.choose("auto", few) is not reference
    assert fusing.choose("auto", few) is not reference  # with gradients
