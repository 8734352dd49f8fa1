"""The public op of RWKV-5 and RWKV-6: checks, fla's kernels and dispatch."""

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels import inputs
from seqarch.kernels.checks import check_dtypes, check_sequences
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import FLA, Backend, Op
from seqarch.kernels.rwkv6.reference import rwkv6_reference
from seqarch.kernels.tensors import Recurred, autocast_cast


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
        initial_state: `[rows, H, K, V]`, rows = B or the number of packed documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v`, or of autocast if it is on, and the final state `[rows, H, K, V]`
        in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    r, k, v = autocast_cast(r, k, v)
    shapes = {"r [B, T, H, K]": r, "k [B, T, H, K]": k, "v [B, T, H, V]": v, "log_decay [B, T, H, K]": log_decay}
    check_sequences({**shapes, "bonus [H, K]": bonus, "initial_state [rows, H, K, V]": initial_state}, cu_seqlens)
    check_dtypes({"log_decay": log_decay}, r=r, k=k, v=v)
    return RWKV6.run(backend, r, k, v, log_decay, bonus, scale, initial_state, cu_seqlens)


def _fla(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, scale: float, state: Tensor | None, cu: Any
) -> Recurred:
    step = r.shape[1] == 1 and not torch.is_grad_enabled()
    state = None if state is None else state.float()
    return fla_recurrence(
        "rwkv6", r, k, v, log_decay, bonus.float(), scale=scale, initial_state=state, cu_seqlens=cu, step=step
    )


RWKV6 = Op("rwkv6", rwkv6_reference, (Backend("fla", _fla, "fla"),), inputs=inputs.rwkv6, tolerance=FLA, fuses=True)
