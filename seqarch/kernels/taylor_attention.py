"""Taylor linear attention: checks, references in plain PyTorch and fla's kernel."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.chunks import join_chunks, split_chunks
from seqarch.kernels.fla_tuning import fla_recurrence
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, autocast_cast, check_sequences, default_scale, state_or_zeros

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
    shapes = {"q [B, T, H, K] same": q, "k [B, T, H, K] same": k, "v [B, T, H, V] same": v}
    sizes: dict[str, Any] = {"1 + K + K (K + 1) / 2": n_features(q.shape[-1]), "V + 1": v.shape[-1] + 1}
    shapes |= {f"initial_state [rows, H, {', '.join(sizes)}]": initial_state}
    check_sequences(shapes, cu_seqlens, **sizes)
    args = q, k, v, default_scale(scale, q), initial_state, cu_seqlens
    run = TAYLOR_LINEAR_ATTENTION.choose(backend, *args)
    return (taylor_reference if q.shape[1] == 1 and cu_seqlens is None else run)(*args)


CHUNK_SIZE = 64


def taylor_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> Recurred:
    step = taylor_recurrent if q.shape[1] == 1 and cu_seqlens is None else taylor_chunked
    return each_document(functools.partial(step, scale=scale), (q, k, v), initial_state, cu_seqlens)


def taylor_features(x: Tensor, scale: float = 1.0) -> Tensor:
    """`[..., K]` to `[..., 1 + K + K (K + 1) / 2]` with `f(q) . f(k) = 1 + s + s^2 / 2`, `s = scale * q . k`.

    Each pair of elements appears once: an element is multiplied with those 1, 2, ... places after it, in a circle.
    """
    x = x * scale**0.5
    K = x.shape[-1]
    pairs = [x * x.roll(-distance, dims=-1) for distance in range(1, (K - 1) // 2 + 1)]
    if K % 2 == 0:
        pairs.append(x[..., : K // 2] * x[..., K // 2 :])
    return torch.cat((torch.ones_like(x[..., :1]), x, x * x * 0.5**0.5, *pairs), dim=-1)


def n_features(K: int) -> int:
    """Number of features of `taylor_features`."""
    return 1 + K + K * (K + 1) // 2


def taylor_recurrent(q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, scale: float) -> Recurred:
    """One step per token; the definition. Arguments as in `taylor_linear_attention`, without packed documents."""
    dtype = q.dtype
    state = _initial(initial_state, q, v)
    queries, keys = (taylor_features(t.to(state.dtype), scale) for t in (q, k))
    values = with_ones(v.to(state.dtype))
    outputs = []
    for t in range(q.shape[1]):
        state = state + keys[:, t, :, :, None] * values[:, t, :, None, :]
        outputs.append((queries[:, t, :, :, None] * state).sum(dim=2))
    return normalised(torch.stack(outputs, dim=1), v.shape[-1]).to(dtype), state


def taylor_chunked(q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, scale: float) -> Recurred:
    """Taylor attention in chunks: scores within a chunk, features and states between chunks."""
    with torch.autocast(q.device.type, enabled=False):
        dtype, length = q.dtype, q.shape[1]
        state = _initial(initial_state, q, v)
        size = min(length, CHUNK_SIZE)
        q, k = (split_chunks(t.to(state.dtype), size) for t in (q, k))
        values = split_chunks(with_ones(v.to(state.dtype)), size)  # padded values are zero, so padded keys do not count
        s = (q @ k.mT) * scale
        weights = (1 + s + 0.5 * s.square()).tril()
        written = taylor_features(k, scale).mT @ values
        states = torch.cat((state[:, :, None], written), dim=2).cumsum(dim=2)
        o = weights @ values + taylor_features(q, scale) @ states[:, :, :-1]
        # A copy: a view would keep the states of all chunks in memory.
        return normalised(join_chunks(o, length), v.shape[-1]).to(dtype), states[:, :, -1].clone()


def with_ones(v: Tensor) -> Tensor:
    """Values with a column of ones, whose sum is the normaliser."""
    return F.pad(v, (0, 1), value=1.0)


def normalised(o: Tensor, V: int) -> Tensor:
    """Weighted sums of `with_ones` values over their normaliser, which is at least half the number of keys."""
    return o[..., :V] / o[..., V : V + 1]


def _initial(initial_state: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    B, _, H, K = q.shape
    return state_or_zeros(initial_state, q, B, H, n_features(K), v.shape[3] + 1)


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


TAYLOR_LINEAR_ATTENTION = Op("taylor_linear_attention", taylor_reference, (Backend("fla", _fla, "fla"),), fuses=True)
