"""The public op of RWKV-7: checks, fla's kernels and dispatch."""

from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import inputs
from seqarch.kernels.checks import check_dtypes, check_sequences
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import FLA, Backend, Op
from seqarch.kernels.rwkv7.reference import rwkv7_reference
from seqarch.kernels.tensors import Recurred, autocast_cast


def rwkv7(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    lower_bound: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of RWKV-7 (arXiv 2503.14456): at each step a decay and a matrix of rank one, then the new token.

        S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   o_t = scale * S_t^T r_t

    The paper writes the transposed state, S_t = S_{t-1} (diag(w_t) + a_t b_t^T) + v_t k_t^T.

    Args:
        r: receptances `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        log_decay: logarithms of the decays `[B, T, H, K]`, at most zero and finite, float32 (float64 for float64
            inputs).
        a: the direction that is read from the state `[B, T, H, K]`; RWKV-7: minus the normalised key.
        b: the direction in which the result is added `[B, T, H, K]`; RWKV-7: the normalised key times the learning
            rate.
        scale: factor on the outputs; RWKV has none.
        lower_bound: a promise that `log_decay` is never below it; with a bound near zero the CUDA kernels take larger
            chunks.
        initial_state: `[rows, H, K, V]`, rows = B or the number of packed documents; zeros when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1).
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        Outputs `[B, T, H, V]` in the dtype of `v`, or of autocast if it is on, and the final state `[rows, H, K, V]`
        in float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    r, k, v, a, b = autocast_cast(r, k, v, a, b)
    keys = {f"{name} [B, T, H, K]": t for name, t in (("r", r), ("k", k), ("log_decay", log_decay), ("a", a), ("b", b))}
    check_sequences({**keys, "v [B, T, H, V]": v, "initial_state [rows, H, K, V]": initial_state}, cu_seqlens)
    check_dtypes({"log_decay": log_decay}, r=r, k=k, v=v, a=a, b=b)
    if lower_bound is not None and lower_bound >= 0:
        raise UserError(f"lower_bound must be below 0, as logarithms of decays are, not {lower_bound}")
    return RWKV7.run(backend, r, k, v, log_decay, a, b, scale, lower_bound, initial_state, cu_seqlens)


def _obstacle(r: Tensor, k: Tensor, *others: Any) -> str | None:
    return f"it takes keys of at most 256 dims, not {k.shape[-1]}" if k.shape[-1] > 256 else None


def _fla(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, scale: float, lower_bound: Any, *rest: Any
) -> Recurred:
    state, cu_seqlens = rest
    step = r.shape[1] == 1 and not torch.is_grad_enabled()
    options: dict[str, Any] = {"scale": scale, "step": step, "cu_seqlens": cu_seqlens}
    options["initial_state"] = None if state is None else state.float()
    if not step:  # the backward pass would compute a fifth of all kernels' time again, to save memory
        options |= {"lower_bound": lower_bound, "disable_recompute": True}
    return fla_recurrence("rwkv7", r, log_decay, k, v, a, b, **options)


RWKV7 = Op(
    "rwkv7",
    rwkv7_reference,
    (Backend("fla", _fla, "fla", obstacle=_obstacle),),
    inputs=inputs.rwkv7,
    tolerance=FLA,
    fuses=True,
)
