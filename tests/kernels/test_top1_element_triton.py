"""The Triton kernels of Top-1 element attention under Triton's interpreter; `pytest -m gpu` is for the GPU.

The interpreter's bf16 products are wrong, so float32 and float16 stand in.
"""

import functools
import os

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import top1_element_attention
from tests.kernels import naive

pytestmark = pytest.mark.usefixtures("interpreter", "poison")

CASES = [
    # B, Tq, Tk, H, HK, D
    (1, 1, 1, 2, 1, 32),
    (2, 127, 127, 2, 1, 24),
    (1, 128, 128, 2, 2, 16),
    (1, 20, 150, 2, 2, 32),
    (1, 1, 129, 2, 1, 32),
    (1, 100, 100, 1, 1, 96),
    (1, 70, 70, 1, 1, 256),
]


def draw(B, Tq, Tk, H, HK, D, *, dtype=torch.float32, seed=0):
    """Inputs in `dtype` and the same numbers in float64."""
    tensors = naive.draw(B, Tq, H, D, Tk=Tk, HK=HK, seed=seed)
    narrow = [t.detach().to(dtype).requires_grad_() for t in tensors]
    return narrow, [t.detach().double().requires_grad_() for t in narrow]


def assert_same(o, narrow, expected, wide, ratio):
    """Outputs and all gradients; what is selected does not depend on rounding, so outputs are equal."""
    assert torch.equal(o.double(), expected)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
    got = torch.autograd.grad(o, narrow, do)
    for name, a, b in zip("qkv", got, torch.autograd.grad(expected, wide, do.double()), strict=True):
        naive.assert_close(a, b, ratio, name=f"d{name}")


@pytest.mark.parametrize(("B", "Tq", "Tk", "H", "HK", "D"), CASES)
def test_definition(B, Tq, Tk, H, HK, D):
    narrow, wide = draw(B, Tq, Tk, H, HK, D)
    o = top1_element_attention(*narrow, backend="triton")
    assert_same(o, narrow, naive.top1_element_attention(*wide), wide, 1e-5)


@pytest.mark.no_cover
@pytest.mark.parametrize(("scale", "ratio"), [(0.01, 1e-5), (1.0, 1e-5), (50.0, 1e-3)])
def test_scale(scale, ratio):
    """Scores of 50 times q . k leave one probability of 1 in most rows, and reach 1500: nothing overflows."""
    narrow, wide = draw(1, 140, 140, 2, 1, 32)
    o = top1_element_attention(*narrow, scale=scale, backend="triton")
    assert_same(o, narrow, naive.top1_element_attention(*wide, scale=scale), wide, ratio)


@pytest.mark.no_cover
@pytest.mark.parametrize(("Tq", "Tk", "HK"), [(129, 129, 2), (30, 200, 1)])
def test_half_precision(Tq, Tk, HK):
    narrow, wide = draw(1, Tq, Tk, 2, HK, 32, dtype=torch.float16)
    o = top1_element_attention(*narrow, backend="triton")
    assert_same(o, narrow, naive.top1_element_attention(*wide), wide, 2e-3)


@pytest.mark.no_cover
def test_a_key_far_above_the_rest_takes_every_query():
    """One sum of dv over all queries; the distribution is sharp, and dq and dk are small but right."""
    narrow, wide = draw(1, 300, 300, 1, 1, 32)
    for tensors in (narrow, wide):
        with torch.no_grad():
            tensors[0][..., 0] = 4.0
            tensors[1][:, 0, :, 0] = 20.0
    o = top1_element_attention(*narrow, backend="triton")
    assert torch.equal(o, narrow[2][:, :1].expand_as(o))
    assert_same(o, narrow, naive.top1_element_attention(*wide), wide, 1e-4)


@pytest.mark.no_cover
def test_values_with_a_large_common_part():
    """dP is one large number for all keys plus a small part. Only the small part makes the gradient."""
    narrow, wide = draw(1, 140, 140, 2, 2, 32)
    for tensors in (narrow, wide):
        with torch.no_grad():
            tensors[2] += 16.0
    wide = [t.detach().double().requires_grad_() for t in narrow]
    o = top1_element_attention(*narrow, backend="triton")
    assert_same(o, narrow, naive.top1_element_attention(*wide), wide, 1e-4)


def test_equal_scores_go_to_the_first_key():
    q, k, v = (t.detach().round().float() for t in naive.draw(1, 150, 2, 16))
    o = top1_element_attention(q, torch.ones_like(k), v, backend="triton")
    assert torch.equal(o, v[:, :1].expand_as(o))
    # Two equal largest keys, in other columns of other blocks of keys.
    k[:, 3] = k[:, 70] = 10.0
    o = top1_element_attention(torch.ones_like(k), k, v, backend="triton")
    assert torch.equal(o[:, 70:], v[:, 3:4].expand_as(o)[:, 70:])


@pytest.mark.parametrize(("borders", "Tq"), [([0, 1, 40, 40, 57, 140], 140), ([0, 0, 64, 128, 140], 90)])
def test_packed_documents(borders, Tq):
    narrow, wide = draw(1, Tq, 140, 2, 1, 16)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    o = top1_element_attention(*narrow, cu_seqlens=cu_seqlens, backend="triton")
    expected = top1_element_attention(*wide, cu_seqlens=cu_seqlens, backend="reference")
    assert_same(o, narrow, expected, wide, 1e-5)


def test_tensors_need_not_be_contiguous():
    """Heads before positions, q and k cut out of one projection, and a gradient with equal elements."""
    base = torch.randn(2, 100, 3, 4, 32, generator=torch.Generator().manual_seed(0))
    q, k = (base[:, :, i, ::2].requires_grad_() for i in (0, 1))
    v = base[:, :, 2, :2].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    o = top1_element_attention(q, k, v, backend="triton")
    expected = naive.top1_element_attention(*wide)
    got = torch.autograd.grad(o.sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(expected.sum(), wide), strict=True):
        naive.assert_close(a, b, 1e-5)


def test_rows_without_finite_scores_do_not_hide():
    narrow, _ = draw(1, 40, 40, 1, 1, 16)
    with torch.no_grad():
        narrow[0][:, 7] = float("nan")
    o = top1_element_attention(*narrow, backend="triton")
    assert o[:, 7].isnan().all()
    assert o[:, :7].isfinite().all()
    assert o[:, 8:].isfinite().all()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_breaks_for_any_length():
    narrow, wide = draw(1, 70, 70, 2, 1, 16)
    ours = functools.partial(top1_element_attention, backend="triton")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same(compiled(*narrow), narrow, naive.top1_element_attention(*wide), wide, 1e-5)


def test_no_scores_are_kept_for_the_backward_pass():
    narrow, _ = draw(1, 256, 256, 2, 2, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        top1_element_attention(*narrow, backend="triton")
    assert max(kept) == narrow[0].numel()


@pytest.mark.parametrize(("D", "dtype", "message"), [(16, torch.float64, "float64"), (257, torch.float32, "257 dims")])
def test_what_the_kernels_cannot_do(D, dtype, message):
    narrow, _ = draw(1, 10, 10, 1, 1, D, dtype=dtype)
    with pytest.raises(UserError, match=message):
        top1_element_attention(*narrow, backend="triton")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter was asked for")
def test_no_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="not on a CUDA device"):
        top1_element_attention(*naive.draw(1, 10, 1, 16, dtype=torch.float32), backend="triton")
