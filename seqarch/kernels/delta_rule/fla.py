"""The delta rule by flash-linear-attention's kernels (fla-core 0.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.common import is_tracked
from seqarch.kernels.fla_tuning import fla_op
from seqarch.kernels.recurrent import check_gated_gradients


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
    if q.dtype == torch.float64:
        raise UserError("backend 'fla' takes at most float32, not float64: use backend 'reference'")
    differentiates = is_tracked(q, k, v, beta, log_decay, initial_state)
    recurrent = (q.shape[1] == 1 and not differentiates) or (log_decay is None and q.dtype == torch.float32)
    if not recurrent and k.shape[-1] > 256:
        raise UserError(f"backend 'fla' takes keys of at most 256 dims, not {k.shape[-1]}: use backend 'reference'")
    if log_decay is not None and differentiates:
        check_gated_gradients(q.device)
    if differentiates and not recurrent and (k.shape[-1], v.shape[-1]) == (32, 64):
        # seen on an H200 with fla 0.6.0, in chunk_bwd_kernel_dqkwg; every later call of the process fails too
        raise UserError(
            "the backward pass of backend 'fla' accesses illegal memory with keys of 32 and values of 64 dims: "
            "take other sizes of heads, or backend 'reference'"
        )
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
