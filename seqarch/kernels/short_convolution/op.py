"""The short convolutions: checks and the references."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import UserError, check_known
from seqarch.kernels.op import HEAD_DIM, Backend, Op
from seqarch.kernels.tensors import at_least_float32, autocast_cast, check_sequences, document_positions

TRITON_WIDTHS = (2, 4)
"""Fewest and most tokens that an output of the kernels sees."""
TRITON_ROWS, TRITON_LENGTH = 65_535, 65_535 * 32
"""Most rows of a batch, and tokens of a row, that one launch of the kernels reaches."""


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """`y_t = activation(bias + sum_j weight_j x_{t - W + 1 + j})`, channel by channel, with zeros before the first.

    The depthwise causal convolution of Mamba (arXiv 2312.00752, section 3.4).

    Args:
        x: `[B, T, C]`.
        weight: `[C, W]`, the own token's weight last.
        bias: `[C]`.
        activation: "silu" or None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); nothing crosses a border.
        backend: "auto", "reference" or "triton", our CUDA kernels (W from 2 to 4), which compute in float32.

    Returns:
        `[B, T, C]` in the dtype of `x`, or of autocast if it is on.

    Raises:
        UserError: shapes or options that do not fit together; a backend that cannot run here.
    """
    (x,) = autocast_cast(x)
    check_known("activation", str(activation), ("silu", "None"))
    check_sequences({"x [B, T, C] same": x, "weight [C, W]": weight, "bias [C]": bias}, cu_seqlens)
    return SHORT_CONVOLUTION.run(backend, x, weight, bias, activation == "silu", cu_seqlens)


def qkv_convolution(
    x: Tensor, weight: Tensor, n_heads: int, key_dim: int, *, cu_seqlens: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """The short convolution of queries, keys and values together, with SiLU; queries and keys get unit length.

    As in DeltaNet (arXiv 2406.06484, section 4). On CUDA all of it is one kernel, which reads `x` once and writes the
    three tensors.

    Args:
        x: `[B, T, 2 H K + H V]`: queries of all heads, keys, values.
        weight: `[2 H K + H V, W]`, the own token's weight last.
        n_heads: H.
        key_dim: K.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); nothing crosses a border.
        backend: as for `short_convolution`; the kernels take K up to 256.

    Returns:
        q `[B, T, H, K]`, k `[B, T, H, K]` and v `[B, T, H, V]` in the dtype of `x`, or of autocast if it is on.

    Raises:
        UserError: shapes or options that do not fit together; a backend that cannot run here.
    """
    (x,) = autocast_cast(x)
    check_sequences({"x [B, T, C] same": x, "weight [C, W]": weight}, cu_seqlens)
    values = x.shape[2] - 2 * n_heads * key_dim
    if min(n_heads, key_dim) < 1 or values < n_heads or values % n_heads:
        raise UserError(f"{x.shape[2]} channels are not 2 * {n_heads} * {key_dim} (q, k) and values of {n_heads} heads")
    return QKV_CONVOLUTION.run(backend, x, weight, n_heads, key_dim, cu_seqlens)


UNIT_EPS = 1e-6
"""Added to the square of a length, as in fla's kernels."""


def short_convolution_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None
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
        return F.silu(y) if silu else y


def qkv_convolution_reference(
    x: Tensor, weight: Tensor, n_heads: int, key_dim: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    y = short_convolution_reference(x, weight, None, True, cu_seqlens)
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


def _obstacle(x: Tensor, weight: Tensor, *options: Any) -> str | None:
    fewest, most = TRITON_WIDTHS
    if not fewest <= weight.shape[1] <= most:
        return f"outputs that see {weight.shape[1]} tokens; it takes {fewest} to {most}"
    if x.shape[0] > TRITON_ROWS or x.shape[1] > TRITON_LENGTH:
        return f"{x.shape[0]} rows of {x.shape[1]} tokens; it takes {TRITON_ROWS} rows of {TRITON_LENGTH}"
    return None


def _qkv_obstacle(x: Tensor, weight: Tensor, n_heads: int, key_dim: int, cu_seqlens: Tensor | None) -> str | None:
    if key_dim > HEAD_DIM:
        return f"keys of {key_dim} dims are more than it holds, {HEAD_DIM}"
    return _obstacle(x, weight)


SHORT_CONVOLUTION = Op(
    "short_convolution",
    short_convolution_reference,
    (Backend("triton", "seqarch.kernels.short_convolution.triton:forward", "triton", obstacle=_obstacle),),
    fuses=True,
)
QKV_CONVOLUTION = Op(
    "qkv_convolution",
    qkv_convolution_reference,
    (Backend("triton", "seqarch.kernels.short_convolution.triton:forward_qkv", "triton", obstacle=_qkv_obstacle),),
    fuses=True,
)
