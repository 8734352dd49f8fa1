"""The delta rule by flash-linear-attention's kernels (fla-core 0.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.fla_tuning import fla_op
from seqarch.kernels.packages import check_gated_gradients
from seqarch.kernels.tensors import is_tracked


def obstacle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> str | None:
    """Which sizes of heads the chunked kernels do not take."""
    differentiates = is_tracked(q, k, v, beta, log_decay, initial_state)
    if _takes_steps(q, log_decay, differentiates):
        return None
    if k.shape[-1] > 256:
        return f"it takes keys of at most 256 dims, not {k.shape[-1]}"
    if differentiates and (k.shape[-1], v.shape[-1]) == (32, 64):
        # seen on an H200 with fla 0.6.0, in chunk_bwd_kernel_dqkwg; every later call of the process fails too
        return "its backward pass accesses illegal memory with keys of 32 and values of 64 dims: take other heads"
    return None


@torch.compiler.disable()
def delta_rule_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Chunked kernels; the recurrent ones for one token without gradients.

    The chunked kernel without decay takes half precision alone, so float32 without decay runs the recurrent one too,
    which is exact and differentiable but slow for long sequences.
    """
    differentiates = is_tracked(q, k, v, beta, log_decay, initial_state)
    recurrent = _takes_steps(q, log_decay, differentiates)
    if log_decay is not None and differentiates:
        check_gated_gradients(q.device)
    return _kernel(recurrent, log_decay is not None)(
        q=q,
        k=k,
        v=v,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
        **({} if log_decay is None else {"g": log_decay}),
    )


def _kernel(recurrent: bool, gated: bool) -> Any:
    rule = "gated_delta_rule" if gated else "delta_rule"
    return fla_op(f"fla.ops.{rule}", f"{'fused_recurrent' if recurrent else 'chunk'}_{rule}")


def _takes_steps(q: Tensor, log_decay: Tensor | None, differentiates: bool) -> bool:
    """Whether the recurrent kernels run."""
    return (q.shape[1] == 1 and not differentiates) or (log_decay is None and q.dtype == torch.float32)
