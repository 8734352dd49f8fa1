"""Triton kernels that select a chunk for each query."""

import triton
import triton.language as tl

ROUNDING = tl.constexpr(1.01)
"""Room for rounding in bounds computed from TF32 products."""
NO_SLOT = tl.constexpr(2147483647)
LOG2E = tl.constexpr(1.4426950408889634)
"""log2(e), since kernels take powers of 2."""


@triton.jit
def slot_start(starts, s, Tk, C: tl.constexpr, PACKED: tl.constexpr):
    """First key of slot `s`; one row's slots are its chunks, packed documents have a table."""
    if PACKED:
        return tl.load(starts + s)
    return tl.minimum(s * C, Tk)


@triton.jit
def position_slots(own, first, position, mask, C: tl.constexpr, PACKED: tl.constexpr):
    """Own slot of each position, and the first slot of its document; no slot fits where `mask` is false."""
    if PACKED:
        b_own = tl.load(own + position, mask=mask, other=0)
        b_first = tl.load(first + position, mask=mask, other=2147483647)
    else:
        b_own = tl.where(mask, position // C, 0)
        b_first = tl.where(mask, 0, 2147483647)
    return b_own, b_first


@triton.jit
def none_kept(BT: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Start without slots: masses and slots `[BT]`, or `[BT, BK]` for the K > 1 heaviest, in no order.

    A slot below 0 is empty. Empty slots differ within a row, so that each can be replaced by itself.
    """
    if K == 1:
        b_kept, b_slots = tl.full([BT], float("-inf"), tl.float32), tl.full([BT], -1, tl.int32)
    else:
        o_k = tl.arange(0, BK)[None, :] + tl.zeros([BT, 1], tl.int32)
        b_kept, b_slots = tl.where(o_k < K, float("-inf"), float("inf")), -1 - o_k
    return b_kept, b_slots


@triton.jit
def least_kept(b_kept, K: tl.constexpr):
    """The mass that a slot must exceed to be kept, `[BT]`."""
    return b_kept if K == 1 else tl.min(b_kept, 1)


@triton.jit
def keep_heavier(b_mass, b_slot, allowed, b_kept, b_slots, K: tl.constexpr):
    """Keeps the slot of each row where its mass exceeds the least mass kept; among equals the last slot gives way."""
    b_least = least_kept(b_kept, K)
    heavier = (b_mass > b_least) & allowed
    if K == 1:
        out = heavier
    else:
        least = b_kept == b_least[:, None]
        b_last = tl.max(tl.where(least, b_slots, -NO_SLOT), 1)
        out = least & (b_slots == b_last[:, None]) & heavier[:, None]
        b_mass, b_slot = b_mass[:, None], b_slot[:, None]
    return tl.where(out, b_mass, b_kept), tl.where(out, b_slot, b_slots)


@triton.jit
def take_heaviest(b_kept, b_slots):
    """The largest mass of each row, the lowest slot that has it, and the masses without it."""
    b_top = tl.max(b_kept, 1)
    b_slot = tl.min(tl.where(b_kept == b_top[:, None], b_slots, NO_SLOT), 1)
    return b_top, b_slot, tl.where(b_slots == b_slot[:, None], float("-inf"), b_kept)


@triton.jit
def store_chunks(chunks, b_kept, b_slots, b_first, mask, K: tl.constexpr, BK: tl.constexpr):
    """Writes the chunks of the slots kept to `chunks`, in falling order of mass; -1 for empty ones."""
    if K == 1:
        tl.store(chunks, tl.where(b_slots >= 0, b_slots - b_first, -1), mask=mask)
    else:
        b_kept = tl.where(tl.arange(0, BK)[None, :] < K, b_kept, float("-inf"))
        b_slots = tl.where(tl.arange(0, BK)[None, :] < K, b_slots, NO_SLOT)
        for i in tl.static_range(K):
            _, b_slot, b_kept = take_heaviest(b_kept, b_slots)
            tl.store(chunks + i, tl.where(b_slot >= 0, b_slot - b_first, -1), mask=mask)


@triton.jit
def growth(b_r):
    """`(exp(R) - 1 - R) / R^2`, rounded up."""
    b_r = tl.minimum(b_r, 60.0)
    b_series = 0.5 + b_r * (1.0 / 6 + b_r * (1.0 / 24 + b_r * (1.0 / 120 + b_r * (1.0 / 720))))
    b_large = tl.maximum(b_r, 0.5)
    return tl.where(b_r < 0.5, b_series, (tl.exp(b_large) - 1 - b_large) / (b_large * b_large)) * ROUNDING


@triton.jit
def chunk_stats_kernel(
    k, starts, query, high, low, lengths, radii, spreads, stride_kb, stride_kt, stride_kh, HK, slots, Tk, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """Mean key m of each slot, as the sum `high + low` of two numbers of the keys' dtype, and its longest key |k_j|.

    With SPREAD also the radius max |k_j - m| and a bound on the largest eigenvalue of the covariance
    A = mean (k_j - m)(k_j - m)^T. The bound is (tr A^8)^(1/8), or tr A if the chunk is too large to square A. The
    products between keys have the same eigenvalues, and are the smaller matrix where a chunk has fewer keys than dims.
    It is also tr A where even the mean eigenvalue would keep this chunk for a query of the length `query`.
    """
    i_s, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // HK, (i_bh % HK).to(tl.int64)
    start = slot_start(starts, i_s, Tk, C, PACKED)
    stop = slot_start(starts, i_s + 1, Tk, C, PACKED)
    o_t = start + tl.arange(0, C)
    o_d = tl.arange(0, BD)
    p_k = k + i_b.to(tl.int64) * stride_kb + o_t[:, None].to(tl.int64) * stride_kt + i_h * stride_kh + o_d[None, :]
    b_k = tl.load(p_k, mask=(o_t < stop)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    b_mean = tl.sum(b_k, 0) / C
    b_high = b_mean.to(high.dtype.element_ty)
    o_out = ((i_b.to(tl.int64) * slots + i_s) * HK + i_h) * D + o_d
    tl.store(high + o_out, b_high, mask=o_d < D)
    o_s = i_bh.to(tl.int64) * slots + i_s
    longest = tl.sqrt(tl.max(tl.sum(b_k * b_k, 1), 0))
    tl.store(lengths + o_s, longest)
    if SPLIT:
        tl.store(low + o_out, (b_mean - b_high.to(tl.float32)).to(low.dtype.element_ty), mask=o_d < D)
    if SPREAD:
        b_c = b_k - b_mean[None, :]
        b_r = tl.sum(b_c * b_c, 1)
        trace = tl.sum(b_r, 0) / C
        radius = tl.sqrt(tl.max(b_r, 0))
        reach = tl.load(query) * scale
        mean = trace / (C if C < D else D)
        spread = trace
        if C * BD <= 16384:  # noqa: SIM102 - the compiler knows this, and leaves the rest out where it is false
            if reach * growth(reach * radius) * mean < 2 * longest:
                b_a = tl.dot(tl.trans(b_c), b_c) if C >= BD else tl.dot(b_c, tl.trans(b_c))
                b_a /= C * tl.maximum(trace, 1e-30)
                b_a = tl.dot(b_a, b_a)
                b_a = tl.dot(b_a, b_a)
                spread = tl.minimum(trace, trace * tl.sqrt(tl.sqrt(tl.sqrt(tl.sum(tl.sum(b_a * b_a, 1), 0)))))
        tl.store(spreads + o_s, spread * ROUNDING)
        tl.store(radii + o_s, radius)


@triton.jit
def load_queries(
    q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset,
    BT: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr,
    lists=None, counts=None,
):  # fmt: skip
    """A block of queries, or of a list of them, with the slots of their positions: own, and first of the document."""
    o_t = i_t * BT + tl.arange(0, BT)
    if lists is not None:
        i_list = tl.program_id(1)
        o_t = tl.load(lists + i_list.to(tl.int64) * Tq + o_t, mask=o_t < tl.load(counts + i_list), other=Tq)
    o_d = tl.arange(0, BD)
    p_q = q + i_b.to(tl.int64) * stride_qb + i_h.to(tl.int64) * stride_qh
    p_q += o_t[:, None].to(tl.int64) * stride_qt + o_d[None, :]
    b_q = tl.load(p_q, mask=(o_t < Tq)[:, None] & (o_d < D)[None, :], other=0.0)
    b_own, b_first = position_slots(own, first, offset + o_t, o_t < Tq, C, PACKED)
    return o_t, b_q, b_own, b_first


@triton.jit
def mean_scores(
    b_q, b_own, b_first, high, low, base, stride_ms, s, stop,
    BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    EDGE: tl.constexpr = True,
):  # fmt: skip
    """Products with the mean keys of BS slots from `s`; -inf for those that a query may not choose.

    Without EDGE all queries may choose all of these slots.
    """
    o_d, o_s = tl.arange(0, BD), tl.arange(0, BS)
    o_m = base + tl.cast(s, tl.int64) * stride_ms + (o_s * stride_ms)[None, :] + o_d[:, None]
    o_s += s
    mask = (o_d < D)[:, None]
    if EDGE:
        mask &= (o_s < stop)[None, :]
    b_s = tl.dot(b_q, tl.load(high + o_m, mask=mask, other=0.0), input_precision=PRECISION)
    if SPLIT:
        b_s = tl.dot(b_q, tl.load(low + o_m, mask=mask, other=0.0), b_s)
    if EDGE:
        earlier = (o_s[None, :] < b_own[:, None]) & (o_s[None, :] >= b_first[:, None])
        b_s = tl.where(earlier, b_s, float("-inf"))
    return b_s


@triton.jit
def keep_block(b_s, s, b_kept, b_slots, BS: tl.constexpr, K: tl.constexpr):
    """Keeps the heaviest of BS slots from `s`, whose masses are `b_s [BT, BS]`; -inf where a query may not choose."""
    for _ in tl.static_range(K):
        b_top, b_at = tl.max(b_s, 1, return_indices=True)
        b_kept, b_slots = keep_heavier(b_top, s + b_at, b_top > float("-inf"), b_kept, b_slots, K)
        if K > 1:
            b_s = tl.where(tl.arange(0, BS)[None, :] == b_at[:, None], float("-inf"), b_s)
    return b_kept, b_slots


@triton.jit
def segment_keys_kernel(
    chunks, own, first, keys, H, HK, Tq, offset, slots, segments,
    C: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The segment of each entry, `[K, B, H, Tq]`; `segments` for those without a remote chunk.

    A chunk that a given selection names twice for a query counts once.
    """
    i_bh, i_k = tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // H, i_bh % H
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    mask = o_t < Tq
    b_own, b_first = position_slots(own, first, offset + o_t, mask, C, PACKED)
    p_chunk = chunks + ((i_b.to(tl.int64) * Tq + o_t) * H + i_h) * K
    b_chunk = tl.load(p_chunk + i_k, mask=mask, other=-1)
    for i in range(0, i_k):
        b_chunk = tl.where(tl.load(p_chunk + i, mask=mask, other=-1) == b_chunk, -1, b_chunk)
    b_slot = b_chunk + b_first
    b_key = tl.where((b_chunk >= 0) & (b_slot < b_own), (i_b * HK + i_h // (H // HK)) * slots + b_slot, segments)
    o_key = (i_k.to(tl.int64) * tl.num_programs(1) + i_bh) * Tq + o_t
    tl.store(keys + o_key, b_key, mask=mask)
