"""The short causal convolutions in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.packed import document_positions
from seqarch.kernels.tensors import at_least_float32

UNIT_EPS = 1e-6
"""Added to the square of a length, as in fla's kernels."""


def short_convolution_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, cu_seqlens: Tensor | None
) -> Tensor:
    """See `short_convolution`. It sums shifted inputs instead of calling a convolution, because compilers fuse sums."""
    with torch.autocast(x.device.type, enabled=False):
        reach = weight.shape[1] - 1
        position = None if cu_seqlens is None else document_positions(x, cu_seqlens=cu_seqlens)[:, None]
        weight = weight.to(x.dtype)
        y = x * weight[:, reach]
        padded = torch.cat((x.new_zeros(x.shape[0], reach, x.shape[2]), x), dim=1)
        for distance in range(1, reach + 1):
            shifted = padded[:, reach - distance : reach - distance + x.shape[1]]
            if position is not None:
                shifted = shifted.masked_fill(position < distance, 0)
            y = torch.addcmul(y, shifted, weight[:, reach - distance])
        if bias is not None:
            y = y + bias.to(x.dtype)
        return F.silu(y) if activation == "silu" else y


def qkv_convolution_reference(
    x: Tensor, weight: Tensor, n_heads: int, key_dim: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    y = short_convolution_reference(x, weight, None, "silu", cu_seqlens)
    with torch.autocast(x.device.type, enabled=False):
        return unit_heads(y, n_heads, key_dim)


def unit_heads(x: Tensor, n_heads: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys `[B, T, H, K]` of unit length, and values `[B, T, H, V]`, from `x [B, T, 2 H K + H V]`."""
    keys = n_heads * key_dim
    q, k, v = (t.unflatten(-1, (n_heads, -1)) for t in x.split((keys, keys, x.shape[-1] - 2 * keys), dim=-1))
    return unit_length(q), unit_length(k), v.contiguous()


def unit_length(t: Tensor) -> Tensor:
    """Vectors of unit length along the last dimension, in the dtype of `t`."""
    wide = at_least_float32(t)
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + UNIT_EPS)).to(t.dtype)
