"""Our Triton kernels on a GPU at their limits: NaN in new memory, odd lengths, skew, more than 2^31 elements.

Each large test compares a part of a large result with the result of that part, bit by bit. So nothing large is
computed twice, and an offset that overflows 32 bits shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels import (
    attention_decode,
    gated_rms_norm,
    qkv_convolution,
    selective_scan,
    short_convolution,
    ssd,
    top1_chunk_attention,
    top1_chunk_decode,
)
from tests.kernels import inputs, naive
from tests.kernels.on_cuda import assert_as_float64, assert_selected_as_float64, draw
from tests.kernels.test_ssd import assert_same, results, widened

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]

DEVICE = "cuda"
DTYPE = torch.bfloat16
ROWS, LENGTH = 3, 320_000
"""Rows of 2,304 channels with this many tokens have 2.2e9 elements. The last row crosses 2^31."""
LAST = (slice(ROWS - 1, ROWS),)
ODD = LENGTH + 1
CHUNK: dict[str, Any] = {"chunk_size": 64, "scale": 8.0}
LARGE = 2**31
TOKENS_OF_MANY_CHUNKS = 40_001
"""More than 2,048 chunks of 16 keys."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE)


def apart(t: Tensor, dim: int, stride: int) -> Tensor:
    """A copy of `t` whose entries along one dimension lie `stride` elements apart."""
    strides = [stride if index == dim else each for index, each in enumerate(t.stride())]
    size = 1 + sum((n - 1) * each for n, each in zip(t.shape, strides, strict=True))
    return t.new_zeros(size).as_strided(t.shape, strides).copy_(t)


def borders_of(documents: list[int]) -> Tensor:
    return torch.tensor([0, *documents], device=DEVICE).cumsum(0).int()


def last_heads(H: int, n: int) -> tuple[slice, ...]:
    return slice(None), slice(None), slice(H - n, H)


def spy(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, look: Callable[[Any], Any]) -> None:
    """Show `look` what each call of a function gives."""
    call = getattr(module, name)

    def shown(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        look(result)
        return result

    monkeypatch.setattr(module, name, shown)


def sizes_of_argument(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, place: int) -> list[int]:
    """The elements of one argument of a kernel, for each launch to come."""
    kernel, sizes = getattr(module, name), []

    class Shown:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **options: Any) -> Any:
                sizes.append(args[place].numel())
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(module, name, Shown())
    return sizes


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
    assert_selected_as_float64(draw(1, T, H, D, HK=HK), **options)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_approximate_selection_that_compares_high_parts_first(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are so many chunks that the low parts of mean keys serve only the queries whose choice they may change."""
    from seqarch.kernels.top1_chunk import triton as kernels

    found: list[tuple[int, int]] = []
    spy(monkeypatch, kernels, "undecided", lambda result: found.append((int(result[1].sum()), result[0].numel())))
    drawn = draw(1, TOKENS_OF_MANY_CHUNKS, 2, D, HK=1)
    assert_selected_as_float64(drawn, chunk_size=16, selection="approx")
    ((listed, queries),) = found
    assert 0 < listed < queries / 2


@pytest.mark.parametrize("documents", [None, [1, 7000, 0, 13000]])
@pytest.mark.parametrize(("remote_chunks", "D", "scale"), [(1, 64, 8.0), (1, 128, 11.3), (3, 128, 8.0), (1, 64, 100.0)])
def test_exact_selection_that_compares_all_chunks(remote_chunks, D, scale, documents) -> None:
    """Scores are so large that no chunk can be ruled out, and there are too many chunks to leave the bounds out."""
    T = 20001 if documents is None else sum(documents)
    borders = documents and borders_of(documents)
    options: dict[str, Any] = {"scale": scale, "remote_chunks": remote_chunks, "cu_seqlens": borders}
    assert_selected_as_float64(draw(1, T, 3, D, HK=1), **options)


def test_nine_queries_in_ten_select_one_of_several_chunks_alike() -> None:
    """Chunk 0 then has 21,000 queries of the four heads, which three programs of the backward pass share."""
    T = 6001
    own = torch.arange(T, device=DEVICE).view(1, T, 1).expand(1, T, 4) // CHUNK["chunk_size"]
    skewed = torch.rand(own.shape, device=DEVICE) < 0.9
    chunks = torch.stack([own - 1, own - 3, torch.where(skewed, 0, own - 2)], dim=-1).clamp_min(-1).int()
    options: dict[str, Any] = {**CHUNK, "chunks": chunks, "backend": "triton"}
    assert_as_float64(top1_chunk_attention, draw(1, T, 4, 64, HK=1), 1e-2, **options)


@pytest.mark.parametrize(("C", "W", "documents"), [(328, 4, [1000, 1, 0, 998]), (37, 3, [1999]), (2304, 2, [1, 1998])])
def test_convolutions_of_odd_lengths(C: int, W: int, documents: list[int]) -> None:
    T = sum(documents)
    borders = borders_of(documents)
    drawn = list(inputs.short_convolution(1, T, C, W, dtype=DTYPE, device=DEVICE).values())
    ways: list[dict[str, Any]] = [{}, {"activation": "silu", "cu_seqlens": borders}]
    for options in ways:
        assert_as_float64(short_convolution, drawn, 5e-3, backend="triton", **options)


@pytest.mark.parametrize(("T", "H", "P", "n_groups"), [(701, 24, 64, 1), (1, 6, 20, 2), (1025, 3, 40, 3)])
def test_gated_norm_of_odd_lengths(T: int, H: int, P: int, n_groups: int) -> None:
    drawn = list(inputs.gated_norm(1, T, H, P, dtype=DTYPE, device=DEVICE).values())
    assert_as_float64(gated_rms_norm, drawn, 5e-3, n_groups=n_groups, backend="triton")


@pytest.mark.parametrize(
    ("T", "H", "P", "G", "N", "decay", "documents"),
    [
        (1023, 6, 64, 2, 128, "full", None),
        (65, 3, 40, 1, 24, "one", None),
        (4001, 2, 128, 1, 256, "full", None),
        (777, 4, 64, 1, 64, "none", [1, 64, 0, 647, 65]),
    ],
)
def test_ssd_of_odd_lengths(T: int, H: int, P: int, G: int, N: int, decay: str, documents: list[int] | None) -> None:
    arguments = inputs.ssd(1, T, H, P, G, N, decay=decay, dtype=DTYPE, device=DEVICE)
    options = {} if documents is None else {"cu_seqlens": borders_of(documents)}
    expected = results(widened(arguments), backend="reference", **options)
    assert_same(results(arguments, backend="triton", **options), expected, 1e-2)


@pytest.mark.parametrize(
    ("T", "d", "N", "decay", "documents"),
    [
        (1, 40, 16, "full", None),
        (4097, 96, 5, "one", None),
        (1021, 1000, 16, "none", None),
        (3003, 96, 16, "full", [1, 700, 0, 2302]),
    ],
)
def test_selective_scan_of_odd_lengths(T: int, d: int, N: int, decay: str, documents: list[int] | None) -> None:
    drawn = inputs.selective_scan(1, T, d, N, decay=decay, step=-4.6, dtype=DTYPE, device=DEVICE)
    tensors = {name: t for name, t in drawn.items() if t is not None}
    options = {} if documents is None else {"cu_seqlens": borders_of(documents)}

    def scan(*drawn: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return selective_scan(**{"A": None, **dict(zip(tensors, drawn, strict=True))}, **options)

    assert_as_float64(scan, list(tensors.values()), 1e-2, backend="triton", **options)


BUFFERS = {"remote_forward_kernel": 4, "local_forward_kernel": 4, "chunk_backward_kernel": 7, "add_extra_kernel": 1}
"""Where the kernels take the tensor of results that wait to be added."""


@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_results_of_other_chunks_beyond_two_billion_elements(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of 7 chunks wait in one tensor to be added, here for all heads at once: 2.8e9 elements."""
    from seqarch.kernels.top1_chunk import triton as kernels

    monkeypatch.setattr(kernels, "GROUP_BYTES", 2**40)
    sizes = [sizes_of_argument(monkeypatch, kernels, name, place) for name, place in BUFFERS.items()]
    T, H = 2**18 + 1, 24
    drawn, do = [normal(1, T, H, 64) for _ in range(3)], normal(1, T, H, 64)
    options: dict[str, Any] = {"chunk_size": 128, "remote_chunks": 8, "selection": selection, "backend": "triton"}
    equal_parts(lambda *t: top1_chunk_attention(*t, **options), drawn, do, [last_heads(H, 2)] * 3)
    assert min(max(found) for found in sizes) > LARGE


@pytest.mark.usefixtures("most_gpu_memory")
def test_exact_selection_by_bounds_of_more_than_two_billion_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys have 2.3e9 elements, and the lists of chunks that the bounds leave 4.6e9."""
    from seqarch.kernels.top1_chunk import triton as kernels

    found: list[tuple[int, float]] = []
    look = lambda result: found.append((result[0].numel(), result[2].float().mean().item()))  # noqa: E731
    spy(monkeypatch, kernels, "candidates", look)
    T, H = 2**20, 34
    drawn = [F.normalize(normal(1, T, H, 64), dim=-1), F.normalize(normal(1, T, H, 64), dim=-1), normal(1, T, H, 64)]
    assert drawn[0].numel() > LARGE
    op = functools.partial(top1_chunk_attention, backend="triton")
    equal_parts(op, drawn, normal(1, T, H, 64), [last_heads(H, 1)] * 3)
    whole, part = found
    assert whole[0] > LARGE
    assert max(whole[1], part[1]) < 0.5, "most lists are full, which leaves them unused"


def equal_parts(op: Callable[..., Tensor], leaves: list[Tensor], do: Tensor, parts: list[Any]) -> None:
    """Output and gradients of a part are those of the whole. Where `parts` has None, all of the leaf is needed."""
    place = next(part for part in parts if part is not None)
    whole = [t.requires_grad_() for t in leaves]
    pieces = [
        (t if part is None else t[part]).detach().clone().requires_grad_()
        for t, part in zip(leaves, parts, strict=True)
    ]
    of_part = do[place].clone()
    do.zero_()[place] = of_part  # in place: each of these tensors has GiB
    found, wanted = op(*whole), op(*pieces)
    assert torch.equal(found[place], wanted)
    pairs = zip(torch.autograd.grad(found, whole, do), torch.autograd.grad(wanted, pieces, of_part), strict=True)
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
    part = (slice(None), slice(first, None)) if packed else LAST

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
    equal_parts(
        lambda x, weight: qkv_convolution(x, weight, H, K)[2], [x, weight], normal(ROWS, LENGTH, H, V), [LAST, None]
    )


@pytest.mark.usefixtures("most_gpu_memory")
def test_gated_norm_of_more_than_two_billion_elements() -> None:
    H, P = 36, 64
    leaves = [normal(ROWS, LENGTH, H, P), normal(ROWS, LENGTH, H, P), torch.randn(H, device=DEVICE)]
    leaves += [normal(ROWS, LENGTH, H * P), torch.randn(H * P, device=DEVICE)]
    equal_parts(gated_rms_norm, leaves, normal(ROWS, LENGTH, H * P), [LAST, LAST, None, LAST, None])


@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize(("packed", "segment"), [(False, 2**19), (False, 2**14), (True, 2**14)])
def test_selective_scan_of_more_than_two_billion_elements(
    packed: bool, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments of one length for all rows and for one, in which a row is one segment or several."""
    from seqarch.kernels.selective_scan import triton as kernels

    monkeypatch.setattr(kernels, "segment_length", lambda *_: segment)
    d, N = 2304, 3
    shape, part = rows_of(packed)

    def op(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        borders = borders_of_rows(x) if packed else None
        return selective_scan(x, dt, A, B, C, D=D, cu_seqlens=borders, backend="triton")[0]

    leaves = [normal(*shape, d), torch.rand(*shape, d, device=DEVICE).mul_(0.02), -torch.rand(d, N, device=DEVICE)]
    leaves += [normal(*shape, N), normal(*shape, N), torch.randn(d, device=DEVICE)]
    assert leaves[0].numel() > LARGE
    equal_parts(op, leaves, normal(*shape, d), [part, part, None, part, part, None])


def rows_of(packed: bool) -> tuple[tuple[int, int], tuple[slice, ...]]:
    """Batch and length of several rows of an odd length, or of one with as many documents; and which is the last."""
    if packed:
        return (1, ROWS * ODD), (slice(None), slice((ROWS - 1) * ODD, None))
    return (ROWS, ODD), LAST


def borders_of_rows(x: Tensor) -> Tensor:
    return borders_of([ODD] * (x.shape[1] // ODD))


@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize("packed", [False, True])
def test_ssd_of_more_than_two_billion_elements(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and the states of all chunks have more."""
    from seqarch.kernels.ssd import triton as kernels

    counts: list[int] = []
    spy(monkeypatch, kernels, "_states", lambda found: counts.append(found[0].numel()))
    H, P, N = 36, 64, 64
    shape, part = rows_of(packed)

    def op(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return ssd(x, dt, A, B, C, cu_seqlens=borders_of_rows(x) if packed else None, backend="triton")[0]

    leaves = [normal(*shape, H, P), torch.rand(*shape, H, device=DEVICE).mul_(0.1), -torch.rand(H, device=DEVICE)]
    leaves += [normal(*shape, 1, N), normal(*shape, 1, N)]
    equal_parts(op, leaves, normal(*shape, H, P), [part, part, None, part, part])
    assert min(leaves[0].numel(), max(counts)) > LARGE


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
