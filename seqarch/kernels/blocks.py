"""Scores of queries and keys in blocks of queries, which keep the memory of the references linear in T."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqarch.kernels.packed import per_document
from seqarch.kernels.tensors import at_least_float32

SCORE_BYTES = 32 * 2**20
"""Size of one block of scores in the references: large enough for few Python iterations, small enough to stay cheap.
On a GPU, where a launch costs more and memory is larger, blocks are 16 times as large."""


def query_blocks(q: Tensor, k: Tensor, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of queries whose scores against all keys take at most SCORE_BYTES in float32.

    Blocks hold a multiple of `multiple` queries, so that a chunk is not cut needlessly.
    """
    row_bytes = 4 * q.shape[0] * q.shape[2] * k.shape[1]
    budget = SCORE_BYTES if q.device.type == "cpu" else 16 * SCORE_BYTES
    size = max(budget // max(row_bytes, 1), 16)
    size = max(size // multiple, 1) * multiple
    for start in range(0, q.shape[1], size):
        yield start, min(start + size, q.shape[1])


def over_query_blocks(
    op: Callable[..., Tensor],
    q: Tensor,
    kv: tuple[Tensor, ...],
    per_query: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    multiple: int = 1,
    **options: Any,
) -> Tensor:
    """Run `op(start, q, *kv[, per_query], **options)` over query blocks and join the results along T.

    With `cu_seqlens` each packed document has blocks and positions of its own.
    A block gets the keys up to its last query; `start` is the position of its first query. With more than one block,
    the backward pass computes each block again instead of keeping its scores: memory is linear in T.
    """
    if cu_seqlens is not None:
        run = partial(over_query_blocks, op, multiple=multiple, **options)
        return per_document(lambda q, each, *kv: run(q, kv, each), (q, per_query, *kv), cu_seqlens)
    blocks = list(query_blocks(q, kv[0], multiple))
    offset = kv[0].shape[1] - q.shape[1]
    results = []
    for start, stop in blocks:
        seen = offset + stop
        args = [offset + start, q[:, start:stop], *(t[:, :seen] for t in kv)]
        if per_query is not None:
            args.append(per_query[:, start:stop])
        if len(blocks) > 1 and torch.is_grad_enabled():
            results.append(checkpoint(op, *args, use_reentrant=False, preserve_rng_state=False, **options))
        else:
            results.append(op(*args, **options))
    return results[0] if len(results) == 1 else torch.cat(results, dim=1)


def expand_heads(t: Tensor, heads: int) -> Tensor:
    """`[B, T, HK, D]` to `[B, T, H, D]`: query head h uses key/value head h // (H / HK)."""
    return t if t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], dim=2)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`scale * q k^T` as `[B, H, Tq, Tk]`, in float32 or float64, also under autocast."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = at_least_float32(q), at_least_float32(expand_heads(k, q.shape[2]))
        # scaled after the product: half-precision operands stay exact where the product runs in TF32
        return q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale


def positions(start: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the queries `[Tq, 1]`, the first at `start`, and of the keys `[1, Tk]`."""
    i = torch.arange(start, start + q.shape[1], device=q.device).unsqueeze(1)
    return i, torch.arange(k.shape[1], device=q.device).unsqueeze(0)


def causal_mask(i: Tensor, j: Tensor, window: int | None = None) -> Tensor:
    """Which keys `j` a query `i` sees: the past and itself, of these the last `window`."""
    mask = j <= i
    return mask if window is None else mask & (i - j < window)


def alibi_bias(i: Tensor, j: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi (arXiv 2108.12409): `-slope * distance`, `[H, Tq, Tk]`."""
    return slopes.view(-1, 1, 1) * (j - i)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """`F.scaled_dot_product_attention` for `[B, T, H, D]`."""
    same = q.shape[2] == k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=not same)
    return o.transpose(1, 2)
