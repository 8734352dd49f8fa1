"""Attention of all kinds, its entropy, decoding and the loss on a GPU, against float64.

New memory holds NaN, so that an element that a kernel does not write shows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from seqarch.kernels import (
    attention_entropy,
    linear_cross_entropy,
    select_chunks,
    softmax_attention,
    top1_chunk_attention,
    top1_chunk_decode,
    top1_element_attention,
)
from tests.kernels.on_cuda import assert_as_float64, assert_selected_as_float64, assert_within, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, FP16: 1e-2, FP32: 1e-3}
"""Largest relative error of outputs and gradients, by norm."""


def borders(*ends: int) -> torch.Tensor:
    return torch.tensor([0, *ends], dtype=torch.int32, device="cuda")


def last_queries(HK: int = 4) -> list[torch.Tensor]:
    """300 queries of the last of 1,000 keys."""
    return [draw(2, 300, 4, 64)[0], *draw(2, 1000, 4, 64, HK=HK)[1:]]


@pytest.mark.parametrize(("selection", "C"), [("exact", 128), ("approx", 64)])
@pytest.mark.parametrize(
    ("dtype", "B", "T", "H", "HK", "D"),
    [
        *((BF16, 1, 1, 2, 2, 64), (BF16, 2, 127, 2, 2, 64), (BF16, 1, 129, 4, 1, 128), (BF16, 1, 4097, 2, 2, 64)),
        *((BF16, 1, 20001, 2, 1, 128), (FP16, 1, 1000, 4, 2, 64), (FP32, 1, 1000, 4, 2, 96), (FP32, 2, 127, 2, 1, 64)),
    ],
)
def test_top1_chunk(selection, C, dtype, B, T, H, HK, D):
    tensors = draw(B, T, H, D, HK=HK, dtype=dtype)
    assert_selected_as_float64(tensors, TOLERANCE[dtype], chunk_size=C, selection=selection)


@pytest.mark.parametrize(
    ("C", "D", "scale", "K"),
    [
        *((256, 128, None, 1), (128, 256, None, 1), (16, 32, 1.0, 1), (128, 64, 10.0, 1), (128, 64, 200.0, 1)),
        *((128, 64, None, 2), (64, 128, 10.0, 3), (16, 64, None, 8), (256, 128, None, 2)),
    ],
)
def test_top1_chunk_of_other_sizes(C, D, scale, K):
    tensors = draw(1, 1000 if K == 1 else 4001, 2, D)
    assert_selected_as_float64(tensors, chunk_size=C, scale=scale, remote_chunks=K)


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_top1_chunk_packed(selection):
    assert_selected_as_float64(draw(1, 1000, 2, 64), selection=selection, cu_seqlens=borders(1, 130, 130, 700, 1000))


def test_one_chunk_takes_all_queries():
    tensors = draw(1, 20000, 2, 64)
    own = torch.arange(20000, device="cuda") < 128
    chunks = torch.where(own, -1, 0).to(torch.int32).view(1, -1, 1).expand(1, -1, 2)
    assert_as_float64(top1_chunk_attention, tensors, 1e-2, chunks=chunks)


def test_top1_chunk_of_the_last_queries():
    tail = last_queries()
    assert_as_float64(top1_chunk_attention, tail, 1e-2, chunks=select_chunks(*tail[:2]))


@pytest.mark.usefixtures("most_gpu_memory")
def test_top1_chunk_of_more_than_two_billion_elements():
    tensors = [torch.randn(1, 2**20, 34, 64, device="cuda", dtype=BF16) for _ in range(3)]
    last = top1_chunk_attention(*(t[:, :, -1:].contiguous() for t in tensors), selection="approx")
    assert torch.equal(top1_chunk_attention(*tensors, selection="approx")[:, :, -1:], last)


@pytest.mark.parametrize(
    ("op", "sizes"), [(top1_chunk_attention, (1, 20000, 2, 64)), (top1_element_attention, (2, 3000, 4, 64))]
)
def test_gradients_repeat_bit_for_bit(op, sizes):
    tensors = draw(*sizes)
    do = torch.randn_like(tensors[0])
    first, again = (torch.autograd.grad(op(*tensors), tensors, do) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("T", [1, 129, 1000])
@pytest.mark.parametrize("mask", ["causal", "window", "alibi"])
def test_softmax(T, mask):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    options = {"causal": {}, "window": {"window": 100}, "alibi": {"alibi_slopes": slopes}}[mask]
    assert_as_float64(softmax_attention, draw(1, T, 4, 64, HK=2), 1e-2, scale=1.0, **options)


def test_softmax_packed():
    tensors = draw(1, 1000, 4, 64, HK=2)
    assert_as_float64(softmax_attention, tensors, 1e-2, scale=1.0, cu_seqlens=borders(1, 130, 130, 700, 1000))


def test_softmax_of_the_last_queries():
    assert_as_float64(softmax_attention, last_queries(), 1e-2, scale=1.0)


EACH_OP = [softmax_attention, partial(softmax_attention, window=100), top1_chunk_attention, top1_element_attention]


@pytest.mark.parametrize("op", EACH_OP)
def test_last_queries_of_packed_documents(op):
    """A border within the queries, and a document that begins before them."""
    q, k, v = tensors = draw(1, 1000, 4, 64)
    options = {"cu_seqlens": borders(1, 130, 130, 700, 1000)}
    do = torch.randn_like(q[:, 600:])
    results = []
    for o in (op(q[:, 600:], k, v, **options), op(q, k, v, **options)[:, 600:]):
        results.append([o, *torch.autograd.grad(o, tensors, do)])
    assert_within(results[0], results[1], 1e-2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("op", EACH_OP)
def test_compiled_as_called(op):
    tensors = draw(2, 1000, 4, 64, HK=2)
    compiled = torch.compile(lambda q, k, v: op(2 * q, k, v), fullgraph=True)
    do = torch.randn_like(tensors[0])
    wanted = torch.autograd.grad(op(2 * tensors[0], *tensors[1:]), tensors, do)
    assert_within(torch.autograd.grad(compiled(*tensors), tensors, do), wanted, 1e-2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_loss(compiled):
    hidden = torch.randn(5000, 256, device="cuda", requires_grad=True)
    weight = (torch.randn(1000, 256, device="cuda") / 16).requires_grad_()
    targets = torch.randint(0, 1000, (5000,), device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = F.cross_entropy(wide[0] @ wide[1].T, targets)
    op = torch.compile(linear_cross_entropy, fullgraph=True) if compiled else linear_cross_entropy
    with torch.autocast("cuda", torch.bfloat16):
        loss = op(hidden, weight, targets, chunk_tokens=2048)
    found = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    assert_within(found, (wanted, *torch.autograd.grad(wanted, wide)), 1e-2)


def assert_same_element(tensors: list[torch.Tensor], **options: Any) -> None:
    """One query in a thousand may select another key, because two scores are nearly equal; gradients of the others."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = top1_element_attention(*wide, backend="reference", **options)
    o = top1_element_attention(*tensors, backend="triton", **options)
    same = (o.detach().double() == expected.detach()).all(-1, keepdim=True)
    assert 1 - same.double().mean() <= 1e-3
    do = torch.randn_like(o) * same
    wanted = torch.autograd.grad(expected, wide, do.double())
    assert_within(torch.autograd.grad(o, tensors, do), wanted, TOLERANCE[o.dtype])


@pytest.mark.parametrize("scale", [None, 8.0, 50.0])
@pytest.mark.parametrize(
    ("dtype", "B", "T", "H", "HK", "D"),
    [
        *((BF16, 1, 1, 2, 2, 64), (BF16, 2, 127, 2, 2, 32), (BF16, 1, 128, 2, 1, 96), (BF16, 1, 129, 4, 1, 128)),
        *((BF16, 1, 300, 2, 2, 256), (BF16, 1, 4097, 4, 2, 64), (BF16, 1, 20001, 2, 1, 128)),
        *((FP16, 1, 1000, 4, 2, 64), (FP16, 1, 129, 2, 1, 256), (FP32, 1, 129, 1, 1, 32), (FP32, 2, 1000, 2, 1, 64)),
        *((FP32, 1, 1000, 4, 2, 96), (FP32, 1, 300, 2, 1, 128), (FP32, 1, 200, 2, 1, 256)),
    ],
)
def test_top1_element(scale, dtype, B, T, H, HK, D):
    assert_same_element(draw(B, T, H, D, HK=HK, dtype=dtype), scale=scale)


def test_top1_element_packed():
    assert_same_element(draw(1, 1000, 4, 64, HK=2), scale=8.0, cu_seqlens=borders(1, 130, 130, 700, 1000))


def test_top1_element_of_the_last_queries():
    assert_same_element(last_queries(HK=2), scale=8.0)
    assert_same_element([draw(2, 1, 4, 128)[0], *draw(2, 1000, 4, 128)[1:]], scale=8.0)


def test_top1_element_with_heads_before_positions():
    tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in draw(2, 500, 4, 64)]
    assert_same_element([t.requires_grad_() for t in tensors], scale=8.0)


def test_one_key_takes_all_queries():
    tensors = draw(1, 20000, 2, 64)
    with torch.no_grad():
        tensors[0][..., 0], tensors[1][:, 0, :, 0] = 1.0, 10.0
    assert_same_element(tensors, scale=1.0)


@pytest.mark.usefixtures("most_gpu_memory")
def test_top1_element_of_more_than_two_billion_elements():
    """There are as many between the first and the last position; the last head runs a second time."""
    tensors = draw(1, 2100, 16400, 64)
    do = torch.randn_like(tensors[0])
    whole = torch.autograd.grad(top1_element_attention(*tensors, scale=8.0), tensors, do)
    last = [t.detach()[:, :, -1:].contiguous().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(top1_element_attention(*last, scale=8.0), last, do[:, :, -1:])
    assert_within((t[:, :, -1:] for t in whole), wanted, 1e-3)


@pytest.mark.parametrize(("dtype", "nats"), [(FP32, 1e-4), (BF16, 1e-3)])
@pytest.mark.parametrize(
    ("T", "HK", "D", "C"), [(1, 2, 64, 128), (129, 1, 64, 128), (1500, 2, 64, 128), (1500, 2, 128, 64)]
)
@pytest.mark.parametrize("keys", ["all", "packed", "window", "alibi", "chunks", "packed chunks"])
def test_entropy(dtype, nats, T, HK, D, C, keys):
    """Scores are up to 8. The vectors have unit root mean square, as in the mixers."""
    q, k, _ = (t.detach() for t in draw(1, T, 2, D, HK=HK, dtype=FP32))
    q, k = (math.sqrt(D) * q).to(dtype), (math.sqrt(D) * k).to(dtype)
    options: dict[str, Any] = {"cu_seqlens": borders(1, 130, 130, 700, 1500)} if "packed" in keys and T == 1500 else {}
    if "chunks" in keys:
        options |= {"chunk_size": C, "chunks": select_chunks(q, k, chunk_size=C, scale=8 / D, **options)}
    options |= {"window": {"window": 100}, "alibi": {"alibi_slopes": torch.tensor([0.5, 0.0625], device="cuda")}}.get(
        keys, {}
    )
    found = attention_entropy(q, k, scale=8 / D, backend="triton", **options)
    wanted = attention_entropy(q.double(), k.double(), scale=8 / D, backend="reference", **options)
    assert (found - wanted).abs().max() <= nats


@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize("K", [1, 2, 8])
@pytest.mark.parametrize(("dtype", "bound"), [(BF16, 1e-2), (FP16, 2e-3), (FP32, 1e-5)])
@pytest.mark.parametrize(("H", "HK", "D"), [(4, 4, 64), (4, 1, 64), (8, 2, 128), (2, 2, 96), (2, 2, 32)])
def test_decoding_ragged_lengths(selection, K, dtype, bound, H, HK, D):
    """The caches beyond a length hold NaN."""
    lengths = torch.tensor([1, 128, 129, 900, 2000, 1537], device="cuda", dtype=torch.int32)
    shapes = (6, 1, H, D), (6, 2000, HK, D), (6, 2000, HK, D)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:] = v[b, length:] = float("nan")
    means = k[:, : 15 * 128].float().unflatten(1, (15, 128)).mean(2) if selection == "approx" else None
    run = partial(top1_chunk_decode, lengths=lengths, selection=selection, remote_chunks=K)
    wide = None if means is None else means.double()
    wanted = run(q.double(), k.double(), v.double(), chunk_means=wide, backend="reference")
    assert_within([run(q, k, v, chunk_means=means, backend="triton")], [wanted], bound)
