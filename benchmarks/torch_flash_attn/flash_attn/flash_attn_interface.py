"""Attention of packed sequences, forward and backward, with queries and keys `[total, H, D]` and int32 borders."""

from typing import Any

import torch
from torch import Tensor

FORWARD = torch.ops.aten._flash_attention_forward
BACKWARD = torch.ops.aten._flash_attention_backward


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """Outputs `[total, H, D]`, log-sum-exps `[H, total]`, and None for the mask and the random state of dropout."""
    borders = cu_seqlens_q.int(), cu_seqlens_k.int()
    out, lse, *_ = FORWARD(q, k, v, *borders, max_seqlen_q, max_seqlen_k, dropout_p, causal, False, scale=softmax_scale)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float, causal: bool, **_: Any,
) -> None:  # fmt: skip
    """Write the gradients into `dq`, `dk` and `dv`."""
    borders = cu_seqlens_q.int(), cu_seqlens_k.int()
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, not read without it
    found = BACKWARD(
        dout, q, k, v, out, softmax_lse, *borders, max_seqlen_q, max_seqlen_k, dropout_p, causal,
        state, state[:0], scale=softmax_scale,
    )  # fmt: skip
    for gradient, written in zip(found, (dq, dk, dv), strict=True):
        written.copy_(gradient)


def flash_attn_varlen_func(*_: Any, **__: Any) -> Tensor:
    """Not needed: MoBA's code calls it only where a sequence has no chunk to select."""
    raise NotImplementedError
