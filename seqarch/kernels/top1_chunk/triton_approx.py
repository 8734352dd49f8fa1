"""Triton kernels of approximate selection: the products with the mean keys, all or first their high parts."""

import triton
import triton.language as tl

from seqarch.kernels.top1_chunk.triton_select import keep_block, load_queries, mean_scores, none_kept, store_chunks


@triton.jit
def slot_range(b_own, b_first, BS: tl.constexpr):
    """The first slot that a query may choose, where the blocks of BS slots end that all may, and the end of all."""
    start, stop = tl.min(b_first, 0), tl.max(b_own, 0)
    common = tl.where(tl.max(b_first, 0) == start, tl.maximum(tl.min(b_own, 0) - start, 0), 0)
    return start, start + common // BS * BS, stop


@triton.jit
def select_high_kernel(
    q, high, low, widest, own, first, chunks, marks,
    stride_qb, stride_qt, stride_qh, stride_mb, stride_ms, stride_mh, H, HK, Tq, offset,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The slot of largest product with the high part of its mean key, and a mark on the queries for which low parts
    may change that.

    The best slot's product is computed with both parts. Any other is at most `widest * |q|` above that with the high
    part. The second best slot is in another block of BS slots than the best, or in another column of it. So each score
    enters two maxima: of its block, and of its column in all blocks.
    """
    i_t, i_bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_hk = i_h // (H // HK)
    o_t, b_q, b_own, b_first = load_queries(
        q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, C, D, BD, PACKED
    )
    base = i_b.to(tl.int64) * stride_mb + i_hk.to(tl.int64) * stride_mh
    start, edge, stop = slot_range(b_own, b_first, BS)
    b_columns = tl.full([BT, BS], float("-inf"), tl.float32)
    b_best = tl.full([BT], float("-inf"), tl.float32)
    b_second = b_best
    b_block = tl.zeros([BT], tl.int32)
    for EDGE in tl.static_range(2):
        for s in range(edge if EDGE else start, stop if EDGE else edge, BS):
            b_s = mean_scores(b_q, b_own, b_first, high, low, base, stride_ms, s, stop, BS, D, BD, False, "ieee", EDGE)
            b_columns = tl.maximum(b_columns, b_s)
            b_top = tl.max(b_s, 1)
            b_second = tl.maximum(b_second, tl.minimum(b_best, b_top))
            b_block = tl.where(b_top > b_best, s, b_block)
            b_best = tl.maximum(b_best, b_top)
    o_s = tl.arange(0, BS)[None, :]
    b_at = tl.min(tl.where(b_columns == b_best[:, None], o_s, BS), 1)
    b_second = tl.maximum(b_second, tl.max(tl.where(o_s == b_at[:, None], float("-inf"), b_columns), 1))
    b_slot = tl.where(b_best > float("-inf"), b_block + b_at, -1)
    o_d = tl.arange(0, BD)
    p_low = low + base + b_slot[:, None].to(tl.int64) * stride_ms + o_d[None, :]
    b_low = tl.load(p_low, mask=(b_slot >= 0)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    b_qf = b_q.to(tl.float32)
    b_most = b_second + tl.sqrt(tl.sum(b_qf * b_qf, 1)) * tl.load(widest + i_b * HK + i_hk)
    b_open = (b_slot >= 0) & ~(b_best + tl.sum(b_qf * b_low, 1) > b_most)
    tl.store(marks + i_bh.to(tl.int64) * Tq + o_t, b_open.to(tl.int8), mask=o_t < Tq)
    store_chunks(chunks + (i_b.to(tl.int64) * Tq + o_t) * H + i_h, b_best, b_slot, b_first, o_t < Tq, 1, 1)


@triton.jit
def list_kernel(marks, places, lists, Tq, BT: tl.constexpr):
    """Lists the marked queries of each head; `places` counts the marks up to each query of all."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    i_bh = tl.program_id(1).to(tl.int64)
    before = tl.load(places + i_bh * Tq - 1, mask=i_bh > 0, other=0)
    marked = tl.load(marks + i_bh * Tq + o_t, mask=o_t < Tq, other=0) > 0
    b_place = tl.load(places + i_bh * Tq + o_t, mask=marked, other=0) - before
    tl.store(lists + i_bh * Tq + b_place - 1, o_t, mask=marked)


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
    if lists is not None:  # noqa: SIM102 - one of the two is known when the kernel is compiled
        if i_t * BT >= tl.load(counts + i_bh):
            return
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
