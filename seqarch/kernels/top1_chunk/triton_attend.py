"""Triton kernels for the attention to the own and the selected chunk: algorithms 1 and 2 of arXiv 2505.18522.

Remote work runs over tiles of the queries sorted by their selected chunk, local work over the chunks themselves. The
i-th chunk that a query selected is one entry `e` of `[K, B, H, Tq]`; `order` lists these entries sorted. The first
entries write to the result itself. The other entries write to `extra`, `[K - 1, B, Tq, H, D]`, which is then added to
the result. Log-sum-exps are in base 2.

A launch has `H` query heads and `HK` key heads. They may be a group of all: rows of the results have `HO` and `HKO`.
"""

import triton
import triton.language as tl

from seqarch.kernels.top1_chunk.triton_select import LOG2E, slot_start


@triton.jit
def sorted_rows(order, begin, stop, BH, H, Tq, BM: tl.constexpr, K: tl.constexpr):
    """`BM` entries of the sorted list from `begin`: entry, i, batch, head, position among the queries, validity."""
    o_r = begin + tl.arange(0, BM)
    valid = o_r < stop
    e = tl.load(order + o_r, mask=valid, other=0)
    i_bh = e // Tq
    i_k = 0
    if K > 1:
        i_k = i_bh // BH
        i_bh = i_bh % BH
    return e, i_k, i_bh // H, i_bh % H, e % Tq, valid


@triton.jit
def gather_rows(p, i_b, o_t, i_h, stride_b, stride_t, stride_h, valid, D: tl.constexpr, BD: tl.constexpr):
    """`[rows, BD]` rows at `o_t`, of one batch and head or of one each; zeros where they are not `valid`."""
    o_r = i_b.to(tl.int64) * stride_b + o_t.to(tl.int64) * stride_t + i_h.to(tl.int64) * stride_h
    o_d = tl.arange(0, BD)
    return tl.load(p + o_r[:, None] + o_d[None, :], mask=valid[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_keys(p, base, key, count, stride_t, C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """`[C, BD]` rows from `key`, of which `count` exist."""
    o_c = tl.arange(0, C)
    o_d = tl.arange(0, BD)
    mask = (o_c < count)[:, None] & (o_d < D)[None, :]
    return tl.load(p + base + (key + o_c).to(tl.int64)[:, None] * stride_t + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def result_rows(o, extra, i_k, i_b, o_t, i_h, BH, H, HO, Tq, D: tl.constexpr, K: tl.constexpr):
    """Pointers to the rows of `o`, or of `extra` for entries after the first."""
    o_bt = i_b.to(tl.int64) * Tq + o_t
    p = o + (o_bt * HO + i_h) * D
    if K > 1:
        o_k = (i_k - 1).to(tl.int64) * BH * Tq * D
        p = tl.where(i_k > 0, extra + o_k + (o_bt * H + i_h) * D, p)
        if D % 8 == 0:  # which the compiler no longer sees; it allows wide stores
            p = tl.multiple_of(p, 16)
    return p


@triton.jit
def remote_forward_kernel(
    q, k, v, o, extra, parts, order, offsets, starts, tile_segment, tile_first,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    BH, H, HK, HO, Tq, Tk, slots, segments, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Attention of one tile of sorted queries to a remote chunk: normalised output, and log-sum-exp to `parts`."""
    i = tl.program_id(0)
    segment = tl.load(tile_segment + i)
    if segment < segments:
        begin = tl.load(offsets + segment) + (i - tl.load(tile_first + segment)) * BM
        stop = tl.load(offsets + segment + 1)
        e, i_k, i_b, i_h, o_t, valid = sorted_rows(order, begin, stop, BH, H, Tq, BM, K)
        o_d = tl.arange(0, BD)
        mask = valid[:, None] & (o_d < D)[None, :]
        b_q = gather_rows(q, i_b, o_t, i_h, stride_qb, stride_qt, stride_qh, valid, D, BD)
        i_row = segment // slots
        k_b, k_h = (i_row // HK).to(tl.int64), (i_row % HK).to(tl.int64)
        key = slot_start(starts, segment % slots, Tk, C, PACKED)
        b_k = load_keys(k, k_b * stride_kb + k_h * stride_kh, key, C, stride_kt, C, D, BD)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2E)
        b_m = tl.max(b_s, 1)
        b_p = tl.exp2(b_s - b_m[:, None])
        b_l = tl.sum(b_p, 1)
        b_v = load_keys(v, k_b * stride_vb + k_h * stride_vh, key, C, stride_vt, C, D, BD)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION) / b_l[:, None]
        p_o = result_rows(o, extra, i_k, i_b, o_t, i_h, BH, H, HO, Tq, D, K)
        tl.store(p_o[:, None] + o_d[None, :], b_o.to(o.dtype.element_ty), mask=mask)
        tl.store(parts + e, b_m + tl.log2(b_l), mask=valid)


@triton.jit
def local_block(starts, slot0, Tk, offset, BT: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr):
    """This program's block of queries: borders of its slot, positions, query indices and validity."""
    i_s, i_sub = slot0 + tl.program_id(0) // (C // BT), tl.program_id(0) % (C // BT)
    start = slot_start(starts, i_s, Tk, C, PACKED)
    stop = slot_start(starts, i_s + 1, Tk, C, PACKED)
    o_p = start + i_sub * BT + tl.arange(0, BT)
    o_t = o_p - offset
    return start, stop, o_p, o_t, (o_p < stop) & (o_t >= 0)


@triton.jit
def local_forward_kernel(
    q, k, v, o, extra, lse, parts, starts,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    H, HK, HO, Tq, Tk, offset, slot0, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Causal attention inside the chunk, merged with the remote chunks' results (algorithm 1, second part).

    A query has one such result for each log-sum-exp above -inf in `parts`, `[K, B, H, Tq]`.
    """
    i_b, i_h = tl.program_id(1) // H, (tl.program_id(1) % H).to(tl.int64)
    start, stop, o_p, o_t, valid = local_block(starts, slot0, Tk, offset, BT, C, PACKED)
    o_d = tl.arange(0, BD)
    mask = valid[:, None] & (o_d < D)[None, :]
    b_q = gather_rows(q, i_b, o_t, i_h, stride_qb, stride_qt, stride_qh, valid, D, BD)
    k_b, k_h = i_b.to(tl.int64), i_h // (H // HK)
    b_k = load_keys(k, k_b * stride_kb + k_h * stride_kh, start, stop - start, stride_kt, C, D, BD)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2E)
    o_j = start + tl.arange(0, C)
    b_s = tl.where(o_j[None, :] <= o_p[:, None], b_s, float("-inf"))
    o_e = tl.program_id(1).to(tl.int64) * Tq + o_t
    entries = tl.num_programs(1).to(tl.int64) * Tq
    b_m = tl.max(b_s, 1)
    for i in tl.static_range(K):
        b_m = tl.maximum(b_m, tl.load(parts + i * entries + o_e, mask=valid, other=float("-inf")))
    b_p = tl.exp2(b_s - b_m[:, None])
    b_l = tl.sum(b_p, 1)
    b_v = load_keys(v, k_b * stride_vb + k_h * stride_vh, start, stop - start, stride_vt, C, D, BD)
    o_o = (((k_b * Tq + o_t) * HO + i_h) * D)[:, None] + o_d[None, :]
    b_o = tl.zeros([BT, BD], tl.float32)
    for i in tl.static_range(K):
        b_r = tl.load(parts + i * entries + o_e, mask=valid, other=float("-inf"))
        b_w = tl.exp2(b_r - b_m)
        b_l += b_w
        p_o = o + o_o
        if i > 0:
            o_k = (((k_b * Tq + o_t) * H + i_h) * D)[:, None] + o_d[None, :]
            p_o = extra + (i - 1) * entries * D + o_k
        b_o += tl.load(p_o, mask=mask & (b_r > float("-inf"))[:, None], other=0.0).to(tl.float32) * b_w[:, None]
    b_o = (b_o + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)) / b_l[:, None]
    tl.store(o + o_o, b_o.to(o.dtype.element_ty), mask=mask)
    tl.store(lse + o_e, b_m + tl.log2(b_l), mask=valid)


@triton.jit
def local_backward_kernel(
    q, k, v, o, do, lse, delta, dq, starts,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh, stride_gb, stride_gt, stride_gh,
    H, HK, HO, Tq, Tk, offset, slot0, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`delta = rowsum(do * o)`, and the local part of dq."""
    i_b, i_h = tl.program_id(1) // H, (tl.program_id(1) % H).to(tl.int64)
    start, stop, o_p, o_t, valid = local_block(starts, slot0, Tk, offset, BT, C, PACKED)
    o_d = tl.arange(0, BD)
    mask = valid[:, None] & (o_d < D)[None, :]
    k_b, k_h = i_b.to(tl.int64), i_h // (H // HK)
    b_q = gather_rows(q, i_b, o_t, i_h, stride_qb, stride_qt, stride_qh, valid, D, BD)
    b_o = gather_rows(o, i_b, o_t, i_h, stride_ob, stride_ot, stride_oh, valid, D, BD)
    b_do = gather_rows(do, i_b, o_t, i_h, stride_gb, stride_gt, stride_gh, valid, D, BD)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    o_e = tl.program_id(1).to(tl.int64) * Tq + o_t
    tl.store(delta + o_e, b_delta, mask=valid)
    b_r = tl.load(lse + o_e, mask=valid, other=float("inf"))
    b_k = load_keys(k, k_b * stride_kb + k_h * stride_kh, start, stop - start, stride_kt, C, D, BD)
    b_v = load_keys(v, k_b * stride_vb + k_h * stride_vh, start, stop - start, stride_vt, C, D, BD)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2E)
    o_j = start + tl.arange(0, C)
    b_p = tl.where(o_j[None, :] <= o_p[:, None], tl.exp2(b_s - b_r[:, None]), 0.0)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = (b_p * (b_dp - b_delta[:, None])).to(b_k.dtype)
    b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION) * scale
    o_o = ((k_b * Tq + o_t) * HO + i_h) * D
    tl.store(dq + o_o[:, None] + o_d[None, :], b_dq.to(dq.dtype.element_ty), mask=mask)


@triton.jit
def key_gradients(b_q, b_do, b_r, b_delta, b_k, b_v, b_dk, b_dv, visible, scale, PRECISION: tl.constexpr):
    """Adds one block of queries to dk and dv (dk without the scale), and returns `[C, BM]` dS for its dq."""
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * (scale * LOG2E)
    b_p = tl.where(visible, tl.exp2(b_s - b_r[None, :]), 0.0)
    b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_ds = (b_p * (b_dp - b_delta[None, :])).to(b_q.dtype)
    b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv, b_ds


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def chunk_backward_kernel(
    q, k, v, do, lse, delta, dq, extra, dk, dv, partial, order, offsets, starts, unit_segment, unit_first,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_gb, stride_gt, stride_gh,
    BH, H, HK, HO, HKO, Tq, Tk, offset, slots, segments, most, i_part, scale,
    C: tl.constexpr, BC: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dk and dv of `BC` keys of a chunk from its remote queries, whose dq it completes, and from its local queries.

    A chunk with many remote queries is split into units of equal size. These are the first `most` programs, because
    they take longest. Each writes a float32 partial sum. The first unit of a chunk adds the local queries.
    """
    i = tl.program_id(0)
    segment = tl.where(i < most, tl.load(unit_segment + i, mask=i < most, other=0), i - most)
    unit0 = tl.load(unit_first + segment)
    units = tl.load(unit_first + segment + 1, mask=segment < segments, other=0) - unit0
    if (units > 0) == (i < most):
        i_unit = tl.where(i < most, i - unit0, 0)
        i_row, i_s = segment // slots, segment % slots
        k_b, k_h = (i_row // HK).to(tl.int64), (i_row % HK).to(tl.int64)
        start = slot_start(starts, i_s, Tk, C, PACKED)
        stop = slot_start(starts, i_s + 1, Tk, C, PACKED)
        key = start + i_part * BC
        b_k = load_keys(k, k_b * stride_kb + k_h * stride_kh, key, stop - key, stride_kt, BC, D, BD)
        b_v = load_keys(v, k_b * stride_vb + k_h * stride_vh, key, stop - key, stride_vt, BC, D, BD)
        b_dk = tl.zeros([BC, BD], tl.float32)
        b_dv = tl.zeros([BC, BD], tl.float32)
        o_d = tl.arange(0, BD)
        o_j = key + tl.arange(0, BC)
        first = tl.load(offsets + segment)
        count = (tl.load(offsets + segment + 1) - first).to(tl.int64)
        begin = first + (count * i_unit // tl.maximum(units, 1)).to(tl.int32)
        end = first + (count * (i_unit + 1) // tl.maximum(units, 1)).to(tl.int32)
        for row in range(begin, end, BM):
            e, i_k, i_b, i_h, o_t, valid = sorted_rows(order, row, end, BH, H, Tq, BM, K)
            mask = valid[:, None] & (o_d < D)[None, :]
            if K > 1:
                e -= i_k * (BH * Tq)
            b_q = gather_rows(q, i_b, o_t, i_h, stride_qb, stride_qt, stride_qh, valid, D, BD)
            b_do = gather_rows(do, i_b, o_t, i_h, stride_gb, stride_gt, stride_gh, valid, D, BD)
            b_r = tl.load(lse + e, mask=valid, other=float("inf"))
            b_delta = tl.load(delta + e, mask=valid, other=0.0)
            visible = valid[None, :]
            b_dk, b_dv, b_ds = key_gradients(b_q, b_do, b_r, b_delta, b_k, b_v, b_dk, b_dv, visible, scale, PRECISION)
            b_dq = tl.dot(tl.trans(b_ds), b_k, input_precision=PRECISION) * scale
            p_dq = result_rows(dq, extra, i_k, i_b, o_t, i_h, BH, H, HO, Tq, D, K)[:, None] + o_d[None, :]
            b_dq += tl.load(p_dq, mask=mask, other=0.0).to(tl.float32)
            tl.store(p_dq, b_dq.to(dq.dtype.element_ty), mask=mask)
        # Local queries: the chunk's own queries from this block of keys on, for each query head of the key head.
        group = H // HK
        local_start = tl.where(i_unit > 0, stop, tl.maximum(key, offset))
        blocks = (tl.maximum(stop - local_start, 0) + BM - 1) // BM
        for step in range(0, blocks * group):
            i_h = k_h * group + step // blocks
            o_p = local_start + (step % blocks) * BM + tl.arange(0, BM)
            valid = o_p < stop
            o_t = (o_p - offset).to(tl.int64)
            b_q = gather_rows(q, k_b, o_t, i_h, stride_qb, stride_qt, stride_qh, valid, D, BD)
            b_do = gather_rows(do, k_b, o_t, i_h, stride_gb, stride_gt, stride_gh, valid, D, BD)
            o_e = (k_b * H + i_h) * Tq + o_t
            b_r = tl.load(lse + o_e, mask=valid, other=float("inf"))
            b_delta = tl.load(delta + o_e, mask=valid, other=0.0)
            visible = valid[None, :] & (o_j[:, None] <= o_p[None, :])
            b_dk, b_dv, _ = key_gradients(b_q, b_do, b_r, b_delta, b_k, b_v, b_dk, b_dv, visible, scale, PRECISION)
        b_dk *= scale
        if i >= most:
            o_out = ((k_b * Tk + o_j) * HKO + k_h)[:, None] * D + o_d[None, :]
            mask = (o_j < stop)[:, None] & (o_d < D)[None, :]
            tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=mask)
            tl.store(dv + o_out, b_dv.to(dv.dtype.element_ty), mask=mask)
        else:
            p_sum = partial + i.to(tl.int64) * (2 * BC * BD)
            p_sum += tl.arange(0, BC)[:, None] * BD + o_d[None, :]
            tl.store(p_sum, b_dk)
            tl.store(p_sum + BC * BD, b_dv)


@triton.jit
def add_extra_kernel(x, extra, size, width, stride, K: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the K - 1 rows of `extra`, `[K - 1, size]`, to `x`, whose pieces of `width` elements lie `stride` apart."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_x = o // width * stride + o % width
    b_x = tl.load(x + o_x, mask=o < size, other=0.0).to(tl.float32)
    for i in tl.static_range(K - 1):
        b_x += tl.load(extra + i * size.to(tl.int64) + o, mask=o < size, other=0.0).to(tl.float32)
    tl.store(x + o_x, b_x.to(x.dtype.element_ty), mask=o < size)


@triton.jit
def sum_partials_kernel(
    partial, dk, dv, starts, unit_segment, unit_first, HK, HKO, Tk, slots, segments, i_part,
    C: tl.constexpr, BC: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Adds up `ROWS` keys' partial dk and dv of the chunk whose first unit this is, in the order of the units."""
    i = tl.program_id(0)
    segment = tl.load(unit_segment + i)
    if (segment < segments) & (tl.load(unit_first + segment) == i):
        i_row, i_s = segment // slots, segment % slots
        o_d = tl.arange(0, BD)
        o_c = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        p = partial + i.to(tl.int64) * (2 * BC * BD) + o_c[:, None] * BD + o_d[None, :]
        b_dk = tl.zeros([ROWS, BD], tl.float32)
        b_dv = tl.zeros([ROWS, BD], tl.float32)
        for _ in range(i, tl.load(unit_first + segment + 1)):
            b_dk += tl.load(p)
            b_dv += tl.load(p + BC * BD)
            p += 2 * BC * BD
        o_j = slot_start(starts, i_s, Tk, C, PACKED) + i_part * BC + o_c
        mask = (o_j < slot_start(starts, i_s + 1, Tk, C, PACKED))[:, None] & (o_d < D)[None, :]
        o_out = (((i_row // HK).to(tl.int64) * Tk + o_j) * HKO + i_row % HK)[:, None] * D + o_d[None, :]
        tl.store(dk + o_out, b_dk.to(dk.dtype.element_ty), mask=mask)
        tl.store(dv + o_out, b_dv.to(dv.dtype.element_ty), mask=mask)
