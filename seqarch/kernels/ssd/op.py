"""The public state space dual op: checks and dispatch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import inputs
from seqarch.kernels.checks import check_packed
from seqarch.kernels.flops import formulas
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.ssd.reference import scaled_inputs, ssd_reference
from seqarch.kernels.tensors import at_least_float32, autocast_cast

TRITON_SIZES = (256, 128)
"""Largest N and P that the kernels of our own hold at once."""


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2, the state space dual (arXiv 2405.21060).

    For each head h, in group h // (H / G), with a state `S [N, P]` that starts at zero:

        S_t = a_t S_{t-1} + dt_t B_t x_t^T,    a_t = exp(dt_t A),    y_t = S_t^T C_t

    Decays and states are kept in float32 (float64 for float64 inputs). A single token is computed in PyTorch by every
    backend.

    Args:
        x: inputs `[B, T, H, P]`.
        dt: steps `[B, T, H]`, positive.
        A: `[H]`, zero or negative; None for `a_t = 1`.
        B: input projections `[B, T, G, N]`, G a divisor of H.
        C: output projections, as `B`.
        log_decay: logarithms of `a_t` in place of `dt_t A`, `[B, T, H]`, or `[B, T, 1]` for all heads; zero or
            negative.
        initial_state: `[B, H, N, P]`; with `cu_seqlens` one for each document.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference", "triton", our CUDA kernels (N up to 256 and P up to 128), "mamba_ssm", the
            authors' Triton kernels, which take neither `log_decay` nor `cu_seqlens`, or "fla", those of fla-core.

    Returns:
        `y [B, T, H, P]` in the dtype of `x` (of autocast, where it is on), without a skip connection, and the final
        state `[B, H, N, P]`.

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is missing.
    """
    x, B, C = autocast_cast(x, B, C)
    _check_inputs(x, dt, B, C)
    _check_decay(x, A, log_decay)
    check_packed(cu_seqlens, x)
    dt = at_least_float32(dt)
    if initial_state is not None:
        _check_state(initial_state, x, B, cu_seqlens)
        initial_state = at_least_float32(initial_state)
    args = x, dt, A, B, C, log_decay, initial_state, cu_seqlens
    run = SSD.choose(backend, *args)
    return (ssd_reference if x.shape[1] == 1 and cu_seqlens is None else run)(*args)


def _triton(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.ssd.triton import forward

    return forward(*scaled_inputs(x, dt, A, log_decay), B, C, *others)


def _fla(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.ssd.fla import ssd_fla

    return ssd_fla(*scaled_inputs(x, dt, A, log_decay), B, C, *others)


def _mamba_ssm(*args: Any) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.ssd.mamba_ssm import ssd_mamba_ssm

    return ssd_mamba_ssm(*args)


def _triton_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *others: Tensor | None) -> str | None:
    if B.shape[3] > TRITON_SIZES[0] or x.shape[3] > TRITON_SIZES[1]:
        return f"it takes N up to {TRITON_SIZES[0]} and P up to {TRITON_SIZES[1]}, not {B.shape[3]} and {x.shape[3]}"
    return None


def _mamba_ssm_obstacle(*args: Tensor | None) -> str | None:
    _, _, _, _, _, log_decay, _, cu_seqlens = args
    if log_decay is not None:
        return "it takes no log_decay (a decay of its own, apart from the steps)"
    return None if cu_seqlens is None else "it takes no packed documents (cu_seqlens)"


def _check_inputs(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> None:
    if x.dim() != 4 or x.shape[1] < 1:
        raise UserError(f"x must be [B, T, H, P] with T >= 1, not of shape {list(x.shape)}")
    if dt.shape != x.shape[:3]:
        raise UserError(f"dt must have shape [B, T, H] = {list(x.shape[:3])}, not {list(dt.shape)}")
    if B.dim() != 4 or B.shape != C.shape or B.shape[:2] != x.shape[:2]:
        raise UserError(
            f"B and C must have one shape [B, T, G, N] = {[*x.shape[:2], 'G', 'N']}, "
            f"not {list(B.shape)} and {list(C.shape)}"
        )
    if x.shape[2] % B.shape[2]:
        raise UserError(f"{x.shape[2]} heads cannot share {B.shape[2]} groups of B and C evenly: give a divisor")
    if not x.is_floating_point() or any(t.dtype != x.dtype or t.device != x.device for t in (B, C)):
        raise UserError(
            "x, B and C must share one floating-point dtype and device, "
            f"not {[(t.dtype, str(t.device)) for t in (x, B, C)]}"
        )


def _check_decay(x: Tensor, A: Tensor | None, log_decay: Tensor | None) -> None:
    heads = x.shape[2]
    if A is not None and log_decay is not None:
        raise UserError("log_decay is given in place of A: leave one of them out")
    if A is not None and A.shape != (heads,):
        raise UserError(f"A must have shape [H] = [{heads}], not {list(A.shape)}")
    if log_decay is not None and log_decay.shape not in ((*x.shape[:2], heads), (*x.shape[:2], 1)):
        raise UserError(
            f"log_decay must have shape [B, T, H] = {list(x.shape[:3])} or [B, T, 1], not {list(log_decay.shape)}"
        )


def _check_state(initial_state: Tensor, x: Tensor, B: Tensor, cu_seqlens: Tensor | None) -> None:
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    expected = (rows, x.shape[2], B.shape[3], x.shape[3])
    if initial_state.shape != expected:
        what = "B" if cu_seqlens is None else "documents"
        raise UserError(
            f"initial_state must have shape [{what}, H, N, P] = {list(expected)}, not {list(initial_state.shape)}"
        )


SSD = Op(
    "ssd",
    ssd_reference,
    (
        Backend("triton", _triton, "triton", obstacle=_triton_obstacle),
        Backend("mamba_ssm", _mamba_ssm, "mamba_ssm", obstacle=_mamba_ssm_obstacle),
        Backend("fla", _fla, "fla"),
    ),
    flops=formulas("ssd_forward", "ssd_backward"),
    inputs=inputs.ssd,
)
