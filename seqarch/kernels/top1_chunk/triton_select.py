"""Triton kernels that select a chunk for each query."""

from __future__ import annotations

import triton
import triton.language as tl

POLYNOMIAL_BOUND = tl.constexpr(0.16)
"""Scores below this are summed through a polynomial of degree 4, whose error there is below 2^-24."""
PLAIN_BOUND = tl.constexpr(80.0)
"""Scores below this need no maximum: C * exp(80) is a float32."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_stats_kernel(
    k, starts, high, low, norms,
    stride_kb, stride_kt, stride_kh, HK, slots, Tk,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Mean key of each slot, as the sum `high + low` of two numbers of the keys' dtype, and its longest key."""
    i_s, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // HK, i_bh % HK
    start = tl.load(starts + i_s)
    stop = tl.load(starts + i_s + 1)
    o_t = start + tl.arange(0, C)
    o_d = tl.arange(0, BD)
    p_k = k + i_b.to(tl.int64) * stride_kb + o_t[:, None].to(tl.int64) * stride_kt + i_h * stride_kh + o_d[None, :]
    b_k = tl.load(p_k, mask=(o_t < stop)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    b_mean = tl.sum(b_k, 0) / C
    b_high = b_mean.to(high.dtype.element_ty)
    o_out = ((i_b.to(tl.int64) * slots + i_s) * HK + i_h) * D + o_d
    tl.store(high + o_out, b_high, mask=o_d < D)
    if SPLIT:
        tl.store(low + o_out, (b_mean - b_high.to(tl.float32)).to(low.dtype.element_ty), mask=o_d < D)
    tl.store(norms + i_bh.to(tl.int64) * slots + i_s, tl.sqrt(tl.max(tl.sum(b_k * b_k, 1), 0)))


@triton.jit
def load_queries(
    q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset,
    BT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A block of queries, with the slots of their positions: own, and first of the document."""
    o_t = i_t * BT + tl.arange(0, BT)
    o_d = tl.arange(0, BD)
    p_q = q + i_b.to(tl.int64) * stride_qb + o_t[:, None].to(tl.int64) * stride_qt + i_h * stride_qh + o_d[None, :]
    b_q = tl.load(p_q, mask=(o_t < Tq)[:, None] & (o_d < D)[None, :], other=0.0)
    b_own = tl.load(own + offset + o_t, mask=o_t < Tq, other=0)
    b_first = tl.load(first + offset + o_t, mask=o_t < Tq, other=2147483647)
    return o_t, b_q, b_own, b_first


@triton.jit
def select_approx_kernel(
    q, high, low, own, first, chunks,
    stride_qb, stride_qt, stride_qh, stride_mb, stride_ms, stride_mh, H, HK, Tq, offset,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The slot whose mean key has the largest product with the query, over blocks of BS slots."""
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    o_t, b_q, b_own, b_first = load_queries(
        q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, D, BD
    )
    start = tl.min(b_first, 0)
    stop = tl.max(b_own, 0)
    o_d = tl.arange(0, BD)
    base = i_b.to(tl.int64) * stride_mb + (i_h // (H // HK)) * stride_mh
    b_best = tl.full([BT], float("-inf"), tl.float32)
    b_slot = tl.full([BT], -1, tl.int32)
    for s in range(start, stop, BS):
        o_s = s + tl.arange(0, BS)
        mask = (o_d < D)[:, None] & (o_s < stop)[None, :]
        o_m = base + o_s[None, :].to(tl.int64) * stride_ms + o_d[:, None]
        b_s = tl.dot(b_q, tl.load(high + o_m, mask=mask, other=0.0), input_precision=PRECISION)
        if SPLIT:
            b_s = tl.dot(b_q, tl.load(low + o_m, mask=mask, other=0.0), b_s)
        earlier = (o_s[None, :] < b_own[:, None]) & (o_s[None, :] >= b_first[:, None])
        b_top, b_at = tl.max(tl.where(earlier, b_s, float("-inf")), 1, return_indices=True)
        b_slot = tl.where(b_top > b_best, s + b_at, b_slot)
        b_best = tl.maximum(b_top, b_best)
    b_chunk = tl.where(b_slot >= 0, b_slot - b_first, -1)
    tl.store(chunks + (i_b.to(tl.int64) * Tq + o_t) * H + i_h, b_chunk, mask=o_t < Tq)


@triton.jit
def chunk_mass(b_s, scale, bound, MODE: tl.constexpr):
    """A number that grows with `sum_j exp(scale * s_ij)`; modes are not comparable with each other.

    "polynomial": the sum of exp(x) - 1 for |x| <= bound, Taylor's series to x^4 with its next term economised, that is
    x^5 replaced by its Chebyshev approximation of degree 3, `5/4 bound^2 x^3 - 5/16 bound^4 x`.
    "plain": the sum itself. "safe": its logarithm, for scores of any size.
    """
    if MODE == "polynomial":
        c1 = scale * (1.0 - bound * bound * bound * bound / 384.0)
        c2 = scale * scale * 0.5
        c3 = scale * scale * scale * (1.0 / 6.0 + bound * bound / 96.0)
        c4 = scale * scale * scale * scale / 24.0
        return tl.sum((((b_s * c4 + c3) * b_s + c2) * b_s + c1) * b_s, 1)
    if MODE == "plain":
        return tl.sum(tl.exp2(b_s * (scale * LOG2E)), 1)
    b_s = b_s * (scale * LOG2E)
    b_m = tl.max(b_s, 1)
    return b_m + tl.log2(tl.sum(tl.exp2(b_s - b_m[:, None]), 1))


@triton.jit
def heaviest_slot(
    b_q, b_own, b_first, p_k, starts, stride_kt, Tk, scale, bound, start, stop,
    BT: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The slot of largest mass among those from `start` to `stop` that each query may choose; -1 if none."""
    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BD)
    b_best = tl.full([BT], float("-inf"), tl.float32)
    b_slot = tl.full([BT], -1, tl.int32)
    for s in range(start, stop):
        key = s * C
        if PACKED:
            key = tl.load(starts + s)
        p = p_k + (key + o_c)[None, :].to(tl.int64) * stride_kt + o_d[:, None]
        if PACKED:
            b_k = tl.load(p, mask=(o_d < D)[:, None] & (key + o_c < Tk)[None, :], other=0.0)
        elif BD > D:
            b_k = tl.load(p, mask=(o_d < D)[:, None], other=0.0)
        else:
            b_k = tl.load(p)
        b_mass = chunk_mass(tl.dot(b_q, b_k, input_precision=PRECISION), scale, bound, MODE)
        better = (b_mass > b_best) & (s < b_own) & (s >= b_first)
        b_best = tl.where(better, b_mass, b_best)
        b_slot = tl.where(better, s, b_slot)
    return b_slot


@triton.jit
def select_exact_kernel(
    q, k, starts, own, first, norms, chunks,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, H, HK, Tq, Tk, offset, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The slot of largest attention mass for a block of queries; the last blocks, which have most to do, run first.

    A launch handles the blocks whose scores are bounded as its MODE needs and leaves the others to the other launches.
    """
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_hk = i_h // (H // HK)
    o_t, b_q, b_own, b_first = load_queries(
        q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, D, BD
    )
    start = tl.min(b_first, 0)
    stop = tl.max(b_own, 0)
    p_k = k + i_b.to(tl.int64) * stride_kb + i_hk * stride_kh
    b_qf = b_q.to(tl.float32)
    # The bound of Cauchy and Schwarz on all scores of the block, with room for the rounding of the products.
    bound = tl.sqrt(tl.max(tl.sum(b_qf * b_qf, 1), 0)) * tl.load(norms + i_b * HK + i_hk) * scale * 1.01
    if MODE == "polynomial":
        mine = bound <= POLYNOMIAL_BOUND
    elif MODE == "plain":
        mine = (bound > POLYNOMIAL_BOUND) & (bound <= PLAIN_BOUND)
    else:
        mine = ~(bound <= PLAIN_BOUND)
    if mine:
        b_slot = heaviest_slot(
            b_q, b_own, b_first, p_k, starts, stride_kt, Tk, scale, bound, start, stop,
            BT, C, D, BD, PACKED, PRECISION, MODE,
        )  # fmt: skip
        b_chunk = tl.where(b_slot >= 0, b_slot - b_first, -1)
        tl.store(chunks + (i_b.to(tl.int64) * Tq + o_t) * H + i_h, b_chunk, mask=o_t < Tq)
