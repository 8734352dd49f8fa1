"""The public delta rule: checks and dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import inputs
from seqarch.kernels.checks import check_initial_state, check_packed, check_sequences, default_scale
from seqarch.kernels.delta_rule.reference import delta_rule_reference
from seqarch.kernels.op import FLA, Backend, Op
from seqarch.kernels.tensors import autocast_cast


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The delta rule (arXiv 2406.06484), with a decay the gated delta rule (arXiv 2412.06464).

    `S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T` and `o_t = scale * S_t^T q_t`: the decayed state's
    answer to the key is moved towards the value by beta. Keys should have unit length, or the state may grow without
    bound; both papers normalise q and k beforehand.

    Args:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        beta: `[B, T, H]`, how far the state moves: 0 to 1, to 2 with negative eigenvalues.
        log_decay: `[B, T, H]` float32 (float64 for float64 inputs), the logarithm of `a_t`, at most 0; None for
            `a_t = 1`.
        scale: factor on the outputs; None is `K ** -0.5`.
        initial_state: `[N, H, K, V]`, N = B or the number of documents; None for zeros.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        `o [B, T, H, V]` in the dtype of `q` (of autocast, where it is on), and the final state `[N, H, K, V]` in
        float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is not installed.
    """
    q, k, v = autocast_cast(q, k, v)
    _check(q, k, v, beta, log_decay, initial_state, cu_seqlens)
    scale = default_scale(scale, q)
    return DELTA_RULE.run(backend, q, k, v, beta, log_decay, scale, initial_state, cu_seqlens)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    check_sequences({"q": q, "k": k}, v, ("q", "k"), ())
    for name, t in (("beta", beta), ("log_decay", log_decay)):
        if t is not None and t.shape != q.shape[:3]:
            raise UserError(f"{name} must have shape [B, T, H] = {list(q.shape[:3])}, not {list(t.shape)}")
    if log_decay is not None and log_decay.dtype not in (torch.float32, torch.float64):
        raise UserError(f"log_decay must be float32, not {log_decay.dtype}, which would round decays near 1")
    check_packed(cu_seqlens, q)
    check_initial_state(initial_state, k, cu_seqlens, {"K": k.shape[3], "V": v.shape[3]})


def _obstacle(*args: Any) -> str | None:
    from seqarch.kernels.delta_rule.fla import obstacle

    return obstacle(*args)


def _fla(*args: Any) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.delta_rule.fla import delta_rule_fla

    return delta_rule_fla(*args)


DELTA_RULE = Op(
    "delta_rule",
    delta_rule_reference,
    (Backend("fla", _fla, "fla", obstacle=_obstacle),),
    inputs=inputs.delta_rule,
    tolerance=FLA,
    fuses=True,
)
