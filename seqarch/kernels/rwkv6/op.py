"""The public op of RWKV-5 and RWKV-6: checks and dispatch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import inputs
from seqarch.kernels.checks import check_initial_state, check_packed, check_sequences
from seqarch.kernels.op import FLA, Backend, Op
from seqarch.kernels.rwkv6.reference import rwkv6_reference
from seqarch.kernels.tensors import autocast_cast


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of RWKV-6, and of RWKV-5 with decays that do not depend on the position (arXiv 2404.05892).

        o_t = scale * r_t (S_{t-1} + diag(bonus) k_t v_t^T),   S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T

    Args:
        r: receptances `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        log_decay: logarithms of the decays `[B, T, H, K]`, at most zero and finite, float32 (float64 for float64
            inputs); may be an expanded view.
        bonus: `[H, K]`, the weight of a token in its own output in place of the decay.
        scale: factor on the outputs; RWKV has none.
        initial_state: `[N, H, K, V]`, N = B or the number of packed documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v` (of autocast, where it is on) and the final state `[N, H, K, V]` in
        float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    r, k, v = autocast_cast(r, k, v)
    _check(r, k, v, log_decay, bonus, initial_state, cu_seqlens)
    return RWKV6.run(backend, r, k, v, log_decay, bonus, scale, initial_state, cu_seqlens)


def _check(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    check_sequences({"r": r, "k": k, "log_decay": log_decay}, v, ("r", "k"), ("log_decay",))
    if bonus.shape != r.shape[2:]:
        raise UserError(f"bonus must have shape [H, K] = {list(r.shape[2:])}, not {list(bonus.shape)}")
    check_packed(cu_seqlens, r)
    check_initial_state(initial_state, r, cu_seqlens, {"K": r.shape[3], "V": v.shape[3]})


def _fla(*args: Any) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.rwkv6.fla import rwkv6_fla

    return rwkv6_fla(*args)


RWKV6 = Op("rwkv6", rwkv6_reference, (Backend("fla", _fla, "fla"),), inputs=inputs.rwkv6, tolerance=FLA, fuses=True)
