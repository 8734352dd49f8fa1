"""Top-1 element attention on Triton: search for the largest score, straight-through gradients, launches as operators.

Scores are in base 2: `s = q . k * scale * log2(e)`. A query is one entry `e` of `[B, H, Tq]`, as in the tables `top`
(its largest score), `index` (the key that has it), `lse` and `delta`. `first` and `stops` are the borders of the
document of each position.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.flops import causal_keys, last_queries
from seqarch.kernels.launch import gradient_of, operator, padded, precision, rows, sizes, strides
from seqarch.kernels.top1_chunk.layout import bucket_queries
from seqarch.kernels.top1_chunk.triton_attend import gather_rows, sorted_rows
from seqarch.kernels.top1_chunk.triton_select import LOG2E


@triton.jit
def load_rows(p, o_r, limit, stride, ALL: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """`[rows, BD]` at rows `o_r` of `p`; rows from `limit` on are zero, unless ALL says that every row exists."""
    o_d = tl.arange(0, BD)
    p_r = p + o_r.to(tl.int64)[:, None] * stride + o_d[None, :]
    if D < BD:
        b = tl.load(p_r, mask=(o_r < limit)[:, None] & (o_d < D)[None, :], other=0.0)
    elif ALL:
        b = tl.load(p_r)
    else:
        b = tl.load(p_r, mask=(o_r < limit)[:, None], other=0.0)
    return b


@triton.jit
def store_rows(p, b, o_r, limit, stride, D: tl.constexpr, BD: tl.constexpr):
    """The rows of `b` below `limit` to rows `o_r` of `p`."""
    o_d = tl.arange(0, BD)
    mask = (o_r < limit)[:, None] & (o_d < D)[None, :]
    tl.store(p + o_r.to(tl.int64)[:, None] * stride + o_d[None, :], b.to(p.dtype.element_ty), mask=mask)


@triton.jit
def query_block(first, Tq, Tk, offset, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr):
    """One block of queries, the last ones first: batch and head, indices, positions, first visible keys, bounds.
    All queries of the block see the keys from `start` to `diagonal`; some also see keys from there to `stop`."""
    blocks = (Tq + BT - 1) // BT
    i_bh, i_t = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    o_t = i_t * BT + tl.arange(0, BT)
    o_p = offset + o_t
    start, diagonal = 0, (offset + i_t * BT) // BK * BK
    b_first = tl.zeros([BT], tl.int32)
    if PACKED:
        b_first = tl.load(first + o_p, mask=o_t < Tq, other=Tk)
        start = tl.min(b_first, 0) // BK * BK
        diagonal = start
    return i_bh, o_t, o_p, b_first, start, diagonal, tl.minimum(offset + i_t * BT + BT, Tk)


@triton.jit
def search_step(
    b_q, p_k, stride_kt, key, Tk, o_p, b_first, b_best, b_key,
    BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Updates, for each column of a block of scores, the best so far and the block of keys that has it."""
    o_j = key + tl.arange(0, BK)
    b_k = load_rows(p_k, o_j, Tk, stride_kt, not MASKED, D, BD)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if MASKED:
        visible = (o_j[None, :] <= o_p[:, None]) & (o_j[None, :] >= b_first[:, None])
        b_s = tl.where(visible, b_s, float("-inf"))
    b_key = tl.where(b_s > b_best, key, b_key)
    return tl.maximum(b_best, b_s), b_key


@triton.jit
def forward_kernel(
    q, k, v, first, o, top, index,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    H, HK, Tq, Tk, offset, scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest score of each query of a block, the first key that has it, and that key's value."""
    i_bh, o_t, o_p, b_first, start, diagonal, stop = query_block(first, Tq, Tk, offset, BT, BK, PACKED)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    i_hk = i_h // (H // HK)
    b_q = load_rows(q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh, o_t, Tq, stride_qt, False, D, BD)
    p_k = k + i_b * stride_kb + i_hk.to(tl.int64) * stride_kh
    # The best is kept by column, so that a step costs two comparisons per score; columns are compared once, at the end.
    b_best = tl.full([BT, BK], float("-inf"), tl.float32)
    b_key = tl.zeros([BT, BK], tl.int32)
    for MASKED in tl.static_range(2):
        for key in range(diagonal if MASKED else start, stop if MASKED else diagonal, BK):
            b_best, b_key = search_step(
                b_q, p_k, stride_kt, key, Tk, o_p, b_first, b_best, b_key, BK, D, BD, MASKED, PRECISION
            )
    b_top = tl.max(b_best, 1)
    b_index = tl.min(tl.where(b_best == b_top[:, None], b_key + tl.arange(0, BK)[None, :], Tk), 1)
    valid = o_t < Tq
    o_e = i_bh.to(tl.int64) * Tq + o_t
    tl.store(top + o_e, b_top * (scale * LOG2E), mask=valid)
    tl.store(index + o_e, b_index, mask=valid)
    o_d = tl.arange(0, BD)
    p_v = v + i_b * stride_vb + i_hk.to(tl.int64) * stride_vh + b_index.to(tl.int64)[:, None] * stride_vt
    b_v = tl.load(p_v + o_d[None, :], mask=valid[:, None] & (o_d < D)[None, :], other=0.0)
    # A query without a finite score (NaN in q, say) selects nothing.
    b_v = tl.where((b_top > float("-inf"))[:, None], b_v, float("nan"))
    store_rows(o + (i_b * Tq * H + i_h) * D, b_v, o_t, Tq, H * D, D, BD)


@triton.jit
def query_step(
    b_q, b_do, b_top, b_c, p_k, p_v, stride_kt, stride_vt, key, Tk, o_p, b_first, b_l, b_e, b_mean, b_dq, scale,
    BK: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to `l = sum p`, `e = sum p (dP - c)`, `mean = sum p k` and `dq = sum p (dP - c) k`."""
    o_j = key + tl.arange(0, BK)
    b_k = load_rows(p_k, o_j, Tk, stride_kt, not MASKED, D, BD)
    b_v = load_rows(p_v, o_j, Tk, stride_vt, not MASKED, D, BD)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_p = tl.exp2(b_s * (scale * LOG2E) - b_top[:, None])
    if MASKED:
        visible = (o_j[None, :] <= o_p[:, None]) & (o_j[None, :] >= b_first[:, None])
        b_p = tl.where(visible, b_p, 0.0)
    b_x = b_p * (b_dp - b_c[:, None])
    b_l += tl.sum(b_p, 1)
    b_e += tl.sum(b_x, 1)
    b_mean = tl.dot(b_p.to(b_k.dtype), b_k, b_mean, input_precision=PRECISION)
    b_dq = tl.dot(b_x.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_l, b_e, b_mean, b_dq


@triton.jit
def query_backward_kernel(
    q, k, v, do, first, top, index, lse, delta, dq,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, H, HK, Tq, Tk, offset, scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, with their `lse` and `delta = sum_j p_ij dP_ij`, in one pass over the keys.

    Delta is known only at the end, so dP is first taken relative to `c = do . o`, its value at the selected key. The
    rest is corrected by the mean key: `dq = scale (sum_j p_j (dP_j - c) k_j - (delta - c) sum_j p_j k_j)`.
    """
    i_bh, o_t, o_p, b_first, start, diagonal, stop = query_block(first, Tq, Tk, offset, BT, BK, PACKED)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    i_hk = i_h // (H // HK)
    valid = o_t < Tq
    o_e = i_bh.to(tl.int64) * Tq + o_t
    b_q = load_rows(q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh, o_t, Tq, stride_qt, False, D, BD)
    b_do = load_rows(do + i_b * stride_gb + i_h.to(tl.int64) * stride_gh, o_t, Tq, stride_gt, False, D, BD)
    p_k = k + i_b * stride_kb + i_hk.to(tl.int64) * stride_kh
    p_v = v + i_b * stride_vb + i_hk.to(tl.int64) * stride_vh
    b_top = tl.load(top + o_e, mask=valid, other=0.0)
    b_index = tl.load(index + o_e, mask=valid, other=Tk)
    b_o = load_rows(p_v, b_index, Tk, stride_vt, False, D, BD)
    b_c = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    b_l = tl.zeros([BT], tl.float32)
    b_e = tl.zeros([BT], tl.float32)
    b_mean = tl.zeros([BT, BD], tl.float32)
    b_dq = tl.zeros([BT, BD], tl.float32)
    for MASKED in tl.static_range(2):
        for key in range(diagonal if MASKED else start, stop if MASKED else diagonal, BK):
            b_l, b_e, b_mean, b_dq = query_step(
                b_q, b_do, b_top, b_c, p_k, p_v, stride_kt, stride_vt, key, Tk, o_p, b_first, b_l, b_e, b_mean, b_dq,
                scale, BK, D, BD, MASKED, PRECISION,
            )  # fmt: skip
    b_e /= b_l
    tl.store(lse + o_e, b_top + tl.log2(b_l), mask=valid)
    tl.store(delta + o_e, b_c + b_e, mask=valid)
    b_dq = (b_dq - b_e[:, None] * b_mean) * (scale / b_l)[:, None]
    store_rows(dq + (i_b * Tq * H + i_h) * D, b_dq, o_t, Tq, H * D, D, BD)


@triton.jit
def key_step(
    q, do, lse, delta, b_k, b_v, o_j, b_stop, b_dk, i_b, i_h, o_t, H, Tq, offset, scale,
    stride_qb, stride_qt, stride_qh, stride_gb, stride_gt, stride_gh,
    D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one block of queries to dk (without the scale)."""
    i_h = i_h.to(tl.int64)
    b_q = load_rows(q + i_b * stride_qb + i_h * stride_qh, o_t, Tq, stride_qt, False, D, BD)
    b_do = load_rows(do + i_b * stride_gb + i_h * stride_gh, o_t, Tq, stride_gt, False, D, BD)
    o_e = (i_b * H + i_h) * Tq + o_t
    # Queries that do not exist have probabilities of zero.
    b_lse = tl.load(lse + o_e, mask=o_t < Tq, other=float("inf"))
    b_delta = tl.load(delta + o_e, mask=o_t < Tq, other=0.0)
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_p = tl.exp2(b_s * (scale * LOG2E) - b_lse[None, :])
    if MASKED:
        o_p = offset + o_t
        visible = (o_j[:, None] <= o_p[None, :]) & (o_p[None, :] < b_stop[:, None])
        b_p = tl.where(visible, b_p, 0.0)
    b_ds = (b_p * (b_dp - b_delta[None, :])).to(b_q.dtype)
    return tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)


@triton.jit
def key_backward_kernel(
    q, k, v, do, stops, lse, delta, dk,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh, H, HK, Tq, Tk, offset, scale,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk of a block of keys from the queries at and after them, of all query heads that share the key head."""
    blocks = (Tk + BK - 1) // BK
    i_row, key = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BK
    i_b, i_hk = (i_row // HK).to(tl.int64), i_row % HK
    o_j = key + tl.arange(0, BK)
    b_k = load_rows(k + i_b * stride_kb + i_hk.to(tl.int64) * stride_kh, o_j, Tk, stride_kt, False, D, BD)
    b_v = load_rows(v + i_b * stride_vb + i_hk.to(tl.int64) * stride_vh, o_j, Tk, stride_vt, False, D, BD)
    group = H // HK
    # Queries from `start` on see some of the keys. Queries from `start + partial * BT` on see all of them.
    start = tl.maximum(key - offset, 0)
    end = tl.minimum(tl.maximum(key + BK - offset, 0), Tq)
    partial = (tl.maximum(end - start, 0) + BT - 1) // BT
    full = (tl.maximum(Tq - start, 0) + BT - 1) // BT - partial
    b_stop = tl.full([BK], 0, tl.int32) + Tk
    if PACKED:
        b_stop = tl.load(stops + o_j, mask=o_j < Tk, other=0)
        partial = (tl.max(b_stop, 0) - start + BT - 1) // BT
        full = partial * 0
    b_dk = tl.zeros([BK, BD], tl.float32)
    for MASKED in tl.static_range(1, -1, -1):
        before, count = 0 if MASKED else partial, partial if MASKED else full
        for step in range(0, count * group):
            o_t = start + (before + step % count) * BT + tl.arange(0, BT)
            b_dk = key_step(
                q, do, lse, delta, b_k, b_v, o_j, b_stop, b_dk, i_b, i_hk * group + step // count, o_t, H, Tq, offset,
                scale, stride_qb, stride_qt, stride_qh, stride_gb, stride_gt, stride_gh, D, BD, MASKED, PRECISION,
            )  # fmt: skip
    store_rows(dk + (i_b * Tk * HK + i_hk) * D, b_dk * scale, o_j, Tk, HK * D, D, BD)


@triton.jit
def value_backward_kernel(
    do, index, order, offsets, dv, stride_gb, stride_gt, stride_gh, H, HK, Tq, Tk, blocks,
    D: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv of a block of keys: the sum of do over the queries that selected each, which are neighbours in `order`."""
    segment = tl.program_id(0)
    i_row = segment // blocks
    o_j = segment % blocks * BK + tl.arange(0, BK)
    b_dv = tl.zeros([BK, BD], tl.float32)
    stop = tl.load(offsets + segment + 1)
    for row in range(tl.load(offsets + segment), stop, BM):
        e, _, i_b, i_h, o_t, valid = sorted_rows(order, row, stop, 0, H, Tq, BM, 1)
        b_do = gather_rows(do, i_b, o_t, i_h, stride_gb, stride_gt, stride_gh, valid, D, BD)
        b_index = tl.load(index + e, mask=valid, other=-1)
        selected = (o_j[:, None] == b_index[None, :]).to(b_do.dtype)
        b_dv = tl.dot(selected, b_do, b_dv, input_precision=PRECISION)
    store_rows(dv + ((i_row // HK).to(tl.int64) * Tk * HK + i_row % HK) * D, b_dv, o_j, Tk, HK * D, D, BD)


VALUE_KEYS, VALUE_QUERIES = 64, 64
"""Keys per program and queries per step of the gradient of v."""


LAUNCHES = {
    "forward": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "query": {64: (64, 64, 4, 3), 128: (64, 32, 4, 3), 256: (64, 32, 8, 2)},
    "key": {64: (64, 128, 4, 3), 128: (64, 64, 4, 2), 256: (32, 128, 8, 2)},
}
"""Queries and keys per block, warps and steps in flight of each kernel, for head dims up to 64, 128 and 256."""
LAUNCHES_FLOAT32 = {
    "forward": {64: (64, 32, 8, 1), 128: (64, 32, 8, 1), 256: (64, 32, 8, 1)},
    "query": {64: (64, 32, 8, 1), 128: (32, 32, 8, 1), 256: (16, 32, 8, 1)},
    "key": {64: (32, 64, 8, 1), 128: (64, 32, 8, 1), 256: (16, 16, 4, 1)},
}


def launch(kernel: Literal["forward", "query", "key"], q: Tensor) -> tuple[int, int, dict[str, int]]:
    """Queries and keys per block of one of the kernels, and its launch options."""
    launches = LAUNCHES_FLOAT32 if q.dtype == torch.float32 else LAUNCHES
    BT, BK, warps, stages = launches[kernel][max(padded(q.shape[-1]), 64)]
    return BT, BK, {"num_warps": warps, "num_stages": stages}


def borders(cu_seqlens: Tensor | None, length: int) -> tuple[Tensor | None, Tensor | None]:
    """First and end position of the document of each of `length` positions, `[length]` int32."""
    if cu_seqlens is None:
        return None, None
    position = torch.arange(length, device=cu_seqlens.device, dtype=torch.int32)
    document = torch.searchsorted(cu_seqlens, position, right=True)
    return cu_seqlens[document - 1], cu_seqlens[document]


def _empty(q, k, v, scale, cu_seqlens):
    B, Tq, H, _ = q.shape
    o = torch.empty(q.shape, dtype=v.dtype, device=q.device)
    return o, *(torch.empty(B, H, Tq, dtype=dtype, device=q.device) for dtype in (torch.float32, torch.int32))


@operator("seqarch::top1_element_forward", _empty, flops=lambda q, k, *_: 2 * last_queries(causal_keys, q, k))
def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The output and, for each query `[B, H, Tq]`, the largest score in base 2 and the key that has it."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    q, k, v = rows(q), rows(k), rows(v)
    o, top, index = _empty(q, k, v, scale, cu_seqlens)
    first, _ = borders(cu_seqlens, Tk)
    BT, BK, options = launch("forward", q)
    forward_kernel[(triton.cdiv(Tq, BT) * B * H,)](
        q, k, v, first, o, top, index, *strides(q), *strides(k), *strides(v), H, HK, Tq, Tk, Tk - Tq, scale,
        D, padded(D), BT, BK, cu_seqlens is not None, precision(q), **options,
    )  # fmt: skip
    return o, top, index


@gradient_of(forward, gradients=3, keep=(1, 2), times=3)  # of the distribution, the queries and the keys
def backward(do, q, k, v, scale, cu_seqlens, top, index):
    """dq, dk and dv."""
    B, Tq, Tk, H, HK, D = sizes(q, k)
    q, k, v, do = rows(q), rows(k), rows(v), rows(do)
    first, stop = borders(cu_seqlens, Tk)
    dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    lse, delta = torch.empty_like(top), torch.empty_like(top)
    shape = (*strides(q), *strides(k), *strides(v), *strides(do), H, HK, Tq, Tk, Tk - Tq, scale, D, padded(D))
    BT, BK, options = launch("query", q)
    query_backward_kernel[(triton.cdiv(Tq, BT) * B * H,)](
        q, k, v, do, first, top, index, lse, delta, dq, *shape, BT, BK, first is not None, precision(q), **options
    )
    BT, BK, options = launch("key", q)
    key_backward_kernel[(triton.cdiv(Tk, BK) * B * HK,)](
        q, k, v, do, stop, lse, delta, dk, *shape, BT, BK, first is not None, precision(q), **options
    )
    # Sort queries by the block of keys that they selected from: one program adds up the queries of one block.
    blocks = triton.cdiv(Tk, VALUE_KEYS)
    row = torch.arange(0, B * HK * blocks, blocks, dtype=torch.int32, device=q.device)
    segment = index.view(B * HK, -1) // VALUE_KEYS + row.unsqueeze(1)
    buckets = bucket_queries(segment.flatten(), B * HK * blocks)
    value_backward_kernel[(B * HK * blocks,)](
        do, index, buckets.order, buckets.offsets, dv, *strides(do), H, HK, Tq, Tk, blocks,
        D, padded(D), VALUE_KEYS, VALUE_QUERIES, precision(q), num_warps=4, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None) -> Tensor:
    """As the public `top1_element_attention`."""
    return forward(q, k, v, scale, cu_seqlens)[0]
