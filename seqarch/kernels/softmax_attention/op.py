"""The public softmax attention: SDPA where it fits, FlexAttention on CUDA for the rest, query blocks elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from seqarch.kernels import inputs
from seqarch.kernels.checks import check_attention
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.softmax_attention.flex import flex_softmax_attention
from seqarch.kernels.softmax_attention.reference import sdpa, softmax_attention_reference
from seqarch.kernels.tensors import autocast_cast, is_tracked

FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal softmax attention, `o_i = sum_j softmax_j(scale * q_i . k_j) v_j` over `j <= i`.

    The queries are the last Tq of the Tk positions: query i has position `Tk - Tq + i`. So one call covers a whole
    sequence (Tq = Tk), a piece that continues from cached keys, and one decoded token (Tq = 1).

    Args:
        q: `[B, Tq, H, D]`.
        k: `[B, Tk, HK, D]`, `HK` a divisor of `H`: query head h uses key head `h // (H / HK)`.
        v: as `k`.
        scale: factor on the scores; None is `D ** -0.5`.
        window: only the last `window` keys, the query's own position included.
        alibi_slopes: `[H]`, adds `-slope * (i - j)` to the scaled scores (ALiBi, arXiv 2108.12409). No gradient.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1, Tq = Tk); attention and distances
            restart at each.
        backend: "auto", "reference", "sdpa" (without window, ALiBi and packed documents; whole sequences, one new
            token and, in half precision without gradients, pieces) or "flex" (FlexAttention).

    Returns:
        `[B, Tq, H, D]` in the dtype of `q`, or of autocast if it is on.

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k, v = autocast_cast(q, k, v)
    scale = check_attention(q, k, v, scale, cu_seqlens, window=window, alibi_slopes=alibi_slopes)
    if q.shape[1] == 1 and window is not None:
        k, v, window = k[:, -window:], v[:, -window:], None
    return SOFTMAX_ATTENTION.run(backend, q, k, v, scale, window, alibi_slopes, cu_seqlens)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, *_: None) -> Tensor:
    if q.shape[1] == 1:
        return sdpa(q, k, v, scale)
    if q.shape[1] < k.shape[1]:
        return sdpa(q, k, v, scale, causal_lower_right(q.shape[1], k.shape[1]))
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return sdpa(q, k, v, scale, is_causal=True)


def _sdpa_obstacle(q: Tensor, k: Tensor, v: Tensor, scale: float, *options: Any) -> str | None:
    if any(option is not None for option in options):
        return "it takes neither window nor ALiBi nor packed documents"
    if q.shape[1] not in (1, k.shape[1]) and not _flash_takes(q, k, v):
        return "several queries after cached keys, which it takes only in half precision, without gradients"
    return None


def _flash_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention computes several queries after cached keys, with the last query next to the last key."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and q.shape[2] == k.shape[2] and q.shape[3] <= 256 and q.is_cuda and not is_tracked(q, k, v)


SOFTMAX_ATTENTION = Op(
    "softmax_attention",
    softmax_attention_reference,
    (Backend("sdpa", _sdpa, obstacle=_sdpa_obstacle, float64=True), Backend("flex", flex_softmax_attention, peer=True)),
    inputs=inputs.attention,
)
