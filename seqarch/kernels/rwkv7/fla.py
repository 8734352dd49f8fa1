"""RWKV-7's recurrence by the CUDA kernels of fla-core."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.kernels.fla_tuning import fla_op


@torch.compiler.disable()
def rwkv7_fla(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    lower_bound: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `rwkv7`; a single token without gradients takes the kernel for decoding."""
    options = {
        "scale": scale,
        "initial_state": None if initial_state is None else initial_state.float(),
        "output_final_state": True,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    if r.shape[1] == 1 and not torch.is_grad_enabled():
        return fla_op("fla.ops.rwkv7", "fused_recurrent_rwkv7")(r, log_decay, k, v, a, b, **options)
    chunk = fla_op("fla.ops.rwkv7", "chunk_rwkv7")
    return chunk(r, log_decay, k, v, a, b, lower_bound=lower_bound, **options)
