"""The public op for decoding with dense attention: checks, dispatch and the reference."""

import torch
from torch import Tensor

from seqarch.kernels.blocks import expand_heads, scores
from seqarch.kernels.op import Backend, Op, wide_heads
from seqarch.kernels.tensors import at_least_float32, autocast_cast, check_decode, default_scale


def attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    hard: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attention of one new token per sequence to cached keys, whose number only the device knows. No gradient.

    The cache is a ring: token p of a sequence lies at place `p % capacity`. A query sees the last `capacity` tokens or,
    while there are fewer, all `lengths[b]`. So a cache of the final size serves full attention, and one of `window`
    tokens serves attention with a window. Entries beyond a sequence's length are ignored.

    Args:
        q: `[B, 1, H, D]`, the queries of the last tokens.
        k_cache: `[B, capacity, HK, D]`, `HK` a divisor of `H`: query head h uses key head `h // (H / HK)`.
        v_cache: as `k_cache`.
        lengths: `[B]` int32, tokens of each sequence, the last one included, at least 1.
        scale: factor on the scores; None is `D ** -0.5`.
        alibi_slopes: `[H]`, adds `-slope * distance` to the scaled scores (ALiBi, arXiv 2108.12409).
        hard: whether the output is the value of the key with the largest score, as in `top1_element_attention`.
        backend: "auto", "reference" or "triton", our CUDA kernels (D up to 256).

    Returns:
        `[B, 1, H, D]` in the dtype of `q`, or of autocast if it is on.

    Raises:
        UserError: shapes, dtypes or options that do not fit together, or tensors that ask for gradients.
    """
    q, k_cache, v_cache = autocast_cast(q, k_cache, v_cache)
    check_decode(q, k_cache, v_cache, lengths, alibi_slopes)
    scale = default_scale(scale, q)
    return ATTENTION_DECODE.run(backend, q, k_cache, v_cache, lengths, scale, alibi_slopes, hard)


def _reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, alibi_slopes: Tensor | None, hard: bool
) -> Tensor:
    """As `attention_decode`, by a mask over the whole cache."""
    capacity, last = k_cache.shape[1], lengths.long().unsqueeze(1) - 1
    places = torch.arange(capacity, device=q.device)
    seen = places <= last
    s = scores(q, k_cache, scale)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype).view(-1, 1, 1) * ((last - places) % capacity)[:, None, None]
    s = s.masked_fill(~seen[:, None, None], -torch.inf)
    p = torch.zeros_like(s).scatter_(-1, s.argmax(-1, keepdim=True), 1.0) if hard else s.softmax(-1)
    v = expand_heads(at_least_float32(v_cache).masked_fill(~seen[:, :, None, None], 0), q.shape[2])
    with torch.autocast(q.device.type, enabled=False):
        return (p @ v.transpose(1, 2)).transpose(1, 2).to(q.dtype)


ATTENTION_DECODE = Op(
    "attention_decode",
    _reference,
    (Backend("triton", "seqarch.kernels.attention_decode.triton:decode", "triton", obstacle=wide_heads),),
)
