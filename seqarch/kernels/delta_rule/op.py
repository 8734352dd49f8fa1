"""The public delta rule: checks and dispatch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.common import autocast_cast, check_packed, default_scale
from seqarch.kernels.delta_rule.reference import delta_rule_chunked, delta_rule_recurrent
from seqarch.kernels.recurrent import check_initial_state, check_sequences, choose_backend, each_document

DeltaRuleBackend = Literal["auto", "reference", "fla"]


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
    backend: DeltaRuleBackend = "auto",
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
        backend: "reference" is plain PyTorch; "fla" the kernels of flash-linear-attention, which need CUDA; "auto"
            takes fla on CUDA and the reference elsewhere.

    Returns:
        `o [B, T, H, V]` in the dtype of `q` (of autocast, where it is on), and the final state `[N, H, K, V]` in
        float32 (float64 for float64 inputs).

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is not installed.
    """
    q, k, v = autocast_cast(q, k, v)
    _check(q, k, v, beta, log_decay, initial_state, cu_seqlens)
    scale = default_scale(scale, q)
    if choose_backend(backend, q.device, {"fla": "fla"}, order=("fla",)) == "fla":
        from seqarch.kernels.delta_rule.fla import delta_rule_fla

        return delta_rule_fla(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens)

    def run(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        step = delta_rule_recurrent if q.shape[1] == 1 else delta_rule_chunked
        return step(q, k, v, beta, log_decay, state, scale)

    if cu_seqlens is None:
        return run(q, k, v, beta, log_decay, initial_state)
    return each_document(run, (q, k, v, beta, log_decay), initial_state, cu_seqlens)


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
