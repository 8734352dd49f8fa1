"""Dense attention of one query per sequence to cached keys on Triton, split over the keys.

Two launches: each *split* attends to its part of the keys, then the splits of a head are joined. Grids depend on shapes
only and lengths stay on the device, so that a CUDA graph of a step serves sequences of every length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.flops import causal_keys, last_queries
from seqarch.kernels.launch import operator, padded, rows, sizes, strides
from seqarch.kernels.top1_chunk.triton_decode import exact_splits, first_of_best
from seqarch.kernels.top1_chunk.triton_select import LOG2E

TILE, WARPS, STAGES = 4096, 4, 3
"""Elements of a block of keys, warps of a program, and blocks in flight."""


@triton.jit
def decode_split_kernel(
    q, k, v, lengths, slopes, parts, weights,
    stride_qb, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, capacity, scale,
    D: tl.constexpr, BD: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, ALIBI: tl.constexpr, HARD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One query head and one split: the output of its keys, and log2 of their mass or, with HARD, the best score."""
    i_h, i_s, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1)
    last = tl.load(lengths + i_b) - 1
    filled = tl.minimum(last + 1, capacity)
    blocks = tl.cdiv(filled, BT)
    o_d = tl.arange(0, BD)
    o_t = tl.arange(0, BT)
    b_q = tl.load(q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    slope = tl.load(slopes + i_h).to(tl.float32) * LOG2E if ALIBI else 0.0
    p_k = k + i_b * stride_kb + (i_h // G).to(tl.int64) * stride_kh + o_d[None, :]
    p_v = v + i_b * stride_vb + (i_h // G).to(tl.int64) * stride_vh + o_d[None, :]
    b_o = tl.zeros([BD], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for i in tl.range(blocks * i_s // splits, blocks * (i_s + 1) // splits, num_stages=STAGES):
        places = i * BT + o_t
        mask = (places < filled)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + places.to(tl.int64)[:, None] * stride_kt, mask=mask, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + places.to(tl.int64)[:, None] * stride_vt, mask=mask, other=0.0).to(tl.float32)
        b_s = tl.sum(b_k * b_q[None, :], 1) * (scale * LOG2E)
        if ALIBI:
            b_s -= slope * ((last - places + capacity) % capacity).to(tl.float32)
        b_s = tl.where(places < filled, b_s, float("-inf"))
        if HARD:
            best, at = first_of_best(b_s, places)
            b_o = tl.where(best > top, tl.sum(tl.where((places == at)[:, None], b_v, 0.0), 0), b_o)
            top = tl.maximum(top, best)
        else:
            best = tl.maximum(top, tl.max(b_s, 0))
            b_p = tl.exp2(b_s - best)
            shrunk = tl.exp2(top - best)
            b_o = b_o * shrunk + tl.sum(b_p[:, None] * b_v, 0)
            total = total * shrunk + tl.sum(b_p, 0)
            top = best
    o_out = (i_b * tl.num_programs(0) + i_h) * splits + i_s
    if not HARD:
        safe = tl.where(total > 0, total, 1.0)  # a split without keys has no mass
        b_o = b_o / safe
        top += tl.log2(safe)
    tl.store(parts + o_out * D + o_d, b_o, mask=o_d < D)
    tl.store(weights + o_out, top)


@triton.jit
def decode_join_kernel(
    parts, weights, o, splits, D: tl.constexpr, BD: tl.constexpr, BS: tl.constexpr, HARD: tl.constexpr
):
    """One query head: the mean of its splits by their masses, or the output of the first one with the best score."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BD)
    o_s = tl.arange(0, BS)
    row = i_b * tl.num_programs(0) + i_h
    b_w = tl.load(weights + row * splits + o_s, mask=o_s < splits, other=float("-inf"))
    p_o = parts + (row * splits + o_s)[:, None] * D + o_d[None, :]
    b_o = tl.load(p_o, mask=(o_s < splits)[:, None] & (o_d < D)[None, :], other=0.0)
    top, at = first_of_best(b_w, o_s)
    b_p = tl.where(o_s == at, 1.0, 0.0) if HARD else tl.exp2(b_w - top)
    b_o = tl.sum(b_p[:, None] * b_o, 0) / tl.sum(b_p, 0)
    tl.store(o + row * D + o_d, b_o.to(o.dtype.element_ty), mask=o_d < D)


def _empty(q, *_):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _flops(q, k, v, lengths, scale, slopes, hard):
    return (2 if hard else 4) * last_queries(causal_keys, q, k)


@operator("seqarch::attention_decode", _empty, flops=_flops)
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, alibi_slopes: Tensor | None, hard: bool
) -> Tensor:
    B, _, capacity, H, HK, D = sizes(q, k_cache)
    q, k, v, lengths = rows(q), rows(k_cache), rows(v_cache), lengths.contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.contiguous()
    BD = padded(D)
    BT = max(16, TILE // BD)
    splits = exact_splits(B * H, triton.cdiv(capacity, BT))
    parts = torch.empty(B, H, splits, D, dtype=torch.float32, device=q.device)
    weights = torch.empty(B, H, splits, dtype=torch.float32, device=q.device)
    decode_split_kernel[(H, splits, B)](
        q, k, v, lengths, slopes, parts, weights, q.stride(0), q.stride(2), *strides(k), *strides(v), capacity, scale,
        D, BD, H // HK, BT, slopes is not None, hard, STAGES, num_warps=WARPS,
    )  # fmt: skip
    o = torch.empty(B, 1, H, D, dtype=q.dtype, device=q.device)
    decode_join_kernel[(H, B)](parts, weights, o, splits, D, BD, triton.next_power_of_2(splits), hard, num_warps=4)
    return o
