"""The public gated RMSNorm: checks and dispatch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import inputs
from seqarch.kernels.flops import formulas
from seqarch.kernels.gated_norm.reference import gated_rms_norm_reference
from seqarch.kernels.op import Backend, Op

TRITON_WIDTH = 16384
"""Most channels of a group that a program of the kernels holds."""


def gated_rms_norm(
    y: Tensor,
    x: Tensor,
    D: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    n_groups: int = 1,
    backend: str = "auto",
) -> Tensor:
    """`RMSNorm((y + D x) * silu(z))` of the outputs of Mamba-2's recurrence (arXiv 2405.21060, section 7).

    Args:
        y: outputs of the recurrence `[B, T, H, P]`.
        x: its inputs `[B, T, H, P]`.
        D: `[H]` weights of the skip connection.
        z: the gate `[B, T, H P]`.
        weight: `[H P]` of the norm.
        eps: added to the mean square.
        n_groups: groups of channels, each with a mean of its own; a divisor of H.
        backend: "auto", "reference" or "triton", our CUDA kernels, which read and write each tensor once, but for the
            gradient of x, D times that of y.

    Returns:
        `[B, T, H P]` in the dtype of `x`, computed in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes or dtypes that do not fit together; a backend that cannot run here.
    """
    _check(y, x, D, z, weight, n_groups)
    return GATED_RMS_NORM.run(backend, y, x, D, z, weight, eps, n_groups)


def _triton(*args: Any) -> Tensor:
    from seqarch.kernels.gated_norm.triton import forward

    return forward(*args)


def _obstacle(y: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, eps: float, n_groups: int) -> str | None:
    width = weight.shape[0] // n_groups
    if width > TRITON_WIDTH:
        return f"groups of {width} channels are more than it holds, {TRITON_WIDTH}"
    return None


def _check(y: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, n_groups: int) -> None:
    if x.dim() != 4 or y.shape != x.shape:
        raise UserError(f"y and x must have one shape [B, T, H, P], not {list(y.shape)} and {list(x.shape)}")
    heads, width = x.shape[2], x.shape[2] * x.shape[3]
    expected = {"D": (D, [heads]), "z": (z, [*x.shape[:2], width]), "weight": (weight, [width])}
    for name, (tensor, shape) in expected.items():
        if list(tensor.shape) != shape:
            raise UserError(f"{name} must have shape {shape}, not {list(tensor.shape)}")
    if n_groups < 1 or heads % n_groups:
        raise UserError(f"{heads} heads cannot be split into {n_groups} groups evenly: give a divisor")
    if not x.is_floating_point() or any(t.dtype != x.dtype for t in (y, z)):
        raise UserError(f"y, x and z must share one floating-point dtype, not {[t.dtype for t in (y, x, z)]}")


GATED_RMS_NORM = Op(
    "gated_rms_norm",
    gated_rms_norm_reference,
    (Backend("triton", _triton, "triton", obstacle=_obstacle),),
    flops=formulas("gated_norm_forward", "gated_norm_backward"),
    inputs=inputs.gated_norm,
    fuses=True,
)
