"""The public Taylor linear attention: checks, fla's kernel and dispatch."""

import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels import inputs
from seqarch.kernels.checks import check_dtypes, check_sequences, default_scale
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import FLA, Backend, Op
from seqarch.kernels.taylor_attention.reference import (
    n_features,
    normalised,
    taylor_features,
    taylor_reference,
    with_ones,
)
from seqarch.kernels.tensors import Recurred, autocast_cast

ALIGNMENT = 16
"""For fla, values get this number of further columns; one of them holds the ones. Features are padded to a multiple of
it. Rows then stay aligned for wide loads, and the kernels meet no odd sizes."""


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
    (`taylor_features`), so a state of fixed size replaces the keys and values. Every backend computes a
    single token in plain PyTorch.

    Args:
        q: `[B, T, H, K]`; K is small (16 in the paper), the state grows with its square.
        k: `[B, T, H, K]`.
        v: `[B, T, H, V]`.
        scale: factor on the scores; None is `K ** -0.5`.
        initial_state: `[rows, H, 1 + K + K (K + 1) / 2, V + 1]`, rows = B or the number of documents; None for zeros.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row (B = 1); the state restarts at each.
        backend: "auto", "reference" or "fla", the kernel of fla-core for linear attention.

    Returns:
        `o [B, T, H, V]` in the dtype of `q`, or of autocast if it is on, and the final state in float32 (float64 for
        float64 inputs): features of the keys times values; the last column is the normaliser.

    Raises:
        UserError: shapes, dtypes or options that do not fit together; a backend that is not installed.
    """
    q, k, v = autocast_cast(q, k, v)
    shapes = {"q [B, T, H, K]": q, "k [B, T, H, K]": k, "v [B, T, H, V]": v}
    sizes = {"1 + K + K (K + 1) / 2": n_features(q.shape[-1]), "V + 1": v.shape[-1] + 1}
    check_sequences({**shapes, f"initial_state [rows, H, {', '.join(sizes)}]": initial_state}, cu_seqlens, **sizes)
    check_dtypes(q=q, k=k, v=v)
    args = q, k, v, default_scale(scale, q), initial_state, cu_seqlens
    run = TAYLOR_LINEAR_ATTENTION.choose(backend, *args)
    return (taylor_reference if q.shape[1] == 1 and cu_seqlens is None else run)(*args)


def _fla(q: Tensor, k: Tensor, v: Tensor, scale: float, state: Tensor | None, cu_seqlens: Tensor | None) -> Recurred:
    """Explicit features through fla's kernel for linear attention (fla-core 0.6).

    fla's own kernels for Based (`parallel_based`, `fused_chunk_based`) have neither a state nor packed documents, and
    the first is quadratic in T.
    """
    V = v.shape[-1]
    values = F.pad(with_ones(v), (0, ALIGNMENT - 1))
    # Features of float32: a feature is a product of two elements and would be rounded twice otherwise.
    queries, keys = (taylor_features(t.float(), scale) for t in (q, k))
    size = queries.shape[-1]
    missing = -size % ALIGNMENT
    queries, keys = (F.pad(t, (0, missing)).to(q.dtype) for t in (queries, keys))
    if state is not None:
        state = F.pad(state, (0, ALIGNMENT - 1, 0, missing))
    o, final = fla_recurrence(
        "simple_gla", q=queries, k=keys, v=values, scale=1.0, initial_state=state, cu_seqlens=cu_seqlens
    )
    return normalised(o.float(), V).to(q.dtype), final[..., :size, : V + 1].contiguous()


TAYLOR_LINEAR_ATTENTION = Op(
    "taylor_linear_attention",
    taylor_reference,
    (Backend("fla", _fla, "fla"),),
    inputs=inputs.taylor,
    tolerance=FLA,
    fuses=True,
)
