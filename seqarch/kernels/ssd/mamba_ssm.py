"""The recurrence of Mamba-2 through the authors' Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.kernels.packages import mamba_ssm_function

CHUNK = 256
"""Tokens a chunk, as in the published module."""


@torch.compiler.disable()
def ssd_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, _: None, initial_state: Tensor | None, *__: None
) -> tuple[Tensor, Tensor]:
    """`ssd` on CUDA; the package keeps states as `[P, N]`."""
    y, state = mamba_ssm_function("triton.ssd_combined", "mamba_chunk_scan_combined")(
        x,
        dt,
        dt.new_zeros(x.shape[2]) if A is None else A.to(dt.dtype),
        B,
        C,
        CHUNK,
        initial_states=None if initial_state is None else initial_state.transpose(2, 3).contiguous(),
        return_final_states=True,
    )
    return y, state.transpose(2, 3)
