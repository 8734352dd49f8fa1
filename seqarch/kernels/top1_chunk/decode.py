"""The public op for decoding with Top-1 chunk attention: checks, dispatch and the reference."""

from typing import Any

import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.blocks import sdpa
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.tensors import autocast_cast, check_decode, default_scale
from seqarch.kernels.top1_chunk import op


def top1_chunk_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    chunk_size: int = op.CHUNK_SIZE,
    selection: op.Selection = "exact",
    scale: float | None = None,
    chunk_means: Tensor | None = None,
    remote_chunks: int = 1,
    backend: str = "auto",
) -> Tensor:
    """Top-1 chunk attention of one new token per sequence to cached keys (arXiv 2505.18522, section 5).

    This is `top1_chunk_attention` of the last of `lengths[b]` positions, for sequences of different lengths at once.
    The cache is not read beyond a length. No gradient.

    Args:
        q: `[B, 1, H, D]`, the queries of the last tokens.
        k_cache: `[B, capacity, HK, D]`, `HK` a divisor of `H`: query head h uses key head `h // (H / HK)`. The key of
            the last token is at `lengths[b] - 1`.
        v_cache: as `k_cache`.
        lengths: `[B]` int32, tokens of each sequence with the last: from 1 to the capacity. Kernels read no further.
        chunk_size: keys per chunk.
        selection: "exact" compares attention masses and reads all keys; "approx" reads `chunk_means` instead.
        scale: factor on the scores; None is `D ** -0.5`.
        chunk_means: `[B, N, HK, D]` with `N >= (capacity - 1) // chunk_size`, float32 or the dtype of the keys: mean
            keys of the chunks before the last token's own. Needed only for "approx".
        remote_chunks: chunks that a query selects; the kernels take at most 8.
        backend: "auto", "reference" or "triton" (chunks of 16 to 256 keys, a power of two, of at most 64 KiB).

    Returns:
        `[B, 1, H, D]` in the dtype of `q`, or of autocast if it is on.

    Raises:
        UserError: shapes, dtypes or options that do not fit together, or tensors that ask for gradients.
    """
    q, k_cache, v_cache = autocast_cast(q, k_cache, v_cache)
    check_decode(q, k_cache, v_cache, lengths)
    op.check_selection(chunk_size, selection, remote_chunks)
    if selection == "approx" and chunk_means is None:
        raise UserError("selection='approx' needs chunk_means, the stored mean keys of the complete chunks")
    op.check_chunk_means(chunk_means, k_cache, chunk_size, selection)
    options = chunk_size, default_scale(scale, q), chunk_means, remote_chunks  # chunk_means say that it is "approx"
    return TOP1_CHUNK_DECODE.run(backend, q, k_cache, v_cache, lengths, *options)


def _reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    chunk_size: int,
    scale: float,
    chunk_means: Tensor | None,
    remote_chunks: int,
) -> Tensor:
    """As `top1_chunk_decode`. With one remote chunk, sequences of one length run together: their keys are a slice."""
    if remote_chunks > 1:
        return _static(q, k_cache, v_cache, lengths, chunk_size, scale, chunk_means, remote_chunks)
    selection = "exact" if chunk_means is None else "approx"
    distinct: list[int] = lengths.unique().tolist()
    if any(not 1 <= length <= k_cache.shape[1] for length in distinct):
        raise UserError(f"lengths must lie from 1 to the capacity {k_cache.shape[1]}, not {lengths.tolist()}")
    o = torch.empty_like(q)
    for length in distinct:
        # A slice if all have one length: indices would copy the cache.
        rows = slice(None) if len(distinct) == 1 else (lengths == length).nonzero().squeeze(1)
        k, v = k_cache[rows, :length], v_cache[rows, :length]
        means = None if chunk_means is None else chunk_means[rows]
        chunks = op.select_chunks_reference(q[rows], k, chunk_size, selection, scale, means)
        o[rows] = op.top1_chunk_attention_reference(q[rows], k, v, chunks, chunk_size, scale)
    return o


def _static(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *options: Any) -> Tensor:
    """As `_reference`, with a mask over the whole cache. It reads nothing on the host. On a GPU it serves K above 8."""
    chunk_size, scale, chunk_means, remote_chunks = options
    places, last = torch.arange(k.shape[1], device=q.device), lengths.long() - 1
    unseen = (places > last.unsqueeze(1))[:, :, None, None]
    k, v, last = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0), last.view(-1, 1, 1, 1)
    mass = op.chunk_masses(q, k, chunk_means, k.shape[1] // chunk_size, chunk_size, scale)
    chunks = op.heaviest_chunks(last // chunk_size, mass, remote_chunks)
    return sdpa(q, k, v, scale, op.top1_chunk_mask(last, places, chunks, chunk_size))


def _obstacle(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, chunk_size: int, *options: Any
) -> str | None:
    return op.chunk_obstacle(q, chunk_size, options[-1])


TOP1_CHUNK_DECODE = Op(
    "top1_chunk_decode",
    _reference,
    (Backend("triton", "seqarch.kernels.top1_chunk.triton_decode:decode", "triton", obstacle=_obstacle),),
)
