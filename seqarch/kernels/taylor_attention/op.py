"""The public Taylor linear attention: checks and dispatch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqarch.kernels import inputs
from seqarch.kernels.checks import check_initial_state, check_packed, check_sequences, default_scale
from seqarch.kernels.op import FLA, Backend, Op
from seqarch.kernels.taylor_attention.reference import n_features, taylor_reference
from seqarch.kernels.tensors import autocast_cast


def taylor_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
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
        backend: "auto", "reference" or "fla", the kernel of fla-core for linear attention.

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
    args = q, k, v, default_scale(scale, q), initial_state, cu_seqlens
    run = TAYLOR_LINEAR_ATTENTION.choose(backend, *args)
    return (taylor_reference if q.shape[1] == 1 and cu_seqlens is None else run)(*args)


def _fla(*args: Any) -> tuple[Tensor, Tensor]:
    from seqarch.kernels.taylor_attention.fla import taylor_fla

    return taylor_fla(*args)


TAYLOR_LINEAR_ATTENTION = Op(
    "taylor_linear_attention",
    taylor_reference,
    (Backend("fla", _fla, "fla"),),
    inputs=inputs.taylor,
    tolerance=FLA,
    fuses=True,
)
