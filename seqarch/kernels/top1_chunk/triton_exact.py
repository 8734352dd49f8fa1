"""Triton kernels of the exact selection: which slots may win, and the masses of those."""

import triton
import triton.language as tl

from seqarch.kernels.top1_chunk.triton_select import (
    LOG2E,
    ROUNDING,
    growth,
    keep_block,
    keep_heavier,
    least_kept,
    load_queries,
    mean_scores,
    none_kept,
    slot_start,
    store_chunks,
)

POLYNOMIAL_BOUND = tl.constexpr(0.16)
"""Scores below this are summed through a polynomial of degree 4, whose error there is below 2^-24."""
PLAIN_BOUND = tl.constexpr(80.0)
"""Scores below this need no maximum: C * exp(80) is a float32."""
SLACK = tl.constexpr(2.0**-12)
"""Room for rounding in the mean scores, as a share of the largest possible score."""
FULL = tl.constexpr(0.6)
"""Share of the earlier slots from which on a list counts as full."""


@triton.jit
def candidates_kernel(
    q, high, low, longest, widest, narrowest, spreads, own, first, lists, counts, full,
    stride_qb, stride_qt, stride_qh, stride_mb, stride_ms, stride_mh, H, HK, Tq, offset, slots, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, PACKED: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The slots that may hold one of the K largest masses of some query of the block, in rising order.

    With x = scale * q . (k_j - m), |x| <= R, the mass of a chunk is C exp(scale q.m) mean(exp x), and (README.md)

        1 <= mean(exp x) <= 1 + |scale q|^2 lambda phi(R),   phi(R) = (exp(R) - 1 - R) / R^2,

    so a chunk whose upper bound is below the K-th largest lower bound cannot win. The mean scores differ by at most
    2 |scale q| max |k_j|. Where the second bound exceeds this for every chunk, none is compared.
    """
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_hk = i_b * HK + i_h // (H // HK)
    _, b_q, b_own, b_first = load_queries(
        q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, C, D, BD, PACKED
    )
    start = tl.min(b_first, 0)
    stop = tl.max(b_own, 0)
    base = i_b.to(tl.int64) * stride_mb + (i_h // (H // HK)).to(tl.int64) * stride_mh
    b_qf = b_q.to(tl.float32)
    b_length = tl.sqrt(tl.sum(b_qf * b_qf, 1)) * scale
    b_largest = b_length * tl.load(longest + i_hk)
    b_weight = b_length * b_length * growth(b_length * tl.load(widest + i_hk) * ROUNDING)
    p_spreads = spreads + i_hk.to(tl.int64) * slots
    p_list = lists + (i_bh.to(tl.int64) * tl.num_programs(0) + i_t) * slots
    count = stop - start
    least = tl.load(narrowest + i_hk)
    b_all = (b_weight * least >= b_largest * (2 * ROUNDING)) & (b_own == stop) & (b_first == start)
    if tl.max(b_all.to(tl.int32), 0) > 0:
        for s in range(start, stop, BS):
            o_s = s + tl.arange(0, BS)
            tl.store(p_list + o_s - start, o_s.to(lists.dtype.element_ty), mask=o_s < stop)
    else:
        b_kept, b_slots = none_kept(BT, K, BK)
        for s in range(start, stop, BS):
            b_s = mean_scores(b_q, b_own, b_first, high, low, base, stride_ms, s, stop, BS, D, BD, SPLIT, PRECISION)
            if K == 1:
                b_kept = tl.maximum(b_kept, tl.max(b_s, 1))
            else:
                b_kept, b_slots = keep_block(b_s, s, b_kept, b_slots, BS, K)
        b_least = least_kept(b_kept, K) * scale - b_largest * SLACK
        count = 0
        for s in range(start, stop, BS):
            b_s = mean_scores(b_q, b_own, b_first, high, low, base, stride_ms, s, stop, BS, D, BD, SPLIT, PRECISION)
            o_s = s + tl.arange(0, BS)
            b_spread = tl.load(p_spreads + o_s, mask=o_s < stop, other=0.0)
            b_may = b_s * scale + b_weight[:, None] * b_spread[None, :] >= b_least[:, None]
            b_any = tl.max((b_may & (b_s > float("-inf"))).to(tl.int32), 0)
            tl.store(p_list + count + tl.cumsum(b_any, 0) - b_any, o_s.to(lists.dtype.element_ty), mask=b_any > 0)
            count += tl.sum(b_any, 0)
    i_block = i_bh * tl.num_programs(0) + i_t
    tl.store(counts + i_block, count)
    tl.store(full + i_block, count >= (stop - start) * FULL)


@triton.jit
def fma_exp2(x):
    """2^x for |x| < 126 on the FMA units. The relative error is below 2^-22, as that of `exp2`.

    The integer next to x goes into the exponent of a minimax polynomial.
    """
    shifted = x + 12582912.0  # 1.5 * 2^23: the sum is rounded to an integer, which its low bits hold
    f = x - (shifted - 12582912.0)
    power = ((1.32764721e-3 * f + 9.67554139e-3) * f + 5.55071327e-2) * f + 0.240221197
    power = (power * f + 0.693146967) * f + 1.000000072
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (exponent + power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """Every other group of the columns `x [BT, N, 8]`, twice `[BT, N / 2, 8]`."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2, 8]), [0, 1, 3, 2]))


@triton.jit
def neighbours(x):
    """The two of each pair of the columns `x [BT, N, 8]`."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 4, 2]))


@triton.jit
def sum_exp2(x):
    """`sum_j 2^x_ij` of `x [BT, N]`, an eighth of the powers on the FMA units, which idle while others compute `exp2`.

    A thread has two neighbours in each group of eight columns of a product, so it splits its own registers.
    """
    even, odd = halves(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]))
    x0, x1 = halves(even)
    x2, x3 = halves(odd)
    a, b = neighbours(x0)
    c, d = neighbours(tl.exp2(x1) + tl.exp2(x2) + tl.exp2(x3))
    total = fma_exp2(a) + tl.exp2(b) + c + d
    return tl.sum(tl.reshape(total, [x.shape[0], x.shape[1] // 8]), 1)


@triton.jit
def chunk_mass(b_s, b_part, scale, bound, MODE: tl.constexpr, BY_FMA: tl.constexpr):
    """A number that grows with `sum_j exp(scale * s_ij)`; modes are not comparable with each other.

    `b_part` is that of the keys before these, or none: 0, and for "safe" -inf.

    "polynomial": the sum of exp(x) - 1 for |x| <= bound, by Taylor's series to x^4 with its next term economised. Its
    x^5 is replaced by the Chebyshev approximation of degree 3, `5/4 bound^2 x^3 - 5/16 bound^4 x`.
    "plain": the sum itself. "safe": its logarithm, for scores of any size.
    """
    if MODE == "polynomial":
        c1 = scale * (1.0 - bound * bound * bound * bound / 384.0)
        c2 = scale * scale * 0.5
        c3 = scale * scale * scale * (1.0 / 6.0 + bound * bound / 96.0)
        c4 = scale * scale * scale * scale / 24.0
        return b_part + tl.sum((((b_s * c4 + c3) * b_s + c2) * b_s + c1) * b_s, 1)
    if MODE == "plain":
        b_s = b_s * (scale * LOG2E)
        return b_part + (sum_exp2(b_s) if BY_FMA else tl.sum(tl.exp2(b_s), 1))
    b_s = b_s * (scale * LOG2E)
    b_m = tl.maximum(tl.max(b_s, 1), b_part)
    return b_m + tl.log2(tl.exp2(b_part - b_m) + tl.sum(tl.exp2(b_s - b_m[:, None]), 1))


@triton.jit
def score_bound(b_q, longest, scale):
    """The bound of Cauchy and Schwarz on all scores of a block."""
    b_qf = b_q.to(tl.float32)
    return tl.sqrt(tl.max(tl.sum(b_qf * b_qf, 1), 0)) * longest * scale * ROUNDING


@triton.jit
def serves(MODE: tl.constexpr, bound):
    """Whether MODE is the way to add up masses of scores up to `bound`."""
    if MODE == "polynomial":
        return bound <= POLYNOMIAL_BOUND
    if MODE == "plain":
        return (bound > POLYNOMIAL_BOUND) & (bound <= PLAIN_BOUND)
    return ~(bound <= PLAIN_BOUND)


@triton.jit
def is_full(full, i_bh, group, blocks, GROUP: tl.constexpr):
    """Whether the lists of all blocks of a group are full."""
    o_t = group * GROUP + tl.arange(0, GROUP)
    return tl.min(tl.load(full + i_bh * blocks + o_t, mask=o_t < blocks, other=1).to(tl.int32), 0) > 0


@triton.jit
def load_chunk(k, key, stride_kt, Tk, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr):
    """`[BD, C]` keys from position `key`."""
    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BD)
    p = k + (key + o_c)[None, :].to(tl.int64) * stride_kt + o_d[:, None]
    if PACKED:
        return tl.load(p, mask=(o_d < D)[:, None] & (key + o_c < Tk)[None, :], other=0.0)
    if BD > D:
        return tl.load(p, mask=(o_d < D)[:, None], other=0.0)
    return tl.load(p)


@triton.jit
def keep_mass(
    b_s, s, part, b_own, b_first, kept, b_part, scale, bound,
    MODE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, BY_FMA: tl.constexpr,
):  # fmt: skip
    """Keeps slot `s` for the queries whose mass of it is heavy enough, from the products `b_s` of one of its parts.

    `kept` are masses and slots, and `b_part` is the mass of the parts before. A slot is kept with its last part.
    """
    b_part = tl.where(part > 0, b_part, float("-inf") if MODE == "safe" else 0.0)
    b_mass = chunk_mass(b_s, b_part, scale, bound, MODE, BY_FMA)
    b_slot = tl.zeros(b_own.shape, tl.int32) + s
    allowed = (s < b_own) & (s >= b_first) & (part == PARTS - 1)
    return keep_heavier(b_mass, b_slot, allowed, kept[0], kept[1], K), b_mass


@triton.jit
def select_exact_kernel(
    q, k, starts, own, first, longest, lists, counts, full, chunks,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, H, HK, Tq, Tk, offset, blocks, slots, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """The K slots of largest mass for a block of queries, among those listed or all earlier ones; the last blocks take
    longest.

    A launch handles only the blocks whose bound on the scores fits its MODE. With GROUP > 0 the launch with `lists`
    leaves out groups of full ones, and the launch without them takes only these, a block of queries per group.

    DESCRIBED: `k` is a descriptor of `[rows, HK * D]` in blocks `[C / PARTS, D]`, which need no addresses per thread.
    """
    LISTED: tl.constexpr = lists is not None
    BY_FMA: tl.constexpr = DESCRIBED and D <= 64
    i_t = tl.num_programs(0) - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    if GROUP > 0:  # noqa: SIM102 - one of the two is known when the kernel is compiled
        if is_full(full, i_bh, i_t // GROUP if LISTED else i_t, blocks, GROUP) == LISTED:
            return
    i_b, i_h = i_bh // H, i_bh % H
    i_hk = i_h // (H // HK)
    o_t, b_q, b_own, b_first = load_queries(
        q, own, first, i_t, i_b, i_h, stride_qb, stride_qt, stride_qh, Tq, offset, BT, C, D, BD, PACKED
    )
    bound = score_bound(b_q, tl.load(longest + i_b * HK + i_hk), scale)
    if serves(MODE, bound):
        row = (i_b * (stride_kb // stride_kt)).to(tl.int32)
        p_k = k if DESCRIBED else k + i_b.to(tl.int64) * stride_kb + i_hk.to(tl.int64) * stride_kh
        i_list = i_bh.to(tl.int64) * blocks + i_t
        kept = none_kept(BT, K, BK)
        b_part = tl.zeros([BT], tl.float32)
        start = 0 if LISTED else PARTS * tl.min(b_first, 0)
        stop = tl.load(counts + i_list) if LISTED else PARTS * tl.max(b_own, 0)
        key = slot_start(starts, start // PARTS, Tk, C, PACKED)
        for i in range(start, stop):
            s, part = i // PARTS, i % PARTS
            if LISTED:
                s = tl.load(lists + i_list * slots + i).to(tl.int32)
                key = slot_start(starts, s, Tk, C, PACKED)
            if DESCRIBED:
                b_k = tl.trans(k.load([row + key, i_hk * D]))
            else:
                b_k = load_chunk(p_k, key, stride_kt, Tk, C // PARTS, D, BD, PACKED)
            # The next key, looked up ahead of its turn. A list looks up its own.
            key = slot_start(starts, (i + 1) // PARTS, Tk, C, PACKED) + (i + 1) % PARTS * (C // PARTS)
            b_s = tl.dot(b_q, b_k, input_precision=PRECISION)
            kept, b_part = keep_mass(b_s, s, part, b_own, b_first, kept, b_part, scale, bound, MODE, K, PARTS, BY_FMA)
        o_out = ((i_b.to(tl.int64) * Tq + o_t) * H + i_h) * K
        store_chunks(chunks + o_out, kept[0], kept[1], b_first, o_t < Tq, K, BK)
