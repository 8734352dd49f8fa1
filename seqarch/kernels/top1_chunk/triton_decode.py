"""Top-1 chunk decoding on Triton: one query per sequence against cached keys, split over the keys.

Two launches: the selection leaves the K best chunks of each *split* (a slab of consecutive chunks),
`[B, H, splits, K]`; the attention picks the K best of these and attends. Grids depend only on shapes, and lengths stay
on the device, so that a CUDA graph of a step serves sequences of every length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.flops import chunk_keys, last_queries, selected
from seqarch.kernels.launch import operator, padded, precision, rows, sizes, strides
from seqarch.kernels.top1_chunk.triton_select import LOG2E, NO_SLOT, keep_heavier, none_kept

FILL = 528
"""Programs that keep every multiprocessor of a large GPU busy."""
MOST = 8192
"""Beyond this number of programs, more splits gain nothing."""
SLAB = 8
"""Chunks per split if there are enough programs, so that the loads of the next chunks are hidden."""


def exact_splits(pairs: int, chunks: int) -> int:
    """Splits of `chunks` chunks for each of `pairs` pairs of a sequence and a key head."""
    return max(1, min(chunks, max(triton.cdiv(FILL, pairs), min(chunks // SLAB, triton.cdiv(MOST, pairs)))))


@triton.jit
def load_rows(p, o_d, D: tl.constexpr, BD: tl.constexpr):
    """`[C, BD]` rows of D columns, all of which exist."""
    return tl.load(p) if D == BD else tl.load(p, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def own_chunk(lengths, i_b, capacity, C: tl.constexpr):
    """Length of sequence `i_b` and the chunk of its last token; a length beyond the cache counts as the whole cache."""
    length = tl.minimum(tl.load(lengths + i_b), capacity)
    return length, (length - 1) // C


@triton.jit
def log_mass(b_q, b_k, scale, G: tl.constexpr, PRECISION: tl.constexpr):
    """log2 of the attention mass of one chunk: a number for one query head, `[BG]` for a group."""
    if G == 1:
        b_s = tl.sum(b_k.to(tl.float32) * b_q.to(tl.float32)[None, :], 1) * (scale * LOG2E)
        b_m = tl.max(b_s, 0)
        b_mass = b_m + tl.log2(tl.sum(tl.exp2(b_s - b_m), 0))
    else:
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2E)
        b_m = tl.max(b_s, 1)
        b_mass = b_m + tl.log2(tl.sum(tl.exp2(b_s - b_m[:, None]), 1))
    return b_mass


@triton.jit
def decode_exact_kernel(
    q, k, lengths, best, slot, stride_qb, stride_qh, stride_kb, stride_kt, stride_kh, capacity, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, BG: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The K heaviest chunks of one split for the G query heads of one key head. Only complete chunks are read."""
    i_h, i_s, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1)
    _, own = own_chunk(lengths, i_b, capacity, C)
    o_d = tl.arange(0, BD)
    o_g = tl.arange(0, BG)
    o_h = i_h * G + o_g
    if G == 1:
        b_q = tl.load(q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh + o_d, mask=o_d < D, other=0.0)
    else:
        p_q = q + i_b * stride_qb + o_h.to(tl.int64)[:, None] * stride_qh + o_d[None, :]
        b_q = tl.load(p_q, mask=(o_g < G)[:, None] & (o_d < D)[None, :], other=0.0)
    first, stop = own * i_s // splits, own * (i_s + 1) // splits
    p_k = k + i_b * stride_kb + i_h.to(tl.int64) * stride_kh + (first * C).to(tl.int64) * stride_kt
    o_k = tl.arange(0, C).to(tl.int64)[:, None] * stride_kt + o_d[None, :]
    step = tl.full([], C, tl.int64) * stride_kt
    b_kept, b_slots = none_kept(BG, K, BK)
    for c in tl.range(first, stop, num_stages=STAGES):
        b_k = load_rows(p_k + o_k, o_d, D, BD)
        p_k += step
        b_mass = tl.zeros([BG], tl.float32) + log_mass(b_q, b_k, scale, G, PRECISION)
        b_kept, b_slots = keep_heavier(b_mass, tl.zeros([BG], tl.int32) + c, c >= 0, b_kept, b_slots, K)
    o_out = ((i_b * tl.num_programs(0) * G + o_h) * splits + i_s) * K
    mask = o_g < G
    if K > 1:
        o_k = tl.arange(0, BK)
        o_out = o_out[:, None] + o_k[None, :]
        mask = mask[:, None] & (o_k < K)[None, :]
    tl.store(best + o_out, b_kept, mask=mask)
    tl.store(slot + o_out, b_slots, mask=mask)


@triton.jit
def first_of_best(b_score, b_slot):
    """The largest score, and the lowest slot that has it; NO_SLOT where all scores are -inf."""
    top = tl.max(b_score, 0)
    return top, tl.min(tl.where((b_score == top) & (b_score > float("-inf")), b_slot, NO_SLOT), 0)


@triton.jit
def decode_approx_kernel(
    q, means, lengths, best, slot, stride_qb, stride_qh, stride_mb, stride_ms, stride_mh, capacity,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, BN: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The K best of BN chunks by their mean keys for one query head; heads of a group share the means through L2."""
    i_h, i_s, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, own = own_chunk(lengths, i_b, capacity, C)
    o_d = tl.arange(0, BD)
    o_n = i_s * BN + tl.arange(0, BN)
    b_q = tl.load(q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    p_m = means + i_b * stride_mb + (i_h // G).to(tl.int64) * stride_mh
    p_m += o_n.to(tl.int64)[:, None] * stride_ms + o_d[None, :]
    b_m = tl.load(p_m, mask=(o_n < own)[:, None] & (o_d < D)[None, :], other=0.0).to(tl.float32)
    b_score = tl.where(o_n < own, tl.sum(b_m * b_q[None, :], 1), float("-inf"))
    o_out = ((i_b * tl.num_programs(0) + i_h) * tl.num_programs(1) + i_s) * K
    for i in tl.static_range(K):
        top, at = first_of_best(b_score, o_n)
        tl.store(best + o_out + i, top)
        tl.store(slot + o_out + i, at)
        b_score = tl.where(o_n == at, float("-inf"), b_score)


@triton.jit
def decode_attend_kernel(
    q, k, v, o, lengths, best, slot,
    stride_qb, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, capacity, found, scale,
    C: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, BS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One query head: the K best of all `found`, then one softmax over the own chunk so far and the selected ones."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length, own = own_chunk(lengths, i_b, capacity, C)
    o_d = tl.arange(0, BD)
    o_c = tl.arange(0, C)
    b_q = tl.load(q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    p_k = k + i_b * stride_kb + (i_h // G).to(tl.int64) * stride_kh + o_d[None, :]
    p_v = v + i_b * stride_vb + (i_h // G).to(tl.int64) * stride_vh + o_d[None, :]
    # The own chunk comes first, because its loads do not wait for the selection.
    seen = o_c < length - own * C
    local = seen[:, None] & (o_d < D)[None, :]
    o_l = (own * C + o_c).to(tl.int64)[:, None]
    b_kl = tl.load(p_k + o_l * stride_kt, mask=local, other=0.0)
    b_vl = tl.load(p_v + o_l * stride_vt, mask=local, other=0.0)
    o_s = tl.arange(0, BS)
    o_in = (i_b * tl.num_programs(0) + i_h) * found + o_s
    b_best = tl.load(best + o_in, mask=o_s < found, other=float("-inf"))
    b_slot = tl.load(slot + o_in, mask=o_s < found, other=NO_SLOT)
    b_s = tl.where(seen, tl.sum(b_kl.to(tl.float32) * b_q[None, :], 1) * (scale * LOG2E), float("-inf"))
    b_max = tl.max(b_s, 0)
    b_p = tl.exp2(b_s - b_max)
    b_o = b_p[:, None] * b_vl.to(tl.float32)
    for _ in tl.static_range(K):
        _, at = first_of_best(b_best, b_slot)
        b_best = tl.where(b_slot == at, float("-inf"), b_best)
        remote = at < own
        mask = (o_d < tl.where(remote, D, 0))[None, :]
        o_r = (tl.where(remote, at, 0) * C + o_c).to(tl.int64)[:, None]
        b_kr = tl.load(p_k + o_r * stride_kt, mask=mask, other=0.0)
        b_vr = tl.load(p_v + o_r * stride_vt, mask=mask, other=0.0)
        b_s = tl.where(remote, tl.sum(b_kr.to(tl.float32) * b_q[None, :], 1) * (scale * LOG2E), float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 0))
        b_weight = tl.exp2(b_max - b_new)
        b_pr = tl.exp2(b_s - b_new)
        b_o = b_o * b_weight + b_pr[:, None] * b_vr.to(tl.float32)
        b_p = b_p * b_weight + b_pr
        b_max = b_new
    b_o = tl.sum(b_o, 0) / tl.sum(b_p, 0)
    tl.store(o + (i_b * tl.num_programs(0) + i_h) * D + o_d, b_o.to(o.dtype.element_ty), mask=o_d < D)


def _empty(q, *_):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _flops(q, k, v, lengths, chunk_size, scale, means, K):
    attending = 4 * last_queries(chunk_keys, q, k, chunk_size, K)
    return attending + selected(q, k, chunk_size, "exact" if means is None else "approx")


@operator("seqarch::top1_chunk_decode", _empty, flops=_flops)
def decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, chunk_size: int, scale: float, chunk_means: Tensor | None, K: int
) -> Tensor:
    """As `top1_chunk_decode` with K remote chunks: approximate selection where there are `chunk_means`, else exact."""
    B, _, capacity, H, HK, D = sizes(q, k)
    q, k, v, lengths = rows(q), rows(k), rows(v), lengths.contiguous()
    stride_q = (q.stride(0), q.stride(2))
    BD, G = padded(D), H // HK
    chunks = (capacity - 1) // chunk_size
    BN = max(16, 4096 // BD)
    splits = exact_splits(B * HK, chunks) if chunk_means is None else max(1, triton.cdiv(chunks, BN))
    best = torch.empty(B, H, splits, K, dtype=torch.float32, device=q.device)
    slot = torch.empty(B, H, splits, K, dtype=torch.int32, device=q.device)
    warps = max(1, min(16, chunk_size * BD // 2048))  # 64 elements per thread
    if chunk_means is None:
        stages = 3 if chunk_size * BD * k.element_size() <= 2**15 else 2
        decode_exact_kernel[(HK, splits, B)](
            q, k, lengths, best, slot, *stride_q, *strides(k), capacity, scale,
            chunk_size, D, BD, G, 1 if G == 1 else padded(G), precision(q), stages, K, triton.next_power_of_2(K),
            num_warps=warps,
        )  # fmt: skip
    else:
        means = rows(chunk_means)
        decode_approx_kernel[(H, splits, B)](
            q, means, lengths, best, slot, *stride_q, *strides(means), capacity,
            chunk_size, D, BD, G, BN, K, num_warps=4,
        )  # fmt: skip
    o = torch.empty(B, 1, H, D, dtype=q.dtype, device=q.device)
    decode_attend_kernel[(H, B)](
        q, k, v, o, lengths, best, slot, *stride_q, *strides(k), *strides(v), capacity, splits * K, scale,
        chunk_size, D, BD, G, triton.next_power_of_2(splits * K), K, num_warps=warps,
    )  # fmt: skip
    return o
