"""The short convolution on Triton: the launches, registered as operators so that torch.compile sees them whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from seqarch.kernels.launch import ANY_LAYOUT, common_factor, token_rows, triton_operator
from seqarch.kernels.packed import document_positions
from seqarch.kernels.short_convolution.triton_walk import backward_kernel, forward_kernel


class Tile(NamedTuple):
    """What a program takes: `rows` segments of `segment` tokens side by side, of each `channels` channels."""

    segment: int
    rows: int
    channels: int
    warps: int


FORWARD = Tile(segment=32, rows=1, channels=128, warps=1)
BACKWARD = Tile(segment=64, rows=1, channels=128, warps=1)
"""The fastest of 92 on an H200, at 32 x 2048 tokens of 1536 to 2304 channels."""


@triton_operator("seqarch::short_convolution_forward", ANY_LAYOUT)
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None) -> Tensor:
    """`short_convolution` of `x [B, T, C]`, whose tokens may lie further than C apart."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_forward(x, weight, bias, silu, cu_seqlens, (y, y, y))
    return y


@forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@triton_operator("seqarch::short_convolution_backward", ANY_LAYOUT)
def backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, `weight` and the bias (also where there is none)."""
    dy = dy.contiguous()
    return _launch_backward(x, weight, bias, silu, cu_seqlens, (dy, dy, dy))


@backward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1])


@triton_operator("seqarch::qkv_convolution_forward", ANY_LAYOUT)
def forward_qkv(
    x: Tensor, weight: Tensor, n_heads: int, key_dim: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_convolution` of `x [B, T, C]`, whose tokens may lie further than C apart."""
    q, k, v = (torch.empty(shape, dtype=x.dtype, device=x.device) for shape in _qkv_shapes(x, n_heads, key_dim))
    _launch_forward(x, weight, None, True, cu_seqlens, (q, k, v), key_dim)
    return q, k, v


@forward_qkv.register_fake
def _(
    x: Tensor, weight: Tensor, n_heads: int, key_dim: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(shape) for shape in _qkv_shapes(x, n_heads, key_dim))
    return q, k, v


@triton_operator("seqarch::qkv_convolution_backward", ANY_LAYOUT)
def backward_qkv(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and `weight`."""
    gradients = dq.contiguous(), dk.contiguous(), dv.contiguous()
    dx, dweight, _ = _launch_backward(x, weight, None, True, cu_seqlens, gradients, dq.shape[3])
    return dx, dweight


@backward_qkv.register_fake
def _(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _launch_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cu_seqlens: Tensor | None,
    outputs: tuple[Tensor, Tensor, Tensor],
    head: int = 0,
) -> None:
    x, tile = token_rows(x), _tile(FORWARD, head)
    forward_kernel[_grid(x, tile, head)](
        x, weight.contiguous(), _contiguous(bias), _positions(x, cu_seqlens), *outputs, *_sizes(x, outputs),
        weight.shape[1], *tile[:3], head, silu, bias is not None, cu_seqlens is not None, num_warps=tile.warps,
    )  # fmt: skip


def _launch_backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    cu_seqlens: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
    head: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, of the weight and of the bias."""
    x, tile = token_rows(x), _tile(BACKWARD, head)
    grid, width = _grid(x, tile, head), weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty(grid[1] * grid[2], width + 1, x.shape[2], dtype=torch.float32, device=x.device)
    backward_kernel[grid](
        x, weight.contiguous(), _contiguous(bias), _positions(x, cu_seqlens), *gradients, dx, parts,
        *_sizes(x, gradients), width, *tile[:3], head, silu, bias is not None, cu_seqlens is not None,
        num_warps=tile.warps,
    )  # fmt: skip
    sums = parts.sum(0).to(weight.dtype)
    return dx, sums[:width].T.contiguous(), sums[width].clone()


def _tile(tile: Tile, head: int) -> Tile:
    """The tile, or one whose channels are a head's."""
    if not head:
        return tile
    channels = triton.next_power_of_2(head)
    return Tile(tile.segment, max(1, 128 // channels), channels, max(1, channels // 128))


def _grid(x: Tensor, tile: Tile, head: int) -> tuple[int, int, int]:
    batch, length, channels = x.shape
    return triton.cdiv(channels, head or tile.channels), triton.cdiv(length, tile.segment * tile.rows), batch


def _sizes(x: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> tuple[int, ...]:
    """T, C, the channels of the first part, and the stride of tokens in units of a factor that it has."""
    factor = common_factor(x.stride(1))
    return x.shape[1], x.shape[2], parts[0].shape[2:].numel(), x.stride(1) // factor, factor


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _positions(x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else document_positions(x, cu_seqlens=cu_seqlens).int()


def _qkv_shapes(x: Tensor, n_heads: int, key_dim: int) -> tuple[tuple[int, ...], ...]:
    keys = (*x.shape[:2], n_heads, key_dim)
    return keys, keys, (*keys[:3], x.shape[2] // n_heads - 2 * key_dim)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, ctx.silu, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, bias, cu_seqlens)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, cu_seqlens = ctx.saved_tensors
    dx, dweight, dbias = backward(x, weight, bias, ctx.silu, cu_seqlens, dy)
    return dx, dweight, None if bias is None else dbias, None, None


def _save_qkv(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, _, cu_seqlens = inputs
    ctx.save_for_backward(x, weight, cu_seqlens)


def _gradients_qkv(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cu_seqlens = ctx.saved_tensors
    return *backward_qkv(x, weight, cu_seqlens, dq, dk, dv), None, None, None


forward.register_autograd(_gradients, setup_context=_save)
forward_qkv.register_autograd(_gradients_qkv, setup_context=_save_qkv)
