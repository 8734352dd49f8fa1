"""Our newer Triton kernels on a GPU at their limits: NaN in new memory, odd lengths, skew, more than 2^31 elements.

Each large test compares a part of a large result with the result of that part, bit by bit. So nothing large is
computed twice, and an offset that overflows 32 bits shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqarch.bench.kernels_check import compare, compare_selected
from seqarch.kernels import (
    attention_decode,
    gated_rms_norm,
    inputs,
    qkv_convolution,
    short_convolution,
    top1_chunk_attention,
    top1_chunk_decode,
)
from tests.kernels import naive

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

DEVICE = "cuda"
DTYPE = torch.bfloat16
ROWS, LENGTH = 3, 320_000
"""Rows of 2,304 channels with this many tokens have 2.2e9 elements. The last row crosses 2^31."""
CHUNK: dict[str, Any] = {"chunk_size": 64, "scale": 8.0}


def draw(*sizes: int, **options: Any) -> list[Tensor]:
    """Random q, k and v, q and k of unit length."""
    return list(inputs.attention(*sizes, normalised=True, dtype=DTYPE, device=DEVICE, **options).values())


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def apart(t: Tensor, dim: int, stride: int) -> Tensor:
    """A copy of `t` whose entries along one dimension lie `stride` elements apart."""
    strides = [stride if index == dim else each for index, each in enumerate(t.stride())]
    size = 1 + sum((n - 1) * each for n, each in zip(t.shape, strides, strict=True))
    return t.new_zeros(size).as_strided(t.shape, strides).copy_(t)


@pytest.mark.parametrize(
    ("remote_chunks", "selection", "T", "H", "HK", "D", "chunk_size"),
    [
        (2, "exact", 4001, 4, 2, 64, 64),
        (3, "approx", 2047, 2, 1, 128, 32),
        (8, "exact", 1001, 2, 2, 96, 16),
        (8, "approx", 129, 4, 1, 64, 16),
        (1, "exact", 9001, 2, 1, 256, 64),
    ],
)
def test_sizes_of_chunks_and_heads(remote_chunks, selection, T, H, HK, D, chunk_size) -> None:
    options: dict[str, Any] = {"chunk_size": chunk_size, "selection": selection, "remote_chunks": remote_chunks}
    assert all(compare_selected(f"K {remote_chunks}", draw(1, T, H, D, HK=HK), **options))


@pytest.mark.parametrize("documents", [None, [1, 7000, 0, 13000]])
@pytest.mark.parametrize(("remote_chunks", "D", "scale"), [(1, 64, 8.0), (1, 128, 11.3), (3, 128, 8.0), (1, 64, 100.0)])
def test_exact_selection_that_compares_all_chunks(remote_chunks, D, scale, documents) -> None:
    """Scores are so large that no chunk can be ruled out, and there are too many chunks to leave the bounds out."""
    T = 20001 if documents is None else sum(documents)
    borders = documents and torch.tensor([0, *documents], device=DEVICE).cumsum(0).int()
    options: dict[str, Any] = {"scale": scale, "remote_chunks": remote_chunks, "cu_seqlens": borders}
    assert all(compare_selected(f"D {D} scale {scale}", draw(1, T, 3, D, HK=1), **options))


def test_nine_queries_in_ten_select_one_of_several_chunks_alike() -> None:
    """Chunk 0 then has 21,000 queries of the four heads, which three programs of the backward pass share."""
    T = 6001
    own = torch.arange(T, device=DEVICE).view(1, T, 1).expand(1, T, 4) // CHUNK["chunk_size"]
    skewed = torch.rand(own.shape, device=DEVICE) < 0.9
    chunks = torch.stack([own - 1, own - 3, torch.where(skewed, 0, own - 2)], dim=-1).clamp_min(-1).int()
    options: dict[str, Any] = {**CHUNK, "chunks": chunks, "backend": "triton"}
    assert compare("skew", top1_chunk_attention, draw(1, T, 4, 64, HK=1), 1e-2, **options)


@pytest.mark.parametrize(("C", "W", "documents"), [(328, 4, [1000, 1, 0, 998]), (37, 3, [1999]), (2304, 2, [1, 1998])])
def test_convolutions_of_odd_lengths(C: int, W: int, documents: list[int]) -> None:
    T = sum(documents)
    borders = torch.tensor([0, *documents], device=DEVICE).cumsum(0).int()
    drawn = list(inputs.short_convolution(1, T, C, W, dtype=DTYPE, device=DEVICE).values())
    ways: list[dict[str, Any]] = [{}, {"activation": "silu", "cu_seqlens": borders}]
    for options in ways:
        assert compare(f"C{C} W{W}", short_convolution, drawn, 5e-3, backend="triton", **options)


@pytest.mark.parametrize(("T", "H", "P", "n_groups"), [(701, 24, 64, 1), (1, 6, 20, 2), (1025, 3, 40, 3)])
def test_gated_norm_of_odd_lengths(T: int, H: int, P: int, n_groups: int) -> None:
    drawn = list(inputs.gated_norm(1, T, H, P, dtype=DTYPE, device=DEVICE).values())
    assert compare(f"T{T}", gated_rms_norm, drawn, 5e-3, n_groups=n_groups, backend="triton")


@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_results_of_other_chunks_beyond_two_billion_elements(selection: str) -> None:
    """The results of 7 chunks wait in one tensor to be added: 2.8e9 elements."""
    T, H = 2**18 + 1, 24
    drawn, do = [normal(1, T, H, 64) for _ in range(3)], normal(1, T, H, 64)
    options: dict[str, Any] = {"chunk_size": 128, "remote_chunks": 8, "selection": selection}
    last = slice(H - 2, H)
    equal_parts(lambda *t: top1_chunk_attention(*t, **options), drawn, do, [(slice(None), slice(None), last)] * 3)


def equal_parts(op: Callable[..., Tensor], leaves: list[Tensor], do: Tensor, parts: list[Any]) -> None:
    """Output and gradients of a part are those of the whole. Where `parts` has None, all of the leaf is needed."""
    place = next(part for part in parts if part is not None)
    whole = [t.requires_grad_() for t in leaves]
    pieces = [
        (t if part is None else t[part]).detach().clone().requires_grad_()
        for t, part in zip(leaves, parts, strict=True)
    ]
    only = torch.zeros_like(do)
    only[place] = do[place]
    found, wanted = op(*whole), op(*pieces)
    assert torch.equal(found[place], wanted)
    pairs = zip(torch.autograd.grad(found, whole, only), torch.autograd.grad(wanted, pieces, do[place]), strict=True)
    for part, (a, b) in zip(parts, pairs, strict=True):
        if part is None:
            naive.assert_close(a, b, 1e-4)  # a sum over all tokens, of which the others give zero
        else:
            assert torch.equal(a[part], b)


@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize("packed", [False, True])
def test_convolution_of_more_than_two_billion_elements(packed: bool) -> None:
    """The part is the last of several sequences, or the last document of one."""
    shape = (1, ROWS * LENGTH, 2304) if packed else (ROWS, LENGTH, 2304)
    first = (ROWS - 1) * LENGTH
    part = (slice(None), slice(first, None)) if packed else (slice(ROWS - 1, ROWS),)

    def op(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        borders = [0, first, x.shape[1]] if x.shape[1] > LENGTH else [0, x.shape[1]]
        given = torch.tensor(borders, device=DEVICE).int() if packed else None
        return short_convolution(x, weight, bias, activation="silu", cu_seqlens=given)

    leaves = [normal(*shape), torch.randn(2304, 4, device=DEVICE), torch.randn(2304, device=DEVICE)]
    equal_parts(op, leaves, normal(*shape), [part, None, None])


@pytest.mark.usefixtures("most_gpu_memory")
def test_values_of_more_than_two_billion_elements() -> None:
    H, K, V = 2, 64, 1152
    x, weight = normal(ROWS, LENGTH, H * (2 * K + V)), torch.randn(H * (2 * K + V), 4, device=DEVICE)
    last = (slice(ROWS - 1, ROWS),)
    equal_parts(
        lambda x, weight: qkv_convolution(x, weight, H, K)[2], [x, weight], normal(ROWS, LENGTH, H, V), [last, None]
    )


@pytest.mark.usefixtures("most_gpu_memory")
def test_gated_norm_of_more_than_two_billion_elements() -> None:
    H, P = 36, 64
    leaves = [normal(ROWS, LENGTH, H, P), normal(ROWS, LENGTH, H, P), torch.randn(H, device=DEVICE)]
    leaves += [normal(ROWS, LENGTH, H * P), torch.randn(H * P, device=DEVICE)]
    last = (slice(ROWS - 1, ROWS),)
    equal_parts(gated_rms_norm, leaves, normal(ROWS, LENGTH, H * P), [last, last, None, last, None])


@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("dim", "stride"), [(0, 2**30), (1, 2**22), (2, 2**30)])
def test_decoding_from_caches_of_more_than_two_billion_elements(dim: int, stride: int, dense: bool) -> None:
    """Sequences, positions or heads of the cache lie far apart."""
    arguments = inputs.decoding(3, 601, 6, 64, HK=3, dtype=DTYPE, device=DEVICE)
    arguments["lengths"][0] = 77
    far = {name: apart(arguments[name], dim, stride) for name in ("k_cache", "v_cache")}
    options: dict[str, Any] = {} if dense else {"chunk_size": 32, "remote_chunks": 3}
    op: Any = attention_decode if dense else top1_chunk_decode
    options["backend"] = "triton"
    assert torch.equal(op(**{**arguments, **far}, **options), op(**arguments, **options))
