"""The public state space dual op: checks, other packages' kernels and dispatch."""

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels import inputs
from seqarch.kernels.blocks import expand_heads
from seqarch.kernels.checks import check_decay, check_dtypes, check_sequences, check_shared
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.flops import formulas
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.packages import check_gated_gradients, mamba_ssm_function
from seqarch.kernels.ssd.reference import scaled_inputs, ssd_reference
from seqarch.kernels.tensors import Recurred, at_least_float32, autocast_cast, is_tracked

TRITON_SIZES = (256, 128)
"""Largest N and P that our own kernels hold at once."""
MAMBA_CHUNK = 256
"""Tokens per chunk of mamba-ssm's kernels, as in the published module."""


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

    Decays and states are kept in float32 (float64 for float64 inputs). Every backend runs a single token in PyTorch.

    Args:
        x: inputs `[B, T, H, P]`.
        dt: steps `[B, T, H]`, positive.
        A: `[H]`, zero or negative; None for `a_t = 1`.
        B: input projections `[B, T, G, N]`, G a divisor of H.
        C: output projections, as `B`.
        log_decay: `ln a_t`, at most 0, in place of `dt_t A`: `[B, T, H]`, or `[B, T, 1]` for all heads.
        initial_state: `[B, H, N, P]`; with `cu_seqlens` one for each document.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference", "triton", our CUDA kernels (N up to 256 and P up to 128), "fla", the kernels of
            fla-core, or "mamba_ssm", the authors' Triton kernels, which take neither `log_decay` nor `cu_seqlens`.

    Returns:
        `y [B, T, H, P]` in the dtype of `x`, or of autocast if it is on, without a skip connection, and the final
        state `[B, H, N, P]`.

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is missing.
    """
    x, B, C = autocast_cast(x, B, C)
    shapes = {"x [B, T, H, P]": x, "dt [B, T, H]": dt, "A [H]": A, "B [B, T, G, N]": B, "C [B, T, G, N]": C}
    decays = "log_decay [B, T, 1]" if log_decay is not None and log_decay.shape[-1:] == (1,) else "log_decay [B, T, H]"
    check_sequences({**shapes, decays: log_decay, "initial_state [rows, H, N, P]": initial_state}, cu_seqlens)
    check_dtypes(x=x, B=B, C=C)
    check_shared(x.shape[2], "heads", B.shape[2], "groups of B and C")
    check_decay(A, log_decay)
    state = None if initial_state is None else at_least_float32(initial_state)
    args = x, at_least_float32(dt), A, B, C, log_decay, state, cu_seqlens
    run = SSD.choose(backend, *args)
    return (ssd_reference if x.shape[1] == 1 and cu_seqlens is None else run)(*args)


def _triton(x: Tensor, dt: Tensor, A: Any, B: Tensor, C: Tensor, log_decay: Any, *others: Any) -> Recurred:
    from seqarch.kernels.ssd.triton import forward

    return forward(*scaled_inputs(x, dt, A, log_decay), B, C, *others)


def _triton_obstacle(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *others: Tensor | None) -> str | None:
    if B.shape[3] > TRITON_SIZES[0] or x.shape[3] > TRITON_SIZES[1]:
        return f"it takes N up to {TRITON_SIZES[0]} and P up to {TRITON_SIZES[1]}, not {B.shape[3]} and {x.shape[3]}"
    return None


def _fla(x: Tensor, dt: Tensor, A: Any, B: Tensor, C: Tensor, log_decay: Any, *others: Any) -> Recurred:
    return by_simple_gla(*scaled_inputs(x, dt, A, log_decay), B, C, *others)


@torch.compiler.disable()
def by_simple_gla(
    x: Tensor, log_decay: Tensor | None, B: Tensor, C: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> Recurred:
    """Outputs and final states for scaled `x` by fla's gated linear attention: queries C, keys B, values x.

    fla's kernel takes one query and one key per value. If one group and one decay serve all heads, the heads become one
    head with long values. Otherwise B and C are repeated for the heads of their group.
    """
    if log_decay is not None and is_tracked(x, log_decay, B, C, state):
        check_gated_gradients(x.device)
    heads = x.shape[2]
    joined = B.shape[2] == 1 and (log_decay is None or log_decay.shape[2] == 1)
    if joined:
        x = x.flatten(2).unsqueeze(2)
        state = None if state is None else state.transpose(1, 2).flatten(2).unsqueeze(1)
    else:
        B, C = expand_heads(B, heads), expand_heads(C, heads)
        log_decay = None if log_decay is None else log_decay.expand(-1, -1, heads)
    g = None if log_decay is None else log_decay.contiguous()
    y, final = fla_recurrence("simple_gla", C, B, x, g, scale=1.0, initial_state=state, cu_seqlens=cu_seqlens)
    if joined:
        y = y.squeeze(2).unflatten(2, (heads, -1))
        final = final.squeeze(1).unflatten(2, (heads, -1)).transpose(1, 2)
    return y, final


@torch.compiler.disable()
def by_mamba_ssm(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, _: None, state: Tensor | None, *__: None
) -> Recurred:
    """Call the authors' Triton kernels, which keep states as `[P, N]`."""
    run = mamba_ssm_function("triton.ssd_combined", "mamba_chunk_scan_combined")
    A = dt.new_zeros(x.shape[2]) if A is None else A.to(dt.dtype)
    state = None if state is None else state.transpose(2, 3).contiguous()
    y, final = run(x, dt, A, B, C, MAMBA_CHUNK, initial_states=state, return_final_states=True)
    return y, final.transpose(2, 3)


def _mamba_ssm_obstacle(*args: Tensor | None) -> str | None:
    _, _, _, _, _, log_decay, _, cu_seqlens = args
    if log_decay is not None:
        return "it takes no log_decay (a decay of its own, apart from the steps)"
    return None if cu_seqlens is None else "it takes no packed documents (cu_seqlens)"


SSD = Op(
    "ssd",
    ssd_reference,
    (
        Backend("triton", _triton, "triton", obstacle=_triton_obstacle),
        Backend("mamba_ssm", by_mamba_ssm, "mamba_ssm", obstacle=_mamba_ssm_obstacle),
        Backend("fla", _fla, "fla"),
    ),
    flops=formulas("ssd_forward", "ssd_backward"),
    inputs=inputs.ssd,
)
