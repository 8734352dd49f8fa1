"""Mamba-2's gated RMSNorm on Triton: the kernels, and the launches, registered as operators for torch.compile.

A program takes a group's channels of one token or, in the backward pass, of many tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.flops import none
from seqarch.kernels.launch import ANY_LAYOUT, common_factor, gradient_of, operator, token_rows

PROGRAMS = 1024
"""Programs per group of the backward pass; each sums the gradients of D and the weight over its tokens."""


@triton.jit
def _channels(group, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Channels `[BLOCK]` of the group, and which of them exist."""
    lane = tl.arange(0, BLOCK)
    return group * WIDTH + lane, lane < WIDTH


@triton.jit
def _row(p, token, stride, FACTOR: tl.constexpr, c, there):
    """The token's channels in float32, zeros where there are none."""
    return tl.load(p + token.to(tl.int64) * (stride * FACTOR) + c, mask=there, other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    y, x, D, z, weight, out, x_stride, z_stride, eps, FACTOR: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0), tl.program_id(1)
    c, there = _channels(group, WIDTH, BLOCK)
    skip = tl.load(D + c // P, mask=there, other=0.0).to(tl.float32)
    gate = _row(z, token, z_stride, FACTOR, c, there)
    g = _row(y, token, GROUPS * WIDTH, 1, c, there) + skip * _row(x, token, x_stride, FACTOR, c, there)
    g *= gate * tl.sigmoid(gate)
    g *= tl.rsqrt(tl.sum(g * g, 0) / WIDTH + eps)
    g *= tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * (GROUPS * WIDTH) + c, g.to(out.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(
    y, x, D, z, weight, dout, dy, dz, dD_parts, dweight_parts, tokens, x_stride, z_stride, eps, FACTOR: tl.constexpr,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0), tl.program_id(1)
    c, there = _channels(group, WIDTH, BLOCK)
    skip = tl.load(D + c // P, mask=there, other=0.0).to(tl.float32)
    w = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    dskip, dw = tl.zeros_like(w), tl.zeros_like(w)
    for i in range(tl.cdiv(tokens - program, tl.num_programs(0))):
        token = program + i * tl.num_programs(0)
        gate = _row(z, token, z_stride, FACTOR, c, there)
        inputs = _row(x, token, x_stride, FACTOR, c, there)
        u = _row(y, token, GROUPS * WIDTH, 1, c, there) + skip * inputs
        do = _row(dout, token, GROUPS * WIDTH, 1, c, there)
        share = tl.sigmoid(gate)
        silu = gate * share
        g = u * silu
        scale = tl.rsqrt(tl.sum(g * g, 0) / WIDTH + eps)
        dw += do * g * scale
        do *= w
        dg = scale * (do - g * (scale * scale * tl.sum(g * do, 0) / WIDTH))
        du = dg * silu
        dskip += du * inputs
        place = token.to(tl.int64) * (GROUPS * WIDTH) + c
        tl.store(dy + place, du.to(dy.dtype.element_ty), mask=there)
        tl.store(dz + place, (dg * u * share * (1 + gate * (1 - share))).to(dz.dtype.element_ty), mask=there)
    part = program * (GROUPS * WIDTH) + c
    tl.store(dD_parts + part, dskip, mask=there)
    tl.store(dweight_parts + part, dw, mask=there)


@operator("seqarch::gated_norm_forward", lambda y, x, D, z, *_: x.new_empty(z.shape), flops=none, tags=ANY_LAYOUT)
def forward(y: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, eps: float, n_groups: int) -> Tensor:
    """`gated_rms_norm`. Tokens of x and z may be slices of longer rows."""
    y, x, z, D, weight = y.contiguous(), token_rows(x), token_rows(z), D.contiguous(), weight.contiguous()
    out = torch.empty(z.shape, dtype=x.dtype, device=x.device)
    strides, sizes, warps = _launch(x, z, n_groups)
    tokens = z.shape[0] * z.shape[1]
    forward_kernel[(tokens, n_groups)](y, x, D, z, weight, out, *strides, eps, *sizes, num_warps=warps)
    return out


def _empty(dout, y, x, D, z, weight, eps, n_groups):
    return y.new_empty(y.shape), z.new_empty(z.shape), D.new_empty(D.shape), weight.new_empty(weight.shape)


def _with_dx(found, y, x, D, z, weight, eps, n_groups):
    dy, dz, dD, dweight = found
    return dy, (dy * D[:, None]).to(x.dtype), dD, dz, dweight


@gradient_of(forward, gradients=4, empty=_empty, finish=_with_dx)
def backward(dout, y, x, D, z, weight, eps, n_groups):
    """Gradients of y, z, D and the weight. The gradient of x is D times the gradient of y."""
    y, x, z, D, weight = y.contiguous(), token_rows(x), token_rows(z), D.contiguous(), weight.contiguous()
    dout = dout.contiguous()
    strides, sizes, warps = _launch(x, z, n_groups)
    tokens = z.shape[0] * z.shape[1]
    programs = min(PROGRAMS, tokens)
    dy, dz = torch.empty_like(y), torch.empty(z.shape, dtype=z.dtype, device=z.device)
    parts = torch.empty(2, programs, z.shape[2], dtype=torch.float32, device=z.device)
    backward_kernel[(programs, n_groups)](
        y, x, D, z, weight, dout, dy, dz, parts[0], parts[1], tokens, *strides, eps, *sizes, num_warps=warps
    )
    dD, dweight = parts[0].sum(0), parts[1].sum(0)
    return dy, dz, dD.view(x.shape[2:]).sum(1).to(D.dtype), dweight.to(weight.dtype)


def _launch(x: Tensor, z: Tensor, n_groups: int) -> tuple[tuple[int, int], tuple[int, ...], int]:
    """Strides of x and z in units of their common factor; this factor and the sizes; warps."""
    factor = common_factor(x.stride(1), z.stride(1))
    width = z.shape[2] // n_groups
    block = triton.next_power_of_2(width)
    sizes = factor, n_groups, width, x.shape[3], block
    return (x.stride(1) // factor, z.stride(1) // factor), sizes, min(max(block // 256, 1), 16)
