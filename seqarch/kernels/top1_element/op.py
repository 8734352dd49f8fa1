"""The public Top-1 element attention: checks and dispatch."""

from __future__ import annotations

from torch import Tensor

from seqarch.kernels.common import (
    Backend,
    autocast_cast,
    check_choice,
    check_cu_seqlens,
    check_qkv,
    default_scale,
    runs_triton,
)
from seqarch.kernels.top1_element.reference import top1_element_attention_reference

TRITON_HEAD_DIM = 256
"""Largest head dim that the kernels hold at once."""


def top1_element_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The value of the key with the largest score: `o_i = v_j` for `j = argmax_{j <= i} q_i . k_j` (arXiv 2505.18522).

    The gradient is straight-through: that with respect to the probabilities `p = softmax(scale * q k^T)` is taken as
    if `o = p v`, that with respect to v flows through the selected key alone. Equal scores go to the lowest index. It
    costs what full attention costs; memory is linear in T.

    Args:
        q: `[B, Tq, H, D]`, the last Tq of the Tk positions.
        k: `[B, Tk, HK, D]`, `HK` a divisor of `H`: query head h uses key head `h // (H / HK)`.
        v: as `k`.
        scale: factor on the scores, which matters to the gradient; None is `D ** -0.5`.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1, Tq = Tk).
        backend: "reference" is plain PyTorch; "triton" the CUDA kernels (D up to 256, not float64); "auto" takes the
            kernels on CUDA where they fit and the reference elsewhere.

    Returns:
        `[B, Tq, H, D]` in the dtype of `v` (of autocast, where it is on).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k, v = autocast_cast(q, k, v)
    check_choice("backend", backend, ("auto", "reference", "triton"))
    check_qkv(q, k, v)
    check_cu_seqlens(cu_seqlens, q, k)
    scale = default_scale(scale, q)
    if runs_triton(backend, q, lambda: _obstacle(q)):
        from seqarch.kernels.top1_element.triton import forward

        return forward(q, k, v, scale, cu_seqlens)[0]
    return top1_element_attention_reference(q, k, v, scale, cu_seqlens)


def _obstacle(q: Tensor) -> str | None:
    """What keeps the Triton kernels from taking the call."""
    if q.shape[-1] > TRITON_HEAD_DIM:
        return f"heads of {q.shape[-1]} dims are more than it holds, {TRITON_HEAD_DIM}"
    return None
