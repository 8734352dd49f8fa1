"""Attention to several selected chunks through FlexAttention: it visits every causal block, as dense attention does."""

from collections.abc import Callable

import torch
from torch import Tensor

from seqarch.kernels.softmax_attention import first_position, first_visible, flex_attend, laid_out, partial_block_mask


def flex_top1_chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, scale: float, cu_seqlens: Tensor | None = None
) -> Tensor:
    """As `top1_chunk_attention`, with the selection `chunks [B, Tq, H]` or `[B, Tq, H, K]` given."""
    Tq, Tk = q.shape[1], k.shape[1]
    chunks = chunks if chunks.dim() == 4 else chunks.unsqueeze(-1)
    document = first_visible(Tk, Tk, None, cu_seqlens, q.device)
    mask_mod = chunk_visibility(chunks, chunk_size, document)
    return flex_attend(q, k, v, scale, partial_block_mask(document[Tk - Tq :], Tk, mask_mod))


def chunk_visibility(chunks: Tensor, chunk_size: int, document: Tensor) -> Callable[..., Tensor]:
    """The mask of Top-1 chunk attention, from the first position of each key's document, `document [Tk]`.

    A chunk is named by the position of its first key. This distinguishes chunks of different documents and needs no
    division within the mask.
    """
    Tq = chunks.shape[1]
    offset = first_position(Tq, document.shape[0])
    position = torch.arange(document.shape[0], device=document.device, dtype=torch.int32)
    chunk_of = laid_out(position - (position - document) % chunk_size)
    first_key = document[offset:].view(Tq, 1)
    selected = [laid_out(torch.where(each >= 0, first_key + each * chunk_size, -1)) for each in chunks.unbind(-1)]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        chunk = chunk_of[j]
        visible = chunk == chunk_of[i + offset]
        for each in selected:
            visible = visible | (chunk == each[b, i, h])
        return visible & (j <= i + offset)

    return mask_mod
