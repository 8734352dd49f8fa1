"""Triton kernels for the entropy of attention: one pass over the keys, which keeps only three numbers per query.

Top-1 chunk attention has the same layout as in its forward pass. Each of a query's K remote chunks leaves three
numbers, `[K, B, H, Tq]` each. They are the largest score `top` and, relative to it, `mass = sum exp(s - top)` and
`moment = sum (s - top) exp(s - top)`. Without a remote chunk, `top` is -1e30 and the others are 0. The local pass adds
the query's own chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.flops import causal_keys, chunk_keys, last_queries
from seqarch.kernels.launch import operator, padded, precision, rows, sizes, strides
from seqarch.kernels.top1_chunk.layout import chunk_layout, tiles
from seqarch.kernels.top1_chunk.op import chunks_per_query
from seqarch.kernels.top1_chunk.triton import sorted_queries
from seqarch.kernels.top1_chunk.triton_attend import gather_rows, load_keys, local_block, sorted_rows
from seqarch.kernels.top1_chunk.triton_select import LOG2E, slot_start
from seqarch.kernels.top1_element.triton import borders


@triton.jit
def remote_entropy_kernel(
    q, k, top, mass, moment, order, offsets, starts, tile_segment, tile_first,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, BH, H, HK, Tq, Tk, slots, segments, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The three numbers of one tile of sorted queries, for the chunk that they selected."""
    i = tl.program_id(0)
    segment = tl.load(tile_segment + i)
    if segment < segments:
        begin = tl.load(offsets + segment) + (i - tl.load(tile_first + segment)) * BM
        stop = tl.load(offsets + segment + 1)
        e, _, i_b, i_h, o_t, valid = sorted_rows(order, begin, stop, BH, H, Tq, BM, K)
        b_q = gather_rows(q, i_b, o_t, i_h, stride_qb, stride_qt, stride_qh, valid, D, BD)
        i_row = segment // slots
        key = slot_start(starts, segment % slots, Tk, C, PACKED)
        base = (i_row // HK).to(tl.int64) * stride_kb + (i_row % HK).to(tl.int64) * stride_kh
        b_k = load_keys(k, base, key, C, stride_kt, C, D, BD)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        b_m = tl.max(b_s, 1)
        b_x = b_s - b_m[:, None]
        b_p = tl.exp2(b_x * LOG2E)
        tl.store(top + e, b_m, mask=valid)
        tl.store(mass + e, tl.sum(b_p, 1), mask=valid)
        tl.store(moment + e, tl.sum(b_p * b_x, 1), mask=valid)


@triton.jit
def local_entropy_kernel(
    q, k, top, mass, moment, starts, entropy,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, H, HK, Tq, Tk, offset, slot0, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The entropy of a block of queries over the keys of their own chunk and what the remote pass left."""
    i_b, i_h = tl.program_id(1) // H, (tl.program_id(1) % H).to(tl.int64)
    start, stop, o_p, o_t, valid = local_block(starts, slot0, Tk, offset, BT, C, PACKED)
    i_b = i_b.to(tl.int64)
    b_q = gather_rows(q, i_b, o_t, i_h, stride_qb, stride_qt, stride_qh, valid, D, BD)
    base = i_b * stride_kb + (i_h // (H // HK)).to(tl.int64) * stride_kh
    b_k = load_keys(k, base, start, stop - start, stride_kt, C, D, BD)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    visible = (start + tl.arange(0, C))[None, :] <= o_p[:, None]
    o_e = tl.program_id(1).to(tl.int64) * Tq + o_t
    entries = tl.num_programs(1).to(tl.int64) * Tq
    b_m = tl.max(tl.where(visible, b_s, -1e30), 1)
    for i in tl.static_range(K):
        b_m = tl.maximum(b_m, tl.load(top + i * entries + o_e, mask=valid, other=-1e30))
    b_x = tl.where(visible, b_s - b_m[:, None], 0.0)
    b_p = tl.where(visible, tl.exp2(b_x * LOG2E), 0.0)
    b_l, b_w = tl.sum(b_p, 1), tl.sum(b_p * b_x, 1)
    for i in tl.static_range(K):
        o_i = i * entries + o_e
        b_lr = tl.load(mass + o_i, mask=valid, other=0.0)
        # The remote sums, now relative to the common maximum.
        b_shift = tl.load(top + o_i, mask=valid, other=-1e30) - b_m
        b_a = tl.exp2(b_shift * LOG2E)
        b_w += b_a * (tl.load(moment + o_i, mask=valid, other=0.0) + b_shift * b_lr)
        b_l += b_a * b_lr
    tl.store(entropy + (i_b * Tq + o_t) * H + i_h, tl.maximum(tl.log(b_l) - b_w / b_l, 0.0), mask=valid)


@triton.jit
def entropy_kernel(
    q, k, slopes, first, entropy,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, H, HK, Tq, Tk, offset, window, scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`ln sum_j exp s_j - sum_j p_j s_j` over the visible keys, in blocks of BK; the last queries run first."""
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // H, (i_bh % H).to(tl.int64)
    o_t = i_t * BT + tl.arange(0, BT)
    o_p = offset + o_t
    o_d = tl.arange(0, BD)
    p_q = q + i_b.to(tl.int64) * stride_qb + o_t[:, None].to(tl.int64) * stride_qt + i_h * stride_qh + o_d[None, :]
    b_q = tl.load(p_q, mask=(o_t < Tq)[:, None] & (o_d < D)[None, :], other=0.0)
    b_first = tl.maximum(o_p - window + 1, 0)
    if PACKED:
        b_first = tl.maximum(b_first, tl.load(first + o_p, mask=o_t < Tq, other=0))
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + i_h)
    p_k = k + i_b.to(tl.int64) * stride_kb + (i_h // (H // HK)) * stride_kh
    b_m = tl.full([BT], -1e30, tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    b_w = tl.zeros([BT], tl.float32)
    start = tl.min(b_first, 0) // BK * BK
    for key in range(start, tl.minimum(offset + i_t * BT + BT, Tk), BK):
        o_j = key + tl.arange(0, BK)
        p = p_k + o_j[None, :].to(tl.int64) * stride_kt + o_d[:, None]
        b_k = tl.load(p, mask=(o_d < D)[:, None] & (o_j < Tk)[None, :], other=0.0)
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale
        if ALIBI:
            b_s += slope * (o_j[None, :] - o_p[:, None]).to(tl.float32)
        visible = (o_j[None, :] <= o_p[:, None]) & (o_j[None, :] >= b_first[:, None])
        b_new = tl.maximum(b_m, tl.max(tl.where(visible, b_s, -1e30), 1))
        b_x = b_s - b_new[:, None]
        b_p = tl.where(visible, tl.exp2(b_x * LOG2E), 0.0)
        # The weighted sum is kept relative to the running maximum: w = sum p (s - m).
        b_shift = b_m - b_new
        b_a = tl.exp2(b_shift * LOG2E)
        b_w = tl.where(b_l > 0, b_a * (b_w + b_shift * b_l), 0.0) + tl.sum(b_p * tl.where(visible, b_x, 0.0), 1)
        b_l = b_a * b_l + tl.sum(b_p, 1)
        b_m = b_new
    b_h = tl.maximum(tl.log(b_l) - b_w / b_l, 0.0)
    tl.store(entropy + (i_b.to(tl.int64) * Tq + o_t) * H + i_h, b_h, mask=o_t < Tq)


def _empty(q, *_):
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _flops(q, k, scale, window, *_):
    return 2 * last_queries(causal_keys, q, k, window)


@operator("seqarch::attention_entropy", _empty, flops=_flops)
def attention_entropy(
    q: Tensor, k: Tensor, scale: float, window: int, alibi_slopes: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """As the public `attention_entropy`, without chunks; a `window` as long as the keys sees all of them."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    q, k = rows(q), rows(k)
    first, _ = borders(cu_seqlens, Tk)
    slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
    entropy = _empty(q)
    half = q.dtype != torch.float32
    BD = padded(D)
    BT, BK = (128, 64) if half and BD <= 128 else (64, 32)
    entropy_kernel[(triton.cdiv(Tq, BT), B * H)](
        q, k, slopes, first, entropy, *strides(q), *strides(k), H, HK, Tq, Tk, Tk - Tq, window, scale,
        D, BD, BT, BK, first is not None, slopes is not None, precision(q),
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return entropy


def _chunk_flops(q, k, chunks, chunk_size, *_):
    return 2 * last_queries(chunk_keys, q, k, chunk_size, *chunks[3:])


@operator("seqarch::top1_chunk_entropy", _empty, flops=_chunk_flops)
def top1_chunk_entropy(
    q: Tensor, k: Tensor, chunks: Tensor, chunk_size: int, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """As the public `attention_entropy` with chunks."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    q, k, chunks = rows(q), rows(k), chunks.contiguous()
    layout = chunk_layout(Tk, chunk_size, cu_seqlens)
    packed, K = cu_seqlens is not None, chunks_per_query(chunks)
    (order, offsets), segments = sorted_queries(chunks, k, layout, chunk_size)
    remote = torch.zeros(3, K, B, H, Tq, dtype=torch.float32, device=q.device)
    remote[0] = -1e30
    BM, warps = (64, 4 if chunk_size * D <= 2**14 else 8) if q.dtype != torch.float32 else (32, 8)
    segment, first_tile = tiles(offsets, BM, chunks.numel())
    remote_entropy_kernel[(segment.shape[0],)](
        q, k, *remote, order, offsets, layout.starts, segment, first_tile, *strides(q), *strides(k),
        B * H, H, HK, Tq, Tk, layout.slots, segments, scale, chunk_size, D, padded(D), BM, packed, precision(q), K,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    entropy = _empty(q)
    BT = min(chunk_size, BM)
    slot0 = (Tk - Tq) // chunk_size
    local_entropy_kernel[((layout.slots - slot0) * (chunk_size // BT), B * H)](
        q, k, *remote, layout.starts, entropy, *strides(q), *strides(k),
        H, HK, Tq, Tk, Tk - Tq, slot0, scale, chunk_size, D, padded(D), BT, packed, precision(q), K,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return entropy


def entropy(q, k, scale, window, alibi_slopes, chunk_size, chunks, cu_seqlens):
    """As the public `attention_entropy`."""
    if chunks is not None:
        return top1_chunk_entropy(q, k, chunks, chunk_size, scale, cu_seqlens)
    return attention_entropy(q, k, scale, window or k.shape[1], alibi_slopes, cu_seqlens)
