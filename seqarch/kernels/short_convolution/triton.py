"""The short convolution on Triton: the kernels, and their launches as operators.

A tile is `[ROWS, CHANNELS]`: each of its rows walks a segment of the sequence. It keeps in registers the inputs that it
still needs and, backward, the gradients that are not complete yet. So a token is read once, whatever W. A step loads
four tokens before it uses the first: with one token per step, most of the time would be spent waiting for memory.

With HEAD, the C channels are queries, keys and values, which go to separate tensors. A tile's channels are then the
HEAD channels of one head, so a row holds everything for the norm of its query or key.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.launch import ANY_LAYOUT, common_factor, gradient_of, operator, token_rows
from seqarch.kernels.short_convolution.op import UNIT_EPS
from seqarch.kernels.triton_documents import positions_in_documents

EPS = tl.constexpr(UNIT_EPS)


@triton.jit
def _place(C, SEGMENT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, HEAD: tl.constexpr):
    """Channels `[CHANNELS]` and which of them exist, first tokens of the segments `[ROWS]`, row of the batch."""
    lane = tl.arange(0, CHANNELS)
    width = HEAD if HEAD else CHANNELS
    c = tl.program_id(0) * width + lane
    start = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)) * SEGMENT
    return c, (lane < width) & (c < C), start, tl.program_id(2).to(tl.int64)


@triton.jit
def _part(first, second, third, C, N, T, batch, HEAD: tl.constexpr):
    """The tensor of the tile's channels (N of queries, N of keys, values), moved to count from there, and its width."""
    p, begin, width = first, 0, C
    if HEAD:
        c = tl.program_id(0) * HEAD
        width = N
        if c >= N:
            p, begin = second, N
        if c >= 2 * N:
            p, begin, width = third, 2 * N, C - 2 * N
    return p + batch * T * width - begin, width


@triton.jit
def _token(p, t, T, c, there, stride):
    """Tokens t `[ROWS]`, zeros where there are none."""
    here = ((t >= 0) & (t < T))[:, None] & there[None, :]
    return tl.load(p + t.to(tl.int64)[:, None] * stride + c[None, :], mask=here, other=0.0)


@triton.jit
def _four_tokens(p, t, T, c, there, stride):
    found = ()
    for n in tl.static_range(4):
        found += (_token(p, t + n, T, c, there, stride),)
    return found


@triton.jit
def _store_token(p, value, t, keep, c, there, stride):
    """Store to tokens t `[ROWS]` where they are to be kept."""
    here = keep[:, None] & there[None, :]
    tl.store(p + t.to(tl.int64)[:, None] * stride + c[None, :], value.to(p.dtype.element_ty), mask=here)


@triton.jit
def _weight(weight, distance: tl.constexpr, c, there, W: tl.constexpr):
    """Weights `[1, CHANNELS]` of the tokens at a distance, zeros from W on."""
    w = tl.zeros_like(c).to(tl.float32)
    if distance < W:
        w += tl.load(weight + c * W + (W - 1 - distance), mask=there, other=0.0).to(tl.float32)
    return w[None, :]


@triton.jit
def _weights(weight, bias, c, there, W: tl.constexpr, BIASED: tl.constexpr):
    """Weights at distances 0 to 3, and the bias."""
    b = tl.zeros_like(c).to(tl.float32)
    if BIASED:
        b += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    w0, w1 = _weight(weight, 0, c, there, W), _weight(weight, 1, c, there, W)
    return w0, w1, _weight(weight, 2, c, there, W), _weight(weight, 3, c, there, W), b[None, :]


@triton.jit
def _before(x, start, T, c, there, stride, W: tl.constexpr):
    """The three tokens before the segments, zeros for those that W does not reach."""
    x1 = _token(x, start - 1, T, c, there, stride).to(tl.float32)
    x2, x3 = tl.zeros_like(x1), tl.zeros_like(x1)
    if W > 2:
        x2 = _token(x, start - 2, T, c, there, stride).to(tl.float32)
    if W > 3:
        x3 = _token(x, start - 3, T, c, there, stride).to(tl.float32)
    return x1, x2, x3


@triton.jit
def _own(value, p, distance: tl.constexpr, PACKED: tl.constexpr):
    """Inputs at a distance, zeros if they belong to another document; p `[ROWS]` are positions in the documents."""
    return tl.where((p >= distance)[:, None], value, 0.0) if PACKED else value


@triton.jit
def forward_kernel(
    x, weight, bias, position, first, second, third, T, C, N, stride, FACTOR: tl.constexpr,
    W: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, HEAD: tl.constexpr,
    SILU: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    c, there, start, batch = _place(C, SEGMENT, ROWS, CHANNELS, HEAD)
    stride *= FACTOR
    x += batch * T * stride
    y, width = _part(first, second, third, C, N, T, batch, HEAD)
    w0, w1, w2, w3, b = _weights(weight, bias, c, there, W, BIASED)
    x1, x2, x3 = _before(x, start, T, c, there, stride, W)
    for i in range(0, SEGMENT, 4):
        xs = _four_tokens(x, start + i, T, c, there, stride)
        for n in tl.static_range(4):
            t = start + i + n
            x0 = xs[n].to(tl.float32)
            p = tl.load(position + t, mask=t < T, other=0) if PACKED else t
            s = w0 * x0 + w1 * _own(x1, p, 1, PACKED) + w2 * _own(x2, p, 2, PACKED) + w3 * _own(x3, p, 3, PACKED) + b
            if SILU:
                s *= tl.sigmoid(s)
            if HEAD:
                scale = tl.rsqrt(tl.sum(s * s, 1) + EPS)[:, None]
                s *= tl.where(tl.program_id(0) * HEAD < 2 * N, scale, 1.0)
            _store_token(y, s, t, t < T, c, there, width)
            if W > 3:
                x3 = x2
            if W > 2:
                x2 = x1
            x1 = x0


@triton.jit
def backward_kernel(
    x, weight, bias, position, first, second, third, dx, parts, T, C, N, stride, FACTOR: tl.constexpr,
    W: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, HEAD: tl.constexpr,
    SILU: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    c, there, start, batch = _place(C, SEGMENT, ROWS, CHANNELS, HEAD)
    stride *= FACTOR
    x += batch * T * stride
    dx += batch * T * C
    dy, width = _part(first, second, third, C, N, T, batch, HEAD)
    w0, w1, w2, w3, b = _weights(weight, bias, c, there, W, BIASED)
    x1, x2, x3 = _before(x, start, T, c, there, stride, W)
    zero = tl.zeros((ROWS, CHANNELS), tl.float32)
    # partial gradients of the inputs one, two and three tokens back
    g1, g2, g3 = zero, zero, zero
    dw0, dw1, dw2, dw3, db = zero, zero, zero, zero, zero
    # a segment's inputs reach W - 1 tokens beyond it
    for i in range(0, SEGMENT + W - 1, 4):
        xs = _four_tokens(x, start + i, T, c, there, stride)
        ds = _four_tokens(dy, start + i, T, c, there, width)
        for n in tl.static_range(4):
            t = start + i + n
            x0, d0 = xs[n].to(tl.float32), ds[n].to(tl.float32)
            p = tl.load(position + t, mask=t < T, other=0) if PACKED else t
            y1, y2, y3 = _own(x1, p, 1, PACKED), _own(x2, p, 2, PACKED), _own(x3, p, 3, PACKED)
            s = w0 * x0 + w1 * y1 + w2 * y2 + w3 * y3 + b
            gate = tl.sigmoid(s) if SILU else 1.0
            if HEAD:
                z = s * gate
                square = 1 / (tl.sum(z * z, 1) + EPS)
                along = z * (tl.sum(z * d0, 1) * square)[:, None]
                d0 = tl.where(tl.program_id(0) * HEAD < 2 * N, tl.sqrt(square)[:, None] * (d0 - along), d0)
            if SILU:
                d0 *= gate * (1 + s * (1 - gate))
            inside = tl.where(i + n < SEGMENT, d0, 0.0)
            db += inside
            dw0 += inside * x0
            dw1 += inside * y1
            dw2 += inside * y2
            dw3 += inside * y3
            g1 += w1 * _own(d0, p, 1, PACKED)
            g2 += w2 * _own(d0, p, 2, PACKED)
            g3 += w3 * _own(d0, p, 3, PACKED)
            u = t - (W - 1)
            complete = g1 if W == 2 else (g2 if W == 3 else g3)
            _store_token(dx, complete, u, (u >= start) & (u < start + SEGMENT) & (u < T), c, there, C)
            g3 = g2
            g2 = g1
            g1 = w0 * d0
            if W > 3:
                x3 = x2
            if W > 2:
                x2 = x1
            x1 = x0
    part = parts + (batch * tl.num_programs(1) + tl.program_id(1)) * (W + 1) * C + c
    dws = (dw0, dw1, dw2, dw3)
    for n in tl.static_range(W):
        tl.store(part + (W - 1 - n) * C, tl.sum(dws[n], 0), mask=there)
    tl.store(part + W * C, tl.sum(db, 0), mask=there)


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


def _flops(x, weight, *_):
    return 2 * math.prod(x) * weight[1]


@operator("seqarch::short_convolution_forward", lambda x, *_: x.new_empty(x.shape), flops=_flops, tags=ANY_LAYOUT)
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


@operator("seqarch::qkv_convolution_forward", _empty_qkv, flops=_flops, tags=ANY_LAYOUT)
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
    return None if cu_seqlens is None else positions_in_documents(cu_seqlens, x.shape[1])
