"""Mamba-2's gated RMSNorm in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.tensors import at_least_float32


def gated_rms_norm_reference(
    y: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, eps: float, n_groups: int
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        gated = skip_and_gate(y, x, D, z).unflatten(-1, (n_groups, -1))
        scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
        return ((gated * scale).flatten(-2) * at_least_float32(weight)).to(x.dtype)


def skip_and_gate(y: Tensor, x: Tensor, D: Tensor, z: Tensor) -> Tensor:
    """`(y + D x) silu(z)`, `[B, T, H P]` in float32 or more, of y and x `[B, T, H, P]`."""
    skipped = at_least_float32(y) + at_least_float32(D)[:, None] * x
    return skipped.flatten(2) * F.silu(at_least_float32(z))
