"""The selective scan by mamba-ssm's CUDA kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.kernels.packages import mamba_ssm_function


@torch.compiler.disable()
def scan_mamba_ssm(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `selective_scan`; the kernel takes time as the last dimension and step sizes in the dtype of `x`."""
    selective_scan_fn = mamba_ssm_function("selective_scan_interface", "selective_scan_fn")
    x, dt, B, C = (t.to(x.dtype).transpose(1, 2).contiguous() for t in (x, dt, B, C))
    skip = None if D is None else D.float()
    y, state = selective_scan_fn(x, dt, A.float(), B, C, skip, return_last_state=True)
    return y.transpose(1, 2), state.detach()
