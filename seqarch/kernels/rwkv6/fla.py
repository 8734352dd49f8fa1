"""RWKV-6's recurrence by the CUDA kernels of fla-core."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.kernels.fla_tuning import fla_op


@torch.compiler.disable()
def rwkv6_fla(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `rwkv6`; a single token without gradients takes the kernel for decoding."""
    decoding = r.shape[1] == 1 and not torch.is_grad_enabled()
    kernel = fla_op("fla.ops.rwkv6", "fused_recurrent_rwkv6" if decoding else "chunk_rwkv6")
    return kernel(
        r,
        k,
        v,
        log_decay,
        bonus.float(),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.long(),
    )
