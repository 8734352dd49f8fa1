"""The public selective scan: checks and dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import inputs
from seqarch.kernels.checks import check_packed
from seqarch.kernels.flops import formulas
from seqarch.kernels.op import FINE, Backend, Op
from seqarch.kernels.selective_scan.reference import selective_scan_reference
from seqarch.kernels.tensors import autocast_cast

TRITON_STATES = 64
"""Most states of a channel that the kernels hold."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    log_decay: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The selective scan of Mamba (arXiv 2312.00752, algorithm 2): each channel has N states, each with its decay.

        h_t[d, n] = a_t[d, n] h_{t-1}[d, n] + dt_t[d] x_t[d] B_t[n]
        y_t[d]    = sum_n C_t[n] h_t[d, n] + D[d] x_t[d]

    The decay `a_t[d, n]` is `exp(dt_t[d] A[d, n])` with `A`, one number a token `exp(log_decay_t)` with `log_decay`,
    and 1 without either.

    Args:
        x: `[B, T, d]` inputs.
        dt: `[B, T, d]` step sizes, positive (after softplus); float32 whatever the dtype of `x`, as small ones matter.
        A: `[d, N]` float32, negative; None for the other decays.
        B: `[B, T, N]` input weights, in the dtype of `x`.
        C: `[B, T, N]` output weights, in the dtype of `x`.
        D: `[d]` weights of the skip connection; None for none.
        log_decay: `[B, T]` float32, at most 0: one decay for all channels and states; needs `A` to be None.
        initial_state: `[B, d, N]` (`[number of documents, d, N]` with `cu_seqlens`); zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); each has a state of its own.
        backend: "auto", "reference", "triton", our CUDA kernels, or "mamba_ssm", the CUDA kernel of that package, which
            knows neither an initial state nor documents and gives no gradient through the final state; "auto" does not
            take it.

    Returns:
        Outputs `[B, T, d]` in the dtype of `x` (of autocast, where it is on) and the final states `[B, d, N]` (one for
        each document) in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together, or a backend that cannot run here.
    """
    x, B, C = autocast_cast(x, B, C)
    _check(x, dt, A, B, C, D, log_decay)
    check_packed(cu_seqlens, x)
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None and initial_state.shape != (rows, x.shape[2], B.shape[2]):
        raise UserError(
            f"initial_state must have shape {[rows, x.shape[2], B.shape[2]]}, not {list(initial_state.shape)}"
        )
    with torch.autocast(x.device.type, enabled=False):
        return SELECTIVE_SCAN.run(backend, x, dt, A, B, C, D, log_decay, initial_state, cu_seqlens)


def _triton(*args: Any) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.selective_scan.triton import scan

    return scan(*args)


def _mamba_ssm(*args: Any) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.selective_scan.mamba_ssm import scan_mamba_ssm

    return scan_mamba_ssm(*args)


def _triton_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *others: Tensor | None) -> str | None:
    if any(t is not None and t.dtype == torch.float64 for t in (dt, A, *others)):
        return "it does not take float64"
    if B.shape[2] > TRITON_STATES:
        return f"it holds at most {TRITON_STATES} states a channel, not {B.shape[2]}"
    return None


def _mamba_ssm_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, *others: Tensor | None) -> str | None:
    _, _, _, log_decay, initial_state, cu_seqlens = others
    if A is None or log_decay is not None:
        return "it knows only decays by A"
    if initial_state is not None or cu_seqlens is not None:
        return "it takes neither initial_state nor cu_seqlens"
    return None


def _check(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, D: Tensor | None, log_decay: Tensor | None
) -> None:
    if x.dim() != 3 or x.shape != dt.shape or x.shape[1] < 1:
        raise UserError(f"x and dt must have one shape [B, T, d] with T >= 1, not {list(x.shape)} and {list(dt.shape)}")
    if B.dim() != 3 or B.shape != C.shape or B.shape[:2] != x.shape[:2]:
        raise UserError(
            f"B and C must have shape [B, T, N] with B, T = {list(x.shape[:2])}, "
            f"not {list(B.shape)} and {list(C.shape)}"
        )
    if not x.is_floating_point() or B.dtype != x.dtype or C.dtype != x.dtype:
        raise UserError(f"x, B and C must share one floating-point dtype, not {[t.dtype for t in (x, B, C)]}")
    if A is not None and log_decay is not None:
        raise UserError("A and log_decay are two ways to decay: give one of them")
    expected = {"A": (A, [x.shape[2], B.shape[2]]), "D": (D, [x.shape[2]]), "log_decay": (log_decay, list(x.shape[:2]))}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and list(tensor.shape) != shape:
            raise UserError(f"{name} must have shape {shape}, not {list(tensor.shape)}")


SELECTIVE_SCAN = Op(
    "selective_scan",
    selective_scan_reference,
    (
        Backend("triton", _triton, "triton", obstacle=_triton_obstacle),
        Backend("mamba_ssm", _mamba_ssm, "mamba_ssm", obstacle=_mamba_ssm_obstacle, automatic=False),
    ),
    flops=formulas(
        "selective_scan", "selective_scan_backward", "selective_scan_pieces", "selective_scan_pieces_backward"
    ),
    inputs=inputs.selective_scan,
    tolerance=FINE,
    fuses=True,
)
