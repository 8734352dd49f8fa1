"""Triton kernels of approximate selection: the products with the mean keys, all or first their high parts."""

import triton
import triton.language as tl

from seqarch.kernels.top1_chunk.triton_select import (
    keep_block,
    load_queries,
    mean_keys,
    mean_scores,
    none_kept,
    store_chunks,
)


@triton.jit
def slot_range(b_own, b_first, BS: tl.constexpr):
    """The first slot that a query may choose, where the blocks of BS slots end that all may, and the end of all."""
    start, stop = tl.min(b_first, 0), tl.max(b_own, 0)
    common = tl.where(tl.max(b_first, 0) == start, tl.maximum(tl.min(b_own, 0) - start, 0), 0)
    return start, start + common // BS * BS, stop


@triton.jit
def nothing_seen(BT: tl.constexpr, BS: tl.constexpr):
    """Start without scores: the maxima of columns, the largest score, the second block's, and the largest's block."""
    b_none = tl.full([BT], float("-inf"), tl.float32)
    return tl.full([BT, BS], float("-inf"), tl.float32), b_none, b_none, tl.zeros([BT], tl.int32)


@triton.jit
def see(b_s, s, b_columns, b_best, b_second, b_block):
    """Takes in the scores of the slots from `s`. Each enters two maxima: of its block, and of its column."""
    b_top = tl.max(b_s, 1)
    b_second = tl.maximum(b_second, tl.minimum(b_best, b_top))
    b_block = tl.where(b_top > b_best, s, b_block)
    return tl.maximum(b_columns, b_s), tl.maximum(b_best, b_top), b_second, b_block


@triton.jit
def store_best(
    b_q, b_columns, b_best, b_second, b_block, b_first, low, widest, chunks, marks, o_t, stride_ms, H, Tq,
    D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Writes the best slot's chunk, and whether low parts may change that.

    The second best slot is in another block of slots than the best, or in another column of it. The best slot's
    product is taken with both parts. Any other is at most `widest * |q|` above that with the high part.
    """
    o_s, o_d = tl.arange(0, BS)[None, :], tl.arange(0, BD)
    b_at = tl.min(tl.where(b_columns == b_best[:, None], o_s, BS), 1)
    b_second = tl.maximum(b_second, tl.max(tl.where(o_s == b_at[:, None], float("-inf"), b_columns), 1))
    b_slot = tl.where(b_best > float("-inf"), b_block + b_at, -1)
    p_low = low + b_slot[:, None].to(tl.int64) * stride_ms + o_d[None, :]
    b_low = tl.load(p_low, mask=(b_slot >= 0)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    b_qf = b_q.to(tl.float32)
    b_most = b_second + tl.sqrt(tl.sum(b_qf * b_qf, 1)) * tl.load(widest)
    b_open = (b_slot >= 0) & ~(b_best + tl.sum(b_qf * b_low, 1) > b_most)
    tl.store(marks + o_t, b_open.to(tl.int8), mask=o_t < Tq)
    store_chunks(chunks + o_t.to(tl.int64) * H, b_best, b_slot, b_first, o_t < Tq, 1, 1)


@triton.jit
def select_high_kernel(
    q, high, low, widest, own, first, chunks, marks,
    stride_qb, stride_qt, stride_qh, stride_mb, stride_ms, stride_mh, H, HK, Tq, offset,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The slot of largest product with the high part of its mean key, and a mark on the queries for which low parts
    may change that, for two blocks x and y of queries.

    The product of block y runs while the scores of block x are taken in: its own are taken in one step later.
    """
    i_t, i_bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_hk = i_h // (H // HK)
    x_t, x_q, x_own, x_first = load_queries(
        q, own, first, 2 * i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, C, D, BD, PACKED
    )
    y_t, y_q, y_own, y_first = load_queries(
        q, own, first, 2 * i_t + 1, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, C, D, BD, PACKED
    )
    base = i_b.to(tl.int64) * stride_mb + i_hk.to(tl.int64) * stride_mh
    x_start, x_edge, x_stop = slot_range(x_own, x_first, BS)
    y_start, y_edge, y_stop = slot_range(y_own, y_first, BS)
    start = tl.minimum(x_start, y_start)
    edge = tl.where(x_start == y_start, tl.minimum(x_edge, y_edge), start)
    stop = tl.maximum(x_stop, y_stop)
    x_columns, x_best, x_second, x_block = nothing_seen(BT, BS)
    y_columns, y_best, y_second, y_block = nothing_seen(BT, BS)
    y_s = y_columns
    for s in range(start, edge, BS):
        b_m = mean_keys(high, base, stride_ms, s, stop, BS, D, BD, False)
        x_s = tl.dot(x_q, b_m)
        y_columns, y_best, y_second, y_block = see(y_s, s - BS, y_columns, y_best, y_second, y_block)
        y_s = tl.dot(y_q, b_m)
        x_columns, x_best, x_second, x_block = see(x_s, s, x_columns, x_best, x_second, x_block)
    y_columns, y_best, y_second, y_block = see(y_s, edge - BS, y_columns, y_best, y_second, y_block)
    for s in range(edge, stop, BS):
        x_s = mean_scores(x_q, x_own, x_first, high, low, base, stride_ms, s, stop, BS, D, BD, False, "ieee")
        x_columns, x_best, x_second, x_block = see(x_s, s, x_columns, x_best, x_second, x_block)
        y_s = mean_scores(y_q, y_own, y_first, high, low, base, stride_ms, s, stop, BS, D, BD, False, "ieee")
        y_columns, y_best, y_second, y_block = see(y_s, s, y_columns, y_best, y_second, y_block)
    chunks += i_b.to(tl.int64) * Tq * H + i_h
    marks += i_bh.to(tl.int64) * Tq
    low += base
    widest += i_b * HK + i_hk
    store_best(
        x_q, x_columns, x_best, x_second, x_block, x_first, low, widest, chunks, marks, x_t, stride_ms, H, Tq, D, BD, BS
    )
    store_best(
        y_q, y_columns, y_best, y_second, y_block, y_first, low, widest, chunks, marks, y_t, stride_ms, H, Tq, D, BD, BS
    )


@triton.jit
def list_kernel(marks, places, lists, Tq, BT: tl.constexpr):
    """Lists the marked queries of each head; `places` counts the marks up to each query."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    row = tl.program_id(1).to(tl.int64) * Tq
    marked = tl.load(marks + row + o_t, mask=o_t < Tq, other=0) > 0
    tl.store(lists + row + tl.load(places + row + o_t, mask=marked, other=1) - 1, o_t, mask=marked)


@triton.jit
def select_approx_kernel(
    q, high, low, own, first, chunks, lists, counts,
    stride_qb, stride_qt, stride_qh, stride_mb, stride_ms, stride_mh, H, HK, Tq, offset,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The K slots whose mean keys have the largest products with the query, over blocks of BS slots.

    Where there are lists, only for the queries in them.
    """
    i_t, i_bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    o_t, b_q, b_own, b_first = load_queries(
        q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, C, D, BD, PACKED, lists, counts
    )
    base = i_b.to(tl.int64) * stride_mb + (i_h // (H // HK)).to(tl.int64) * stride_mh
    b_kept, b_slots = none_kept(BT, K, BK)
    start, edge, stop = slot_range(b_own, b_first, BS)
    for EDGE in tl.static_range(2):
        for s in range(edge if EDGE else start, stop if EDGE else edge, BS):
            b_s = mean_scores(
                b_q, b_own, b_first, high, low, base, stride_ms, s, stop, BS, D, BD, SPLIT, PRECISION, EDGE
            )
            b_kept, b_slots = keep_block(b_s, s, b_kept, b_slots, BS, K)
    o_out = ((i_b.to(tl.int64) * Tq + o_t) * H + i_h) * K
    store_chunks(chunks + o_out, b_kept, b_slots, b_first, o_t < Tq, K, BK)
