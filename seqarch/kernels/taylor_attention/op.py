"""The public Taylor linear attention: checks and dispatch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from seqarch.kernels.common import autocast_cast, check_packed, default_scale
from seqarch.kernels.recurrent import check_initial_state, check_sequences, choose_backend, each_document
from seqarch.kernels.taylor_attention.reference import n_features, taylor_chunked, taylor_recurrent

TaylorBackend = Literal["auto", "reference", "fla"]


def taylor_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: TaylorBackend = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention with `1 + s + s^2 / 2` in place of `exp(s)`, `s = scale * q . k` (Based, arXiv 2402.18668).

    The weights are positive whatever s is, and are normalised to one. They are products of features of q and of k
    (`taylor_features`), so a state of fixed size replaces the keys and values. One token alone is a step of plain
    PyTorch with every backend.

    Args:
        q: `[B, T, H, K]`; K is small (16 in the paper), the state grows with its square.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        scale: factor on the scores; None is `K ** -0.5`.
        initial_state: `[N, H, 1 + K + K (K + 1) / 2, V + 1]`, N = B or the number of documents; None for zeros.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "reference" is plain PyTorch; "fla" the kernel of flash-linear-attention for linear attention, which
            needs CUDA; "auto" takes fla on CUDA and the reference elsewhere.

    Returns:
        `o [B, T, H, V]` in the dtype of `q` (of autocast, where it is on), and the final state in float32 (float64 for
        float64 inputs): features of the keys times values, in the last column the normaliser.

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is not installed.
    """
    q, k, v = autocast_cast(q, k, v)
    check_sequences({"q": q, "k": k}, v, ("q", "k"), ())
    check_packed(cu_seqlens, q)
    sizes = {"1 + K + K (K + 1) / 2": n_features(k.shape[3]), "V + 1": v.shape[3] + 1}
    check_initial_state(initial_state, k, cu_seqlens, sizes)
    scale = default_scale(scale, q)
    chosen = choose_backend(backend, q.device, {"fla": "fla"}, order=("fla",))
    if q.shape[1] == 1 and cu_seqlens is None:
        return taylor_recurrent(q, k, v, initial_state, scale)
    if chosen == "fla":
        from seqarch.kernels.taylor_attention.fla import taylor_fla

        return taylor_fla(q, k, v, initial_state, scale, cu_seqlens)
    if cu_seqlens is None:
        return taylor_chunked(q, k, v, initial_state, scale)

    def run(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return taylor_chunked(q, k, v, state, scale)

    return each_document(run, (q, k, v), initial_state, cu_seqlens)
