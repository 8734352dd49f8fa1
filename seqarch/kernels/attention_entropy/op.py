"""The public attention entropy: checks and dispatch."""

from typing import Any

from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import inputs
from seqarch.kernels.attention_entropy.reference import attention_entropy_reference
from seqarch.kernels.checks import check_attention
from seqarch.kernels.flops import formulas
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.tensors import autocast_cast
from seqarch.kernels.top1_chunk.layout import chunks_per_query
from seqarch.kernels.top1_chunk.op import check_chunks, chunk_obstacle


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
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1, Tq = Tk).
        backend: "auto", "reference" or "triton", our CUDA kernels, which take `chunks` as `top1_chunk_attention` does,
            one per query.

    Returns:
        `[B, Tq, H]` nats, float32 (float64 for float64 arguments).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k = autocast_cast(q, k)
    scale = check_attention(q, k, None, scale, cu_seqlens, window=window, alibi_slopes=alibi_slopes)
    if (chunks is None) != (chunk_size is None):
        raise UserError("chunks and chunk_size belong together: give both or neither")
    if chunks is not None:
        if window is not None or alibi_slopes is not None:
            raise UserError("Top-1 chunk attention has neither window nor ALiBi: leave them out with chunks")
        chunks = check_chunks(chunks, q)
    return ATTENTION_ENTROPY.run(backend, q, k, scale, window, alibi_slopes, chunk_size, chunks, cu_seqlens)


def _triton(*args: Any) -> Tensor:
    from seqarch.kernels.attention_entropy import triton as kernels

    q, k, scale, window, alibi_slopes, chunk_size, chunks, cu_seqlens = args
    q, k = q.detach(), k.detach()
    if chunks is not None:
        return kernels.top1_chunk_entropy(q, k, chunks, chunk_size, scale, cu_seqlens)
    return kernels.attention_entropy(q, k, scale, window or k.shape[1], alibi_slopes, cu_seqlens)


def _obstacle(q: Tensor, k: Tensor, scale: float, *options: Any) -> str | None:
    _, _, chunk_size, chunks, _ = options
    return None if chunks is None else chunk_obstacle(q, chunk_size, chunks_per_query(chunks))


ATTENTION_ENTROPY = Op(
    "attention_entropy",
    attention_entropy_reference,
    (Backend("triton", _triton, "triton", obstacle=_obstacle),),
    flops=formulas("attention_entropy", "top1_chunk_entropy"),
    inputs=inputs.queries_and_keys,
)
