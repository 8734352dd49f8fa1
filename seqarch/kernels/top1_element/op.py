"""Top-1 element attention: checks and the reference in plain PyTorch."""

import torch
from torch import Tensor

from seqarch.kernels.blocks import causal_mask, expand_heads, over_query_blocks, positions, scores
from seqarch.kernels.op import Backend, Op, wide_heads
from seqarch.kernels.tensors import at_least_float32, autocast_cast, check_attention, default_scale


def top1_element_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The value of the key with the largest score: `o_i = v_j` for `j = argmax_{j <= i} q_i . k_j` (arXiv 2505.18522).

    The gradient is straight-through. For the probabilities `p = softmax(scale * q k^T)` it is taken as if `o = p v`.
    For v it flows only through the selected key. Equal scores go to the lowest index. The op costs as much as full
    attention; its memory is linear in T.

    Args:
        q: `[B, Tq, H, D]`, the last Tq of the Tk positions.
        k: `[B, Tk, HK, D]`, `HK` a divisor of `H`: query head h uses key head `h // (H / HK)`.
        v: as `k`.
        scale: factor on the scores, which matters to the gradient; None is `D ** -0.5`.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row of Tk keys (B = 1).
        backend: "auto", "reference" or "triton", our CUDA kernels (D up to 256).

    Returns:
        `[B, Tq, H, D]` in the dtype of `v`, or of autocast if it is on.

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k, v = autocast_cast(q, k, v)
    check_attention(q, k, v, cu_seqlens)
    return TOP1_ELEMENT_ATTENTION.run(backend, q, k, v, default_scale(scale, q), cu_seqlens)


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


TOP1_ELEMENT_ATTENTION = Op(
    "top1_element_attention",
    top1_element_attention_reference,
    (Backend("triton", "seqarch.kernels.top1_element.triton:attend", "triton", obstacle=wide_heads),),
)
