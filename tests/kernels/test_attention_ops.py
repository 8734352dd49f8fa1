"""Every attention op equals its definition, forward and backward, however it is called."""

import functools
import itertools

import pytest
import torch

from seqarch import kernels
from seqarch.errors import UserError
from seqarch.kernels import blocks
from tests.kernels import naive

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
OPS = {
    "softmax": ("softmax_attention", {}),
    "window": ("softmax_attention", {"window": 37}),
    "alibi": ("softmax_attention", {"alibi_slopes": SLOPES}),
    "alibi-window": ("softmax_attention", {"alibi_slopes": SLOPES, "window": 20}),
    "exact": ("top1_chunk_attention", {"chunk_size": 16}),
    "exact-128": ("top1_chunk_attention", {"chunk_size": 128, "scale": 1.0}),
    "approx": ("top1_chunk_attention", {"chunk_size": 16, "selection": "approx"}),
    "three-remote": ("top1_chunk_attention", {"chunk_size": 16, "remote_chunks": 3}),
    "element": ("top1_element_attention", {}),
}
LENGTHS = (1, 127, 128, 129, 300)


@pytest.fixture(params=OPS)
def op(request):
    """(the op, its definition)"""
    name, options = OPS[request.param]
    return tuple(functools.partial(getattr(module, name), **options) for module in (kernels, naive))


each_function = pytest.mark.parametrize("op", ["softmax", "exact", "element"], indirect=True)
"""Refusals do not depend on the options."""


@pytest.fixture
def small_blocks(monkeypatch):
    """Compute scores in many blocks of 16 queries or one chunk, as for long sequences."""
    monkeypatch.setattr(blocks, "SCORE_BYTES", 1)


@pytest.mark.parametrize("T", LENGTHS)
def test_definition(op, T):
    ours, definition = op
    q, k, v = draw = naive.draw(B=1 if T > 200 else 2, Tq=T)
    naive.assert_same_gradients(ours(q, k, v), definition(q, k, v), draw)


@pytest.mark.parametrize("T", [63, 129])
@pytest.mark.usefixtures("small_blocks")
def test_definition_in_blocks(op, T):
    ours, definition = op
    q, k, v = draw = naive.draw(Tq=T)
    naive.assert_same_gradients(ours(q, k, v), definition(q, k, v), draw)


@pytest.mark.parametrize("Tq", [1, 5, 40])
def test_queries_are_the_last_positions(op, Tq):
    ours, definition = op
    q, k, v = draw = naive.draw(Tq=Tq, Tk=129)
    before = torch.randn(2, 129 - Tq, 4, 16, dtype=q.dtype)
    whole = definition(torch.cat([before, q], dim=1), k, v)
    naive.assert_same_gradients(ours(q, k, v), whole[:, -Tq:], draw)


@pytest.mark.parametrize("HK", [1, 2])
def test_shared_key_heads(op, HK):
    ours, definition = op
    q, k, v = draw = naive.draw(Tq=70, HK=HK)
    naive.assert_same_gradients(ours(q, k, v), definition(q, k, v), draw)


@pytest.mark.parametrize("Tq", [140, 90, 1])
def test_packed_documents_are_separate(op, Tq):
    """Fewer queries than keys are the last of the row."""
    ours, definition = op
    borders, first = [0, 1, 40, 40, 57, 140], 140 - Tq
    q, k, v = draw = naive.draw(B=1, Tq=Tq, Tk=140)
    packed = ours(q, k, v, cu_seqlens=torch.tensor(borders, dtype=torch.int32))
    pairs = [(a, b) for a, b in itertools.pairwise(borders) if a < b and b > first]
    alone = [definition(q[:, max(a - first, 0) : b - first], k[:, a:b], v[:, a:b]) for a, b in pairs]
    naive.assert_same_gradients(packed, torch.cat(alone, dim=1), draw)


def test_tensors_need_not_be_contiguous(op):
    ours, definition = op
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in naive.draw(Tq=50))
    naive.assert_same_gradients(ours(q, k, v), definition(q, k, v), (q, k, v))


def test_float32(op):
    ours, definition = op
    exact = naive.draw(Tq=129, seed=3)
    q, k, v = (t.detach().float().requires_grad_() for t in exact)
    o = ours(q, k, v)
    assert o.dtype == torch.float32
    naive.assert_close(o, definition(*exact), 1e-5)


def test_autocast_decides_the_dtype(op):
    ours, definition = op
    exact = naive.draw(Tq=100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = ours(*(t.detach().float() for t in exact))
    assert o.dtype == torch.bfloat16
    rounded = [t.detach().bfloat16().double() for t in exact]
    naive.assert_close(o, definition(*rounded), 1e-2)


@pytest.mark.usefixtures("small_blocks", "fresh_compiler")
@pytest.mark.parametrize("op", ["alibi-window", "three-remote"], indirect=True)
def test_compiles_without_breaks(op):
    ours, definition = op
    q, k, v = draw = naive.draw(Tq=40)  # three blocks of queries, and two remote chunks for the last
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    naive.assert_same_gradients(compiled(q, k, v), definition(q, k, v), draw)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_for_symbolic_lengths():
    compiled = torch.compile(kernels.softmax_attention, fullgraph=True, backend="aot_eager")
    for length in (40, 48, 1):  # symbolic after the first
        q, k, v = draw = naive.draw(Tq=length)
        naive.assert_same_gradients(compiled(q, k, v), naive.softmax_attention(q, k, v), draw)


def test_no_scores_are_kept_for_the_backward_pass(op, monkeypatch):
    """What autograd keeps grows with T, not with T^2: no tensor is larger than the keys and values of one block."""
    monkeypatch.setattr(blocks, "SCORE_BYTES", 2**16)
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    sizes = []
    for T in (512, 1024):
        kept.clear()
        q, k, v = naive.draw(B=1, Tq=T, H=4, D=8, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            op[0](q, k, v)
        sizes.append(sum(kept.values()))
    assert sizes[1] <= 2.5 * sizes[0]


@each_function
def test_second_backend_is_not_replaced(op):
    ours, _ = op
    with pytest.raises(UserError, match="backend"):
        ours(*naive.draw(), backend="cuda-graphs")


@each_function
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q must have shape \[B, Tq, H, D\], not"),
        (lambda q, k, v: (q, k, v[..., :8]), r"v must have shape \[B, Tk, HK, D\] = \[2, 10, 4, 16\]"),
        (lambda q, k, v: (q[:1], k, v), r"k must have shape \[B, Tk, HK, D\] = \[1, Tk, HK, 16\]"),
        (lambda q, k, v: (q, k[:, :, :3], v[:, :, :3]), "give a divisor"),
        (lambda q, k, v: (q, k[:, :9], v[:, :9]), "Tq = 10 is above Tk = 9"),
        (lambda q, k, v: (q, k.float(), v), "dtype"),
        (lambda q, k, v: (q.int(), k.int(), v.int()), "floating-point"),
    ],
)
def test_wrong_tensors(op, change, message):
    with pytest.raises(UserError, match=message):
        op[0](*change(*naive.draw(Tq=10)))


@each_function
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale must be positive"),
        ({"cu_seqlens": torch.tensor([0, 10])}, "int32"),
        ({"cu_seqlens": torch.tensor([0, 10], dtype=torch.int32)}, "B = 1"),
    ],
)
def test_wrong_options(op, options, message):
    with pytest.raises(UserError, match=message):
        op[0](*naive.draw(Tq=10), **options)


@each_function
@pytest.mark.parametrize("borders", [[1, 10], [0, 9], [0, 7, 5, 10]])
def test_wrong_borders(op, borders):
    with pytest.raises(UserError, match="must rise from 0 to T = 10"):
        op[0](*naive.draw(B=1, Tq=10), cu_seqlens=torch.tensor(borders, dtype=torch.int32))
