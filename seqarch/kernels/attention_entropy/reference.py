"""Entropy of attention distributions in plain PyTorch, on any device and in any precision."""

import torch
from torch import Tensor

from seqarch.kernels.blocks import alibi_bias, causal_mask, over_query_blocks, positions, scores
from seqarch.kernels.top1_chunk.reference import top1_chunk_mask


def attention_entropy_reference(
    q: Tensor,
    k: Tensor,
    scale: float,
    window: int | None,
    alibi_slopes: Tensor | None,
    chunk_size: int | None,
    chunks: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """As `attention_entropy`, by blocks of queries."""

    def block(start: int, q: Tensor, k: Tensor, chunks: Tensor | None = None) -> Tensor:
        i, j = positions(start, q, k)
        mask = causal_mask(i, j, window)
        if chunks is not None and chunk_size is not None:
            mask = top1_chunk_mask(i, j, chunks, chunk_size)
        s = scores(q, k, scale)
        if alibi_slopes is not None:
            s = s + alibi_bias(i, j, alibi_slopes)
        p = s.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.special.entr(p).sum(-1).transpose(1, 2)

    with torch.no_grad():
        return over_query_blocks(block, q, (k,), chunks, cu_seqlens)
