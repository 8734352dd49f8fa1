"""The recurrence of Mamba-2 through flash-linear-attention's simple gated linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.kernels.blocks import expand_heads
from seqarch.kernels.fla_tuning import fla_op
from seqarch.kernels.packages import check_gated_gradients
from seqarch.kernels.tensors import is_tracked


@torch.compiler.disable()
def ssd_fla(
    x: Tensor,
    log_decay: Tensor | None,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`ssd` on CUDA for `x` scaled by its step: queries C, keys B, values x.

    fla's kernel wants as many queries and keys as values. Where one group and one decay serve all heads, these are one
    head with long values; otherwise B and C are repeated for the heads of their group.
    """
    if log_decay is not None and is_tracked(x, log_decay, B, C, initial_state):
        check_gated_gradients(x.device)
    kernel = fla_op("fla.ops.simple_gla", "chunk_simple_gla")
    heads = x.shape[2]
    joined = B.shape[2] == 1 and (log_decay is None or log_decay.shape[2] == 1)
    if joined:
        x = x.flatten(2).unsqueeze(2)
        if initial_state is not None:
            initial_state = initial_state.transpose(1, 2).flatten(2).unsqueeze(1)
    else:
        B, C = expand_heads(B, heads), expand_heads(C, heads)
        if log_decay is not None:
            log_decay = log_decay.expand(-1, -1, heads)
    y, state = kernel(
        C,
        B,
        x,
        None if log_decay is None else log_decay.contiguous(),
        scale=1.0,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
    if joined:
        y = y.squeeze(2).unflatten(2, (heads, -1))
        state = state.squeeze(1).unflatten(2, (heads, -1)).transpose(1, 2)
    return y, state
