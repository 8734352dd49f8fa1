"""Causal softmax attention in plain PyTorch, on any device and in any precision."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.blocks import alibi_bias, causal_mask, over_query_blocks, positions
from seqarch.kernels.packed import per_document


def softmax_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """As `softmax_attention`, by blocks of queries against the keys that the block sees."""
    if cu_seqlens is not None:
        alone = partial(softmax_attention_reference, scale=scale, window=window, slopes=slopes, cu_seqlens=None)
        return per_document(alone, (q, k, v), cu_seqlens)
    single = q.shape[1] == 1
    if window is None and slopes is None and (single or q.shape[1] == k.shape[1]):
        return sdpa(q, k, v, scale, is_causal=not single)  # `not` makes a bool of a symbol
    if window is not None:
        return _banded(q, k, v, scale, window, slopes)
    return over_query_blocks(_block, q, (k, v), scale=scale, slopes=slopes)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """`F.scaled_dot_product_attention` for `[B, T, H, D]`."""
    same = q.shape[2] == k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=not same)
    return o.transpose(1, 2)


def _banded(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, slopes: Tensor | None) -> Tensor:
    """Blocks of about as many queries as the window has keys, so that most computed scores are needed."""
    offset = k.shape[1] - q.shape[1]
    size = max(window, 256)
    pieces = []
    for start in range(0, q.shape[1], size):
        stop = min(start + size, q.shape[1])
        first = max(offset + start - window + 1, 0)
        keys = slice(first, offset + stop)
        tensors = q[:, start:stop], k[:, keys], v[:, keys]
        pieces.append(_block(offset + start - first, *tensors, scale, slopes, window))
    return torch.cat(pieces, dim=1)


def _block(
    start: int, q: Tensor, k: Tensor, v: Tensor, scale: float, slopes: Tensor | None, window: int | None = None
) -> Tensor:
    i, j = positions(start, q, k)
    mask = causal_mask(i, j, window)
    if slopes is not None:
        bias = alibi_bias(i, j, slopes).masked_fill(~mask, float("-inf"))
        mask = bias.to(q.dtype).unsqueeze(0)
    return sdpa(q, k, v, scale, mask)
