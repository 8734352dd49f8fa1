"""Mamba-2's gated RMSNorm on Triton: the launches, registered as operators so that torch.compile sees them whole."""

import torch
import triton
from torch import Tensor

from seqarch.kernels.gated_norm.triton_rows import backward_kernel, forward_kernel
from seqarch.kernels.launch import ANY_LAYOUT, common_factor, gradient_of, operator, token_rows

PROGRAMS = 1024
"""Programs per group of the backward pass; each sums the gradients of D and the weight over its tokens."""


@operator("seqarch::gated_norm_forward", lambda y, x, D, z, *_: x.new_empty(z.shape), tags=ANY_LAYOUT)
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
