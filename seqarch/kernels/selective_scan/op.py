"""The public selective scan: checks, mamba-ssm's kernel and dispatch."""

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels import inputs
from seqarch.kernels.checks import check_decay, check_dtypes, check_sequences
from seqarch.kernels.flops import formulas
from seqarch.kernels.op import FINE, Backend, Op
from seqarch.kernels.packages import mamba_ssm_function
from seqarch.kernels.selective_scan.reference import selective_scan_reference
from seqarch.kernels.tensors import Recurred, autocast_cast

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

    The decay `a_t[d, n]` is `exp(dt_t[d] A[d, n])` with `A`, one number per token `exp(log_decay_t)` with `log_decay`,
    and 1 without either.

    Args:
        x: `[B, T, d]` inputs.
        dt: `[B, T, d]` step sizes, positive (after softplus); always float32, because small steps matter.
        A: `[d, N]` float32, negative; None for the other decays.
        B: `[B, T, N]` input weights, in the dtype of `x`.
        C: `[B, T, N]` output weights, in the dtype of `x`.
        D: `[d]` weights of the skip connection; None for none.
        log_decay: `[B, T]` float32, at most 0: one decay for all channels and states; `A` must then be None.
        initial_state: `[rows, d, N]`, rows = B or the number of documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); each has its own state.
        backend: "auto", "reference", "triton", our CUDA kernels, or "mamba_ssm", the CUDA kernel of that package. That
            kernel takes neither an initial state nor documents, and gives no gradient through the final state. "auto"
            does not choose it.

    Returns:
        Outputs `[B, T, d]` in the dtype of `x`, or of autocast if it is on, and the final states `[B, d, N]` (one for
        each document) in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together, or a backend that cannot run here.
    """
    x, B, C = autocast_cast(x, B, C)
    shapes = {"x [B, T, d]": x, "dt [B, T, d]": dt, "B [B, T, N]": B, "C [B, T, N]": C, "A [d, N]": A, "D [d]": D}
    states = {"log_decay [B, T]": log_decay, "initial_state [rows, d, N]": initial_state}
    check_sequences({**shapes, **states}, cu_seqlens)
    check_dtypes(x=x, B=B, C=C)
    check_decay(A, log_decay)
    with torch.autocast(x.device.type, enabled=False):
        return SELECTIVE_SCAN.run(backend, x, dt, A, B, C, D, log_decay, initial_state, cu_seqlens)


def _triton(*args: Any) -> Recurred:
    from seqarch.kernels.selective_scan.triton import scan

    return scan(*args)


def _triton_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *others: Tensor | None) -> str | None:
    if any(t is not None and t.dtype == torch.float64 for t in (dt, A, *others)):
        return "it does not take float64"
    if B.shape[2] > TRITON_STATES:
        return f"it holds at most {TRITON_STATES} states per channel, not {B.shape[2]}"
    return None


def _mamba_ssm_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, *others: Tensor | None) -> str | None:
    _, _, _, log_decay, initial_state, cu_seqlens = others
    if A is None or log_decay is not None:
        return "it takes only decays by A"
    if initial_state is not None or cu_seqlens is not None:
        return "it takes neither initial_state nor cu_seqlens"
    return None


@torch.compiler.disable()
def by_mamba_ssm(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, *_: None) -> Recurred:
    """The CUDA kernel takes time as the last dimension and step sizes in the dtype of `x`."""
    selective_scan_fn = mamba_ssm_function("selective_scan_interface", "selective_scan_fn")
    x, dt, B, C = (t.to(x.dtype).transpose(1, 2).contiguous() for t in (x, dt, B, C))
    skip = None if D is None else D.float()
    y, state = selective_scan_fn(x, dt, A.float(), B, C, skip, return_last_state=True)
    return y.transpose(1, 2), state.detach()


SELECTIVE_SCAN = Op(
    "selective_scan",
    selective_scan_reference,
    (
        Backend("triton", _triton, "triton", obstacle=_triton_obstacle),
        Backend("mamba_ssm", by_mamba_ssm, "mamba_ssm", obstacle=_mamba_ssm_obstacle, automatic=False),
    ),
    flops=formulas(
        "selective_scan", "selective_scan_backward", "selective_scan_pieces", "selective_scan_pieces_backward"
    ),
    inputs=inputs.selective_scan,
    tolerance=FINE,
    fuses=True,
)
