"""The delta rule that erases and decays by channel: checks, reference in plain PyTorch and fla's kernels."""

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import Backend, Op, wide_keys
from seqarch.kernels.rwkv7 import rwkv7_reference
from seqarch.kernels.tensors import (
    Recurred,
    at_least_float32,
    autocast_cast,
    check_sequences,
    default_scale,
    is_tracked,
)


def gated_delta_rule2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence of Gated DeltaNet-2 (arXiv 2605.22791), which erases channels of a key apart from each other.

        S_t = (I - k_t (e_t * k_t)^T) diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T,   o_t = scale * S_t^T q_t

    The paper's write gate is a factor of the values, so `v` holds it already. With `e_t` one number per head and a
    write gate equal to it, this is Kimi Delta Attention; if the decay is one number too, the gated delta rule.

    Args:
        q: `[B, T, H, K]`.
        k: `[B, T, H, K]`, of unit length, or the state may grow without bound.
        v: `[B, T, H, V]`, times the write gate.
        log_decay: `[B, T, H, K]` float32 (float64 for float64 inputs), at most 0.
        erase: `[B, T, H, K]`, the erase gate e: 0 to 1, to 2 with negative eigenvalues.
        scale: factor on the outputs; None is `K ** -0.5`.
        initial_state: `[rows, H, K, V]`, rows = B or the number of documents; None for zeros.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference" or "fla", the kernels of fla-core.

    Returns:
        `o [B, T, H, V]` in the dtype of `v`, or of autocast if it is on, and the final state `[rows, H, K, V]` in
        float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is not installed.
    """
    q, k, v, erase = autocast_cast(q, k, v, erase)
    keys = {f"{name} [B, T, H, K] same": t for name, t in (("q", q), ("k", k), ("erase", erase))}
    keys |= {"log_decay [B, T, H, K] wide": log_decay, "v [B, T, H, V] same": v}
    keys |= {"initial_state [rows, H, K, V]": initial_state}
    check_sequences(keys, cu_seqlens)
    scale = default_scale(scale, q)
    return GATED_DELTA_RULE2.run(backend, q, k, v, log_decay, erase, scale, initial_state, cu_seqlens)


def gated_delta_rule2_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, *rest: Any
) -> Recurred:
    """As `gated_delta_rule2`: RWKV-7's recurrence that looks up `-erase * k` in the decayed state and adds along k."""
    with torch.autocast(q.device.type, enabled=False):
        lookup = -log_decay.exp() * at_least_float32(erase) * at_least_float32(k)
    return rwkv7_reference(q, k, v, log_decay, lookup, k, *rest)


@torch.compiler.disable()
def _fla(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, scale: float, state: Any, cu_seqlens: Any
) -> Recurred:
    """Run fla's kernels (fla-core 0.6), whose write gate is one here. One token without gradients takes a step."""
    options: dict[str, Any] = {"q": q, "k": k, "v": v, "g": log_decay, "b": erase, "w": torch.ones_like(v)}
    step = q.shape[1] == 1 and not is_tracked(q, k, v, log_decay, erase, state)
    return fla_recurrence("gdn2", scale=scale, step=step, initial_state=state, cu_seqlens=cu_seqlens, **options)


GATED_DELTA_RULE2 = Op(
    "gated_delta_rule2", gated_delta_rule2_reference, (Backend("fla", _fla, "fla", obstacle=wide_keys),), fuses=True
)
