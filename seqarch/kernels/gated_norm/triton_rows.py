"""Mamba-2's gated RMSNorm on Triton: the kernels.

A program takes a group's channels of one token or, in the backward pass, of many tokens.
"""

import triton
import triton.language as tl


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
