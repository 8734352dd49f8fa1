"""The entropy of attention: checks and the reference in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from seqarch.arguments import COUNT
from seqarch.errors import UserError
from seqarch.kernels.blocks import alibi_bias, causal_mask, over_query_blocks, positions, scores
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.tensors import autocast_cast, check_attention, default_scale
from seqarch.kernels.top1_chunk.op import chunk_obstacle, chunks_per_query, per_query, top1_chunk_mask


def attention_entropy(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    chunk_size: int | None = None,
    chunks: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Entropy `-sum_j p_ij ln p_ij` of each query's causal attention distribution (arXiv 2505.18522, figure 4).

    Without `chunks`, `p_i` is the softmax over the keys `j <= i` (the last `window` of them); with `chunks`, over the
    keys of Top-1 chunk attention. No gradient. Memory is linear in T.

    Args:
        q: `[B, Tq, H, D]`, the last Tq of the Tk positions.
        k: `[B, Tk, HK, D]`, `HK` a divisor of `H`.
        scale: factor on the scores; None is `D ** -0.5`.
        window: only the last `window` keys, the query's own position included.
        alibi_slopes: `[H]`, adds `-slope * (i - j)` to the scaled scores.
        chunk_size: keys per chunk, together with `chunks`.
        chunks: `[B, Tq, H]` or `[B, Tq, H, K]` int32, the selection of `select_chunks`.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row of Tk keys (B = 1).
        backend: "auto", "reference" or "triton", our CUDA kernels, which take `chunks` as `top1_chunk_attention` does,
            one per query.

    Returns:
        `[B, Tq, H]` nats, float32 (float64 for float64 arguments).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k = autocast_cast(q.detach(), k.detach())
    check_attention(q, k, None, cu_seqlens, alibi_slopes)
    COUNT.check("window", window)
    scale = default_scale(scale, q)
    if (chunks is None) != (chunk_size is None):
        raise UserError("chunks and chunk_size belong together: give both or neither")
    if chunks is not None:
        if window is not None or alibi_slopes is not None:
            raise UserError("Top-1 chunk attention has neither window nor ALiBi: leave them out with chunks")
        chunks = per_query(chunks, q)
    return ATTENTION_ENTROPY.run(backend, q, k, scale, window, alibi_slopes, chunk_size, chunks, cu_seqlens)


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


def _obstacle(q: Tensor, k: Tensor, scale: float, *options: Any) -> str | None:
    _, _, chunk_size, chunks, _ = options
    return None if chunks is None else chunk_obstacle(q, chunk_size, chunks_per_query(chunks))


ATTENTION_ENTROPY = Op(
    "attention_entropy",
    attention_entropy_reference,
    (Backend("triton", "seqarch.kernels.attention_entropy.triton:entropy", "triton", obstacle=_obstacle),),
)
