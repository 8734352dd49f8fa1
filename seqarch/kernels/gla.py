"""Gated linear attention: the public op, its reference by RWKV-6's recurrence, and fla's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels import inputs
from seqarch.kernels.checks import check_dtypes, check_sequences, default_scale
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import FLA, Backend, Op
from seqarch.kernels.rwkv6.reference import rwkv6_reference
from seqarch.kernels.tensors import at_least_float32, autocast_cast


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gated linear attention (arXiv 2312.06635): a decay for each channel of the keys.

        S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t

    Args:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        log_decay: logarithms of the decays `[B, T, H, K]`, at most zero, float32 (float64 for float64 inputs).
        scale: factor on the outputs; None is `K ** -0.5`.
        initial_state: `[rows, H, K, V]`, rows = B or the number of packed documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v` (of autocast, where it is on) and the final state `[rows, H, K, V]`
        in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k, v = autocast_cast(q, k, v)
    shapes = {"q [B, T, H, K]": q, "k [B, T, H, K]": k, "v [B, T, H, V]": v, "log_decay [B, T, H, K]": log_decay}
    check_sequences({**shapes, "initial_state [rows, H, K, V]": initial_state}, cu_seqlens)
    check_dtypes({"log_decay": log_decay}, q=q, k=k, v=v)
    return GLA.run(backend, q, k, v, log_decay, default_scale(scale, q), initial_state, cu_seqlens)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, initial_state: Any, cu_seqlens: Any
) -> tuple[Tensor, Tensor]:
    """RWKV-6 reads the state before the token: the token's own decay goes to the query, its value comes on top."""
    with torch.autocast(q.device.type, enabled=False):
        r, k, wide = at_least_float32(q), at_least_float32(k), at_least_float32(v)
        own = scale * (r * k).sum(dim=-1, keepdim=True) * wide
        nothing = torch.zeros_like(k[0, 0])
        o, state = rwkv6_reference(r * log_decay.exp(), k, wide, log_decay, nothing, scale, initial_state, cu_seqlens)
        return (o + own).to(v.dtype), state


def _fla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, state: Any, cu_seqlens: Any
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"scale": scale, "initial_state": state, "cu_seqlens": cu_seqlens}
    return fla_recurrence("gla", q=q, k=k, v=v, g=log_decay, **options)


def _inputs(*sizes: int, **options: Any) -> inputs.Arguments:
    drawn = inputs.rwkv6(*sizes, **options)
    return {"q": drawn["r"], **{name: drawn[name] for name in ("k", "v", "log_decay")}}


GLA = Op("gla", _reference, (Backend("fla", _fla, "fla"),), inputs=_inputs, tolerance=FLA)
