"""Top-1 chunk attention on Triton: the launches, registered as operators so that torch.compile sees them whole."""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from seqarch.kernels.flops import chunk_keys, last_queries, selected
from seqarch.kernels.launch import gradient_of, in_token_rows, operator, padded, precision, rows, sizes, strides
from seqarch.kernels.top1_chunk.layout import Buckets, Layout, bucket_queries, chunk_layout, tiles
from seqarch.kernels.top1_chunk.op import chunks_per_query
from seqarch.kernels.top1_chunk.triton_approx import list_kernel, select_approx_kernel, select_high_kernel
from seqarch.kernels.top1_chunk.triton_attend import (
    add_extra_kernel,
    chunk_backward_kernel,
    local_backward_kernel,
    local_forward_kernel,
    remote_forward_kernel,
    sum_partials_kernel,
)
from seqarch.kernels.top1_chunk.triton_exact import candidates_kernel, select_exact_kernel
from seqarch.kernels.top1_chunk.triton_select import chunk_stats_kernel, segment_keys_kernel

UNIT = 8192
"""A program of the backward pass takes fewer than twice as many remote queries of one chunk. A chunk with more is
split. Twice this for key blocks of 2^14 elements, so that partial sums take at most 8 bytes per entry."""

KEY_BLOCK_BYTES = 2**15
"""Keys whose gradients one program of the backward pass holds: 128 of 128 dims in half precision."""

GROUP_BYTES = 2**26
"""Up to this size of the K - 1 buffers like q, all heads are one group."""

SHORT = 128
"""Up to this number of slots, exact selection compares all masses, because bounds would rule out only a few."""

LISTED = 64
"""Queries of a block that share a list of the slots whose masses exact selection compares."""

LONG = 2048
"""From this number of mean keys on, approximate selection first takes the products with their high parts only."""

PRODUCT_ERROR = 2.0**-21
"""Room for rounding in a choice by products with mean keys, as a share of their dims and of both norms."""


def _chunk_stats(
    k: Tensor, layout: Layout, chunk_size: int, q: Tensor | None = None, scale: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """High and low part of the mean keys `[B, slots, HK, D]`. For each slot, `[3, B * HK, slots]` float32, the
    longest key and, for queries, the radius and the bound on the covariance."""
    B, Tk, HK, D = k.shape
    high = torch.empty(B, layout.slots, HK, D, dtype=k.dtype, device=k.device)
    split = k.dtype != torch.float32
    low = torch.empty_like(high) if split else high
    stats = torch.empty(3, B * HK, layout.slots, dtype=torch.float32, device=k.device)
    # One query of each block stands for it: that a shorter one would need a tighter bound costs time, not the choice.
    query = None if q is None else torch.linalg.vector_norm(q[:, ::LISTED], dim=-1, dtype=torch.float32).amin()
    chunk_stats_kernel[(layout.slots, B * HK)](
        k, layout.starts, query, high, low, *stats, *strides(k), HK, layout.slots, Tk, scale, chunk_size, D, padded(D),
        layout.starts is not None, split, q is not None, num_warps=4 if q is None else 8,
    )  # fmt: skip
    return high, low, stats


def _listed_launch(q: Tensor, chunk_size: int) -> tuple[int, int]:
    """Warps, and chunks of keys in flight, of the exact selection from lists."""
    chunk_bytes = chunk_size * padded(q.shape[-1]) * q.element_size()
    if q.dtype == torch.float32:
        return 8, 2 if chunk_bytes <= KEY_BLOCK_BYTES else 1
    return 4, max(1, min(3, 3 * KEY_BLOCK_BYTES // chunk_bytes))


def _all_launch(q: Tensor, chunk_size: int) -> tuple[int, int, int, int]:
    """Queries per block, warps, parts of chunks in flight, and parts per chunk, of the exact selection from all chunks.
    With parts of 64 keys of 128 dims, two programs fit on a multiprocessor. Products of one overlap with exponentials
    of the other."""
    D = padded(q.shape[-1])
    if q.dtype == torch.float32:
        return (2 * LISTED if D <= 64 else LISTED), 8, 1, 1
    if chunk_size * D > 128 * 128:
        return 2 * LISTED, 8, 1, 1
    if max(chunk_size, D) > 128:
        return 2 * LISTED, 8, 3, 1
    return (2 * LISTED, 4, 3, 1) if D <= 64 else (4 * LISTED, 8, 3, max(1, chunk_size // 64))


def _described(k: Tensor, layout: Layout, chunk_size: int, parts: int, K: int) -> TensorDescriptor | None:
    """The keys as `[rows, HK * D]` in blocks of a part of a chunk of one head, or None: see README.md.

    A descriptor takes tokens one stride apart, in multiples of 16 bytes. Sequences lie whole rows apart, as in a cache
    with room for more tokens. It serves the sizes for which it was faster.
    """
    B, Tk, HK, D = k.shape
    faster = chunk_size == 128 and D in (64, 128) and k.dtype != torch.float32 and layout.starts is None and K == 1
    if not faster or (k.is_cuda and torch.cuda.get_device_capability(k.device) < (9, 0)):
        return None
    if not in_token_rows(k[:1]) or k.stride(1) < HK * D or k.stride(1) % 8 or k.data_ptr() % 16 or not k.numel():
        return None
    apart, rest = divmod(k.stride(0), k.stride(1)) if B > 1 else (0, 0)
    if rest:
        return None
    return TensorDescriptor(k, [(B - 1) * apart + Tk, HK * D], [k.stride(1), 1], [chunk_size // parts, D])


def _attend_launch(q: Tensor) -> tuple[int, int]:
    """Queries per program and warps of the attention kernels."""
    half = q.dtype != torch.float32
    return (64 if half else 32), (4 if half and q.shape[-1] <= 128 else 8)


def _backward_launch(q: Tensor) -> tuple[int, int, int]:
    """Queries per step, warps, and steps in flight of the backward pass by chunk."""
    if q.dtype == torch.float32:
        return 32, 8, 1
    return (32, 4, 1) if q.shape[-1] <= 64 else (64, 8, 1)


def _unit(q: Tensor, chunk_size: int) -> tuple[int, int]:
    """Keys whose gradients one program of the backward pass holds, and the fewest queries of a unit of a chunk."""
    BC = min(chunk_size, KEY_BLOCK_BYTES // (padded(q.shape[-1]) * q.element_size()))
    return BC, max(UNIT, UNIT * BC * padded(q.shape[-1]) // 8192)


def _no_chunks(q: Tensor, k: Tensor, *options) -> Tensor:
    shape = q.shape[:3] if options[-1] == 1 else (*q.shape[:3], options[-1])
    return q.new_empty(shape, dtype=torch.int32)


@operator("seqarch::top1_select", _no_chunks, flops=selected)
def select(
    q: Tensor,
    k: Tensor,
    chunk_size: int,
    selection: str,
    scale: float,
    chunk_means: Tensor | None,
    cu_seqlens: Tensor | None,
    remote_chunks: int,
) -> Tensor:
    q, k = rows(q), rows(k)
    layout = chunk_layout(k.shape[1], chunk_size, cu_seqlens)
    chunks = _no_chunks(q, k, remote_chunks)
    if selection == "exact":
        _select_exact(q, k, chunks, layout, chunk_size, scale, remote_chunks)
        return chunks
    if chunk_means is None:
        high, low, _ = _chunk_stats(k, layout, chunk_size)
    else:
        chunk_means = chunk_means[:, : (k.shape[1] - 1) // chunk_size]
        high = chunk_means.to(q.dtype).contiguous()
        low = (chunk_means - high).to(q.dtype).contiguous()
    _select_approx(q, high, low, chunks, layout, chunk_size, k.shape[1] - q.shape[1], remote_chunks)
    return chunks


def undecided(
    q: Tensor, high: Tensor, low: Tensor, chunks: Tensor, layout: Layout, chunk_size: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Fill `chunks` from the high parts of the mean keys, and list the queries for which low parts may change that.

    Returns:
        Lists of queries `[B * H, Tq]`, of which the first `[B * H]` count.
    """
    B, Tq, H, D = q.shape
    marks = torch.empty(B * H, Tq, dtype=torch.int8, device=q.device)
    lists = torch.empty_like(marks, dtype=torch.int32)
    of_high, of_low = (torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in (high, low))
    BT, BS, warps = (128, 64, 4) if D <= 64 else (128, 64, 8) if D <= 128 else (64, 32, 8)
    select_high_kernel[(triton.cdiv(Tq, BT), B * H)](
        q, high, low, (of_low + D * PRODUCT_ERROR * of_high).amax(1), layout.own, layout.first, chunks, marks,
        *strides(q), *strides(high), H, high.shape[2], Tq, offset, chunk_size, D, padded(D), BT, BS,
        layout.starts is not None, num_warps=warps, num_stages=3 if D <= 128 else 2, maxnreg=168 if D <= 64 else 128,
    )  # fmt: skip
    places = marks.flatten().cumsum(0, dtype=torch.int32)
    list_kernel[(triton.cdiv(Tq, 1024), B * H)](marks, places, lists, Tq, 1024)
    return lists, places.view(B * H, Tq)[:, -1].diff(prepend=places.new_zeros(1))


def _select_approx(
    q: Tensor, high: Tensor, low: Tensor, chunks: Tensor, layout: Layout, chunk_size: int, offset: int, K: int
) -> None:
    """Fill `chunks` from the products with the mean keys `high + low`."""
    B, Tq, H, D = q.shape
    half = q.dtype != torch.float32
    lists = counts = None
    if half and K == 1 and high.shape[1] >= LONG:
        lists, counts = undecided(q, high, low, chunks, layout, chunk_size, offset)
    BT, BS = (128, 64) if half and D <= 128 else (64, 32)
    select_approx_kernel[(triton.cdiv(Tq, BT), B * H)](
        q, high, low, layout.own, layout.first, chunks, lists, counts, *strides(q), *strides(high),
        H, high.shape[2], Tq, offset, chunk_size, D, padded(D), BT, BS, layout.starts is not None, half,
        precision(q), *_kept(K), num_warps=8, num_stages=2,
    )  # fmt: skip


def _kept(remote_chunks: int) -> tuple[int, int]:
    """K, and the columns of a block that holds K numbers per query."""
    return remote_chunks, triton.next_power_of_2(remote_chunks)


def candidates(
    q: Tensor, k: Tensor, layout: Layout, chunk_size: int, scale: float, remote_chunks: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The slots that can be among a query's `remote_chunks` heaviest, for each block of queries, by bounds from the
    mean keys.

    Returns:
        Lists of slots `[B * H, blocks, slots]`, of which the first `[B * H, blocks]` count; whether a list is full,
        `[B * H, blocks]`; and the longest key, `[B * HK]`.
    """
    B, Tq, Tk, H, HK, D = sizes(q, k)
    high, low, stats = _chunk_stats(k, layout, chunk_size, q, scale)
    longest, widest = stats[:2].amax(2)
    narrowest = stats[2, :, :-1].amin(1)  # a last chunk that is not complete would be narrower
    blocks = triton.cdiv(Tq, LISTED)
    small = torch.int16 if layout.slots < 2**15 else torch.int32
    lists = torch.empty(B * H, blocks, layout.slots, dtype=small, device=q.device)
    counts = torch.empty(B * H, blocks, dtype=torch.int32, device=q.device)
    full = torch.empty(B * H, blocks, dtype=torch.bool, device=q.device)
    candidates_kernel[(blocks, B * H)](
        q, high, low, longest, widest, narrowest, stats[2], layout.own, layout.first, lists, counts, full,
        *strides(q), *strides(high), H, HK, Tq, Tk - Tq, layout.slots, scale,
        chunk_size, D, padded(D), LISTED, 64 if D <= 128 else 32, layout.starts is not None, q.dtype != torch.float32,
        precision(q), *_kept(remote_chunks), num_warps=_listed_launch(q, chunk_size)[0], num_stages=2,
    )  # fmt: skip
    return lists, counts, full, longest


def _select_exact(
    q: Tensor, k: Tensor, chunks: Tensor, layout: Layout, chunk_size: int, scale: float, remote_chunks: int
) -> None:
    """Fill `chunks` from the masses of the listed slots; of all earlier slots where lists are full or slots few."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    of_all, full, group = _all_launch(q, chunk_size), None, 0
    launches = [(None, None, *of_all)]
    described = _described(k, layout, chunk_size, of_all[3], remote_chunks)
    if layout.slots > SHORT:
        lists, counts, full, longest = candidates(q, k, layout, chunk_size, scale, remote_chunks)
        group = of_all[0] // LISTED
        launches.append((lists, counts, LISTED, *_listed_launch(q, chunk_size), 1))
    else:
        longest = _chunk_stats(k, layout, chunk_size)[2][0].amax(1)
    for mode in ("polynomial", "plain", "safe"):
        for lists, counts, BT, warps, stages, parts in launches:
            keys = described if described and mode == "plain" and lists is None else k
            select_exact_kernel[(triton.cdiv(Tq, BT), B * H)](
                q, keys, layout.starts, layout.own, layout.first, longest, lists, counts, full, chunks, *strides(q),
                *strides(k), H, HK, Tq, Tk, Tk - Tq, triton.cdiv(Tq, LISTED), layout.slots, scale,
                chunk_size, D, padded(D), BT, layout.starts is not None, precision(q), mode, group,
                *_kept(remote_chunks), parts, keys is not k, num_warps=warps, num_stages=stages,
            )  # fmt: skip


def sorted_queries(chunks: Tensor, k: Tensor, layout: Layout, chunk_size: int) -> tuple[Buckets, int]:
    """Queries sorted by the segments of the chunks that they selected, and the number of segments."""
    B, Tq, H = chunks.shape[:3]
    K, HK = chunks_per_query(chunks), k.shape[2]
    segments = B * HK * layout.slots
    keys = torch.empty(K * B * H * Tq, dtype=torch.int32, device=chunks.device)
    segment_keys_kernel[(triton.cdiv(Tq, 512), B * H, K)](
        chunks, layout.own, layout.first, keys, H, HK, Tq, k.shape[1] - Tq, layout.slots, segments, chunk_size, 512,
        layout.starts is not None, K,
    )  # fmt: skip
    return bucket_queries(keys, segments), segments


def _groups(q: Tensor, k: Tensor, chunks: Tensor) -> int:
    """Groups of heads. They run one after the other, so that the K - 1 buffers of a group are about as large as q."""
    K, HK = chunks_per_query(chunks), k.shape[2]
    if K == 1 or (K - 1) * q.numel() * q.element_size() <= GROUP_BYTES:
        return 1
    return next(n for n in range(min(3 * K // 4, HK), HK + 1) if HK % n == 0)


def _empty(q, k, v, chunks, chunk_size, scale, cu_seqlens):
    documents = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = -(-k.shape[1] // chunk_size) if cu_seqlens is None else k.shape[1] // chunk_size + documents
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(q.shape[0] * q.shape[1] * q.shape[2], dtype=torch.float32),
        q.new_empty(chunks.numel(), dtype=torch.int32),
        q.new_empty(q.shape[0] * k.shape[2] * slots + _groups(q, k, chunks), dtype=torch.int32),
    )


def _flops(q, k, v, chunks, chunk_size, *_):
    return 4 * last_queries(chunk_keys, q, k, chunk_size, *chunks[3:])


@operator("seqarch::top1_chunk_forward", _empty, flops=_flops)
def forward(
    q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output. And group after group, the log-sum-exp `[B, H, Tq]` in base 2 and the sorted queries of `Buckets`."""
    q, k, v = rows(q), rows(k), rows(v)
    layout = chunk_layout(k.shape[1], chunk_size, cu_seqlens)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    groups = zip(*(t.chunk(_groups(q, k, chunks), 2) for t in (q, k, v, chunks, o)), strict=True)
    found = [_attend(*group, layout, chunk_size, scale) for group in groups]
    return o, *(found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True)))


def _attend(q, k, v, chunks, o, layout, chunk_size, scale):
    """Fill `o` for one group of heads, and return its other results."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    packed, K, HO = layout.starts is not None, chunks_per_query(chunks), o.stride(1) // D
    buckets, segments = sorted_queries(chunks.contiguous(), k, layout, chunk_size)
    extra = q.new_empty(K - 1, *q.shape)
    parts = q.new_full((K, B, H, Tq), float("-inf"), dtype=torch.float32)
    lse = parts[0] if K == 1 else torch.empty_like(parts[0])
    BM, warps = _attend_launch(q)
    segment, first_tile = tiles(buckets.offsets, BM, chunks.numel())
    shape = (chunk_size, D, padded(D))
    remote_forward_kernel[(segment.shape[0],)](
        q, k, v, o, extra, parts, buckets.order, buckets.offsets, layout.starts, segment, first_tile,
        *strides(q), *strides(k), *strides(v), B * H, H, HK, HO, Tq, Tk, layout.slots, segments, scale,
        *shape, BM, packed, precision(q), K, num_warps=warps, num_stages=1,
    )  # fmt: skip
    BT, slot0 = min(chunk_size, BM), (Tk - Tq) // chunk_size
    local_forward_kernel[((layout.slots - slot0) * (chunk_size // BT), B * H)](
        q, k, v, o, extra, lse, parts, layout.starts, *strides(q), *strides(k), *strides(v),
        H, HK, HO, Tq, Tk, Tk - Tq, slot0, scale, *shape, BT, packed, precision(q), K, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return lse.flatten(), buckets.order, buckets.offsets


@gradient_of(forward, gradients=3, keep=range(4))
def backward(do, q, k, v, chunks, chunk_size, scale, cu_seqlens, o, lse, order, offsets):
    """dq, dk and dv."""
    q, k, v, do = rows(q), rows(k), rows(v), rows(do)
    layout = chunk_layout(k.shape[1], chunk_size, cu_seqlens)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    groups, K = _groups(q, k, chunks), chunks_per_query(chunks)
    tensors = (t.chunk(groups, 2) for t in (q, k, v, do, o, dq, dk, dv))
    for group in zip(*tensors, *(t.chunk(groups) for t in (lse, order, offsets)), strict=True):
        _differentiate(*group, layout, K, chunk_size, scale)
    return dq, dk, dv


def _differentiate(q, k, v, do, o, dq, dk, dv, lse, order, offsets, layout, K, chunk_size, scale):
    """Fill the gradients of one group of heads."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    packed, HO, HKO = layout.starts is not None, dq.stride(1) // D, dk.stride(1) // D
    delta = torch.empty_like(lse)
    BM, warps = _attend_launch(q)
    shape = (D, padded(D))
    BT, slot0 = min(chunk_size, BM), (Tk - Tq) // chunk_size
    local_backward_kernel[((layout.slots - slot0) * (chunk_size // BT), B * H)](
        q, k, v, o, do, lse, delta, dq, layout.starts, *strides(q), *strides(k), *strides(v), *strides(o),
        *strides(do), H, HK, HO, Tq, Tk, Tk - Tq, slot0, scale,
        chunk_size, *shape, BT, packed, precision(q), num_warps=warps, num_stages=1,
    )  # fmt: skip
    segments = B * HK * layout.slots
    BC, unit = _unit(q, chunk_size)
    segment, unit_first = tiles(offsets, unit, order.shape[0], full=True)
    most = segment.shape[0]
    partial = torch.empty(most, 2, BC, shape[1], dtype=torch.float32, device=q.device)
    BM, warps, stages = _backward_launch(q)
    extra = q.new_zeros(K - 1, *q.shape)
    for part in range(chunk_size // BC):
        chunk_backward_kernel[(most + segments,)](
            q, k, v, do, lse, delta, dq, extra, dk, dv, partial, order, offsets, layout.starts, segment, unit_first,
            *strides(q), *strides(k), *strides(v), *strides(do),
            B * H, H, HK, HO, HKO, Tq, Tk, Tk - Tq, layout.slots, segments, most, part, scale,
            chunk_size, BC, *shape, BM, packed, precision(q), K, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        sum_partials_kernel[(most, BC // 16)](
            partial, dk, dv, layout.starts, segment, unit_first, HK, HKO, Tk, layout.slots, segments, part,
            chunk_size, BC, *shape, 16, packed,
        )  # fmt: skip
    if K > 1:
        size, width, stride = dq.numel(), H * D, dq.stride(1)
        add_extra_kernel[(triton.cdiv(size, 1024),)](dq, extra, size, width, stride, K, 1024)


def attend(
    q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """As the public `top1_chunk_attention`, with the selection given."""
    return forward(q, k, v, chunks, chunk_size, scale, cu_seqlens)[0]
