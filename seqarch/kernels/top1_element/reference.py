"""Top-1 element attention in plain PyTorch, on any device and in any precision."""

import torch
from torch import Tensor

from seqarch.kernels.blocks import causal_mask, expand_heads, over_query_blocks, positions, scores
from seqarch.kernels.tensors import at_least_float32


def top1_element_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None = None
) -> Tensor:
    """As `top1_element_attention`, by blocks of queries."""
    return over_query_blocks(_block, q, (k, v), cu_seqlens=cu_seqlens, scale=scale)


def _block(start: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    i, j = positions(start, q, k)
    s = scores(q, k, scale).masked_fill(~causal_mask(i, j), float("-inf"))
    p = s.softmax(-1)
    selected = torch.zeros_like(p).scatter_(-1, s.argmax(-1, keepdim=True), 1.0)
    # The value is the one-hot `selected` (p - p is exactly 0); the gradient with respect to p passes straight through.
    weights = selected + (p - p.detach())
    with torch.autocast(q.device.type, enabled=False):
        o = weights @ at_least_float32(expand_heads(v, q.shape[2])).transpose(1, 2)
    return o.transpose(1, 2).to(v.dtype)
