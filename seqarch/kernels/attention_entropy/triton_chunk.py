"""Triton kernels for the entropy of Top-1 chunk attention, with the same layout as that attention's forward pass.

Each of a query's K remote chunks leaves three numbers, `[K, B, H, Tq]` each. They are the largest score `top` and,
relative to it, `mass = sum exp(s - top)` and `moment = sum (s - top) exp(s - top)`. Without a remote chunk, `top` is
-1e30 and the others are 0. The local pass adds the query's own chunk.
"""

import triton
import triton.language as tl

from seqarch.kernels.top1_chunk.triton_attend import gather_rows, load_keys, local_block, sorted_rows
from seqarch.kernels.top1_chunk.triton_select import LOG2E, slot_start


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
