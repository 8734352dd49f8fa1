"""Taylor linear attention in plain PyTorch: one step per token, and in chunks with matrix products."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.chunks import join_chunks, split_chunks
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import Recurred, state_or_zeros

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
