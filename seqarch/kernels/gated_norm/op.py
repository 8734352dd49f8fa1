"""The gated RMSNorm: checks and the reference."""

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.op import Backend, Op
from seqarch.kernels.tensors import at_least_float32, check_shapes, check_shared

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
        weight: `[H P]`, weights of the norm.
        eps: added to the mean square.
        n_groups: groups of channels, each with its own mean; a divisor of H.
        backend: "auto", "reference" or "triton", our CUDA kernels, which read and write each tensor once. PyTorch
            computes the gradient of x, which is D times the gradient of y.

    Returns:
        `[B, T, H P]` in the dtype of `x`, computed in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes or dtypes that do not fit together; a backend that cannot run here.
    """
    sizes = check_shapes({"x [B, T, H, P] same": x, "y [B, T, H, P] same": y, "D [H]": D}, {"B": 0})
    width = sizes["H"] * sizes["P"]
    shapes = {"x [B, T, H, P]": x, "z [B, T, H P] same": z, "weight [H P]": weight}
    check_shapes(shapes, {"B": 0}, **sizes, **{"H P": width})
    check_shared(x.shape[2], "heads", n_groups, "groups")
    return GATED_RMS_NORM.run(backend, y, x, D, z, weight, eps, n_groups)


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


def _obstacle(y: Tensor, x: Tensor, D: Tensor, z: Tensor, weight: Tensor, eps: float, n_groups: int) -> str | None:
    width = weight.shape[0] // n_groups
    return f"groups of {width} channels are more than it holds, {TRITON_WIDTH}" if width > TRITON_WIDTH else None


GATED_RMS_NORM = Op(
    "gated_rms_norm",
    gated_rms_norm_reference,
    (Backend("triton", "seqarch.kernels.gated_norm.triton:forward", "triton", obstacle=_obstacle),),
    fuses=True,
)
