"""The short convolution on Triton: the launches, registered as operators so that torch.compile sees them whole."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from seqarch.kernels.launch import ANY_LAYOUT, common_factor, gradient_of, operator, token_rows
from seqarch.kernels.short_convolution.triton_walk import backward_kernel, forward_kernel
from seqarch.kernels.tensors import document_positions

Parts = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values or their gradients; without heads, the whole output three times."""


class Tile(NamedTuple):
    """The work of one program: `rows` segments of `segment` tokens, with `channels` channels each."""

    segment: int
    rows: int
    channels: int
    warps: int


FORWARD = Tile(segment=32, rows=1, channels=128, warps=1)
BACKWARD = Tile(segment=64, rows=1, channels=128, warps=1)
"""The fastest of 92 tiles on an H200, at 32 x 2048 tokens of 1536 to 2304 channels."""


@operator("seqarch::short_convolution_forward", lambda x, *_: x.new_empty(x.shape), tags=ANY_LAYOUT)
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None) -> Tensor:
    """`short_convolution` of `x [B, T, C]`, whose tokens may be slices of longer rows."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_forward(x, weight, bias, silu, cu_seqlens, (y, y, y))
    return y


@gradient_of(forward, gradients=3)
def backward(dy, x, weight, bias, silu, cu_seqlens):
    """Gradients of `x`, `weight` and the bias."""
    dy = dy.contiguous()
    dx, dweight, dbias = _launch_backward(x, weight, bias, silu, cu_seqlens, (dy, dy, dy))
    return dx, dweight, None if bias is None else dbias


def _empty_qkv(x, weight, n_heads, key_dim, cu_seqlens):
    keys = x.new_empty(*x.shape[:2], n_heads, key_dim)
    return keys, torch.empty_like(keys), x.new_empty(*keys.shape[:3], x.shape[2] // n_heads - 2 * key_dim)


@operator("seqarch::qkv_convolution_forward", _empty_qkv, tags=ANY_LAYOUT)
def forward_qkv(
    x: Tensor, weight: Tensor, n_heads: int, key_dim: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_convolution` of `x [B, T, C]`, whose tokens may be slices of longer rows."""
    q, k, v = _empty_qkv(x, weight, n_heads, key_dim, cu_seqlens)
    _launch_forward(x, weight, None, True, cu_seqlens, (q, k, v), key_dim)
    return q, k, v


@gradient_of(forward_qkv, gradients=2, outputs=3)
def backward_qkv(dq, dk, dv, x, weight, n_heads, key_dim, cu_seqlens):
    """Gradients of `x` and `weight`."""
    gradients = dq.contiguous(), dk.contiguous(), dv.contiguous()
    return _launch_backward(x, weight, None, True, cu_seqlens, gradients, key_dim)[:2]


def _launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None, parts: Parts, head: int = 0
) -> None:
    x, tile = token_rows(x), _tile(FORWARD, head)
    forward_kernel[_grid(x, tile, head)](
        x, weight.contiguous(), _contiguous(bias), _positions(x, cu_seqlens), *parts, *_sizes(x, parts),
        weight.shape[1], *tile[:3], head, silu, bias is not None, cu_seqlens is not None, num_warps=tile.warps,
    )  # fmt: skip


def _launch_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, cu_seqlens: Tensor | None, parts: Parts, head: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `x`, of the weight and of the bias, from those of the outputs."""
    x, tile = token_rows(x), _tile(BACKWARD, head)
    grid, width = _grid(x, tile, head), weight.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pieces = torch.empty(grid[1] * grid[2], width + 1, x.shape[2], dtype=torch.float32, device=x.device)
    backward_kernel[grid](
        x, weight.contiguous(), _contiguous(bias), _positions(x, cu_seqlens), *parts, dx, pieces,
        *_sizes(x, parts), width, *tile[:3], head, silu, bias is not None, cu_seqlens is not None,
        num_warps=tile.warps,
    )  # fmt: skip
    sums = pieces.sum(0).to(weight.dtype)
    return dx, sums[:width].T.contiguous(), sums[width].clone()


def _tile(tile: Tile, head: int) -> Tile:
    """The tile; if there are heads, its channels are one head's."""
    if not head:
        return tile
    channels = triton.next_power_of_2(head)
    return Tile(tile.segment, max(1, 128 // channels), channels, max(1, channels // 128))


def _grid(x: Tensor, tile: Tile, head: int) -> tuple[int, int, int]:
    batch, length, channels = x.shape
    return triton.cdiv(channels, head or tile.channels), triton.cdiv(length, tile.segment * tile.rows), batch


def _sizes(x: Tensor, parts: Parts) -> tuple[int, ...]:
    """T, C, the channels of the first part, and the stride of tokens in units of one of its factors."""
    factor = common_factor(x.stride(1))
    return x.shape[1], x.shape[2], parts[0].shape[2:].numel(), x.stride(1) // factor, factor


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _positions(x: Tensor, cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else document_positions(x, cu_seqlens=cu_seqlens).int()
