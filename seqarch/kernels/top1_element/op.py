"""The public Top-1 element attention: checks and dispatch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from seqarch.kernels.common import autocast_cast, check_choice, check_cu_seqlens, check_qkv, default_scale
from seqarch.kernels.top1_element.reference import top1_element_attention_reference


def top1_element_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Literal["auto", "reference"] = "auto",
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
        backend: "reference" is plain PyTorch, and so far the only one.

    Returns:
        `[B, Tq, H, D]` in the dtype of `v` (of autocast, where it is on).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k, v = autocast_cast(q, k, v)
    check_choice("backend", backend, ("auto", "reference"))
    check_qkv(q, k, v)
    check_cu_seqlens(cu_seqlens, q, k)
    return top1_element_attention_reference(q, k, v, default_scale(scale, q), cu_seqlens)
