"""Every op: its inputs fit it, its reference is precise, and its Triton kernels keep its tolerance."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

from seqarch import kernels
from seqarch.kernels import OPS, Op, select_chunks
from seqarch.kernels.op import SlowPathWarning
from seqarch.testing.compare import relative_error
from tests.kernels import inputs

KERNELS = [name for name, op in OPS.items() if any(backend.name == "triton" for backend in op.backends)]

FINE = ("attention_decode", "qkv_convolution", "selective_scan", "short_convolution", "top1_chunk_decode")
TF32 = ("delta_rule", "gated_delta_rule2", "rwkv6", "rwkv7", "taylor_linear_attention")
TOLERANCE = {**dict.fromkeys(FINE, 1e-4), **dict.fromkeys(TF32, 3e-3)}
"""Largest relative errors by norm in float32. fla multiplies in TF32, with 10 bits of mantissa."""


def small(name, B=1):
    """Few rows and tokens in float32, which the interpreter walks one by one, and chunks that the kernels take."""
    sizes = {"B": B, "H": 1} if name == "qkv_convolution" else {"B": B}
    sizes |= {"T": 21} if "T" in inspect.signature(inputs.OF_OPS[name]).parameters else {}
    chunks = {"chunk_size": 16} if name in ("select_chunks", "top1_chunk_attention", "top1_chunk_decode") else {}
    return {**inputs.OF_OPS[name](**sizes, dtype=torch.float32), **chunks}


def turned(t):
    """The same numbers with the dims the other way round in memory."""
    dims = tuple(reversed(range(t.dim())))
    return t.detach().permute(dims).contiguous().permute(dims).requires_grad_(t.requires_grad)


def outputs_and_gradients(name, arguments, backend, turns=False):
    """Outputs and gradients by name, with `turns` of weights in another layout. A selection has no gradients."""
    options = {"backend": backend} if OPS[name].backends else {}
    found = getattr(kernels, name)(**arguments, **options)
    found = list(found) if isinstance(found, tuple) else [found]
    leaves = [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    differentiable = [t for t in found if t.requires_grad]
    if not differentiable:
        return found
    generator = torch.Generator().manual_seed(1)
    turn = turned if turns else lambda t: t
    weights = [turn(torch.randn(t.shape, generator=generator).to(t.dtype)) for t in differentiable]
    return found + list(torch.autograd.grad(differentiable, leaves, weights))


def widened(arguments):
    def wide(t):
        return t.detach().double().requires_grad_(t.requires_grad)

    return {n: wide(t) if torch.is_tensor(t) and t.is_floating_point() else t for n, t in arguments.items()}


@pytest.mark.parametrize("name", OPS)
def test_inputs_are_arguments_in_their_order(name):
    given = list(inputs.OF_OPS[name]())
    parameters = list(inspect.signature(getattr(kernels, name)).parameters)
    assert [p for p in parameters if p in given] == given
    required = [n for n, p in inspect.signature(getattr(kernels, name)).parameters.items() if p.default is p.empty]
    assert set(required) <= set(given)


@pytest.mark.parametrize("name", OPS)
def test_inputs_repeat_and_take_dtype_and_seed(name):
    first, again, other = inputs.OF_OPS[name](), inputs.OF_OPS[name](), inputs.OF_OPS[name](seed=1)
    tensors = [n for n, t in first.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    assert all(torch.equal(first[n], again[n]) and not torch.equal(first[n], other[n]) for n in tensors)
    drawn = inputs.OF_OPS[name](dtype=torch.bfloat16, seed=None)
    assert {drawn[n].dtype for n in tensors} <= {torch.bfloat16, torch.float32}
    assert drawn[tensors[0]].dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in OPS if name != "linear_cross_entropy"])
def test_a_batch_without_rows(name):
    empty, full = (outputs_and_gradients(name, inputs.OF_OPS[name](B=rows), "reference") for rows in (0, 5))
    assert [t.shape for t in empty] == [(0, *t.shape[1:]) if t.shape[:1] == (5,) else t.shape for t in full]


@pytest.mark.parametrize("name", OPS)
def test_references_in_float32_keep_the_tolerance(name):
    arguments = inputs.OF_OPS[name](dtype=torch.float32)
    found = outputs_and_gradients(name, arguments, "reference")
    wanted = outputs_and_gradients(name, widened(arguments), "reference")
    assert all(relative_error(a, b) <= TOLERANCE.get(name, 1e-3) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("interpreter", "poison")
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_the_tolerance_in_any_layout(name):
    """The interpreter's fixture holds the layout of each result against what compilers are told."""
    plain = small(name, B=2)
    arguments = {key: turned(t) if torch.is_tensor(t) else t for key, t in plain.items()}
    found = outputs_and_gradients(name, arguments, "triton", turns=True)
    wanted = outputs_and_gradients(name, widened(plain), "reference")
    assert all(relative_error(a, b) <= TOLERANCE.get(name, 1e-3) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("interpreter", "fresh_compiler")
@pytest.mark.parametrize("name", KERNELS)
def test_auto_on_a_gpu_compiles_without_breaks(name, monkeypatch):
    """One graph holds the choice of the backend as on a GPU, and the kernels of that backend."""
    monkeypatch.setattr(Op, "choose", lambda self, backend, *args: self._fastest(*args))
    arguments = small(name)
    function = getattr(kernels, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        found = torch.compile(function, fullgraph=True, backend="eager")(**arguments)
        wanted = function(**arguments)
    found, wanted = (t if isinstance(t, tuple) else (t,) for t in (found, wanted))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_decays_are_those_asked_for():
    assert inputs.ssd(decay="none")["A"] is None
    assert inputs.ssd(decay="one")["A"] is None
    assert inputs.ssd(decay="one")["log_decay"].max() <= 0
    assert inputs.selective_scan(decay="full")["A"].max() < 0
    assert inputs.rwkv7()["log_decay"].min() >= -0.607


def test_vectors_are_of_unit_length_where_asked_for():
    drawn = inputs.attention(1, 5, 4, 8, Tk=9, HK=2, normalised=True)
    assert {n: tuple(t.shape) for n, t in drawn.items()} == {"q": (1, 5, 4, 8), "k": (1, 9, 2, 8), "v": (1, 9, 2, 8)}
    torch.testing.assert_close(drawn["k"].norm(dim=-1), torch.ones(1, 9, 2, dtype=torch.float64))
    assert select_chunks(drawn["q"], drawn["k"], chunk_size=2).shape == (1, 5, 4)
