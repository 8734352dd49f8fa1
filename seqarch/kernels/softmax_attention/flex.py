"""Runs windows, ALiBi and packed documents through FlexAttention. Block masks are made without a T x T mask."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

MASK_BLOCK = 128


def flex_softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    Tq, Tk = q.shape[1], k.shape[1]
    starts = first_visible(Tq, Tk, window, cu_seqlens, q.device)
    score_mod = None if slopes is None else alibi_score(slopes, Tk - Tq)
    return flex_attend(q, k, v, scale, banded_block_mask(starts, Tk), score_mod)


def flex_attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, block_mask: BlockMask, score_mod: Callable[..., Tensor] | None = None
) -> Tensor:
    """FlexAttention on `[B, T, H, D]`, compiled by itself or as a part of the graph that is being compiled."""
    attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    shares = q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o: Any = attend(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=shares)
    return o.transpose(1, 2)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def first_visible(Tq: int, Tk: int, window: int | None, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """`[Tq]` int32: the first key position each query sees; it never falls from one query to the next."""
    i = torch.arange(Tk - Tq, Tk, device=device, dtype=torch.int32)
    first = torch.zeros_like(i) if window is None else (i - window + 1).clamp_min(0)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens, i, right=True) - 1
        first = torch.maximum(first, cu_seqlens[document])
    return first


def alibi_score(slopes: Tensor, offset: int) -> Callable[..., Tensor]:
    """The score modification of ALiBi for queries that start at position `offset`."""
    slopes = slopes.detach().float()

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i + offset - j)

    return score_mod


def banded_block_mask(first: Tensor, Tk: int) -> BlockMask:
    """The mask "query i sees keys `first[i]` to its own position".

    `first` never falls. So each row of blocks is one run of visible blocks, with a run of full blocks inside. The mask
    follows by arithmetic on `[Tq / 128]` numbers.
    """
    Tq = first.shape[0]
    offset = Tk - Tq
    top, bottom, run_start, run_stop = _visible_runs(first, Tk)
    columns = -(-Tk // MASK_BLOCK)
    full_start = (first[bottom] + MASK_BLOCK - 1) // MASK_BLOCK
    full_stop = torch.maximum((top + offset + 1) // MASK_BLOCK, full_start)
    r = torch.arange(columns, device=first.device, dtype=torch.int32).unsqueeze(0)
    before = (full_start - run_start).unsqueeze(1)
    partial = torch.where(r < before, run_start.unsqueeze(1) + r, full_stop.unsqueeze(1) + r - before)
    full = full_start.unsqueeze(1) + r
    full_count = full_stop - full_start

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + offset) & (j >= first[i])

    return _block_mask((Tq, Tk), mask_mod, (run_stop - run_start - full_count, partial), (full_count, full))


def partial_block_mask(first: Tensor, Tk: int, mask_mod: Callable[..., Tensor]) -> BlockMask:
    """The mask `mask_mod`, which hides at least all keys outside `first[i]` to a query's own position.

    As `banded_block_mask`, but no block counts as full: `mask_mod` decides about each key of the visible blocks.
    """
    _, _, run_start, run_stop = _visible_runs(first, Tk)
    r = torch.arange(-(-Tk // MASK_BLOCK), device=first.device, dtype=torch.int32)
    return _block_mask((first.shape[0], Tk), mask_mod, (run_stop - run_start, run_start.unsqueeze(1) + r))


def _block_mask(lengths: tuple[int, int], mask_mod: Callable[..., Tensor], *kinds: tuple[Tensor, Tensor]) -> BlockMask:
    """A block mask from the number and the columns of visible blocks per row: partial blocks, then full blocks."""
    blocks = []
    for count, columns in kinds:
        blocks += [count[None, None], columns.clamp_max(columns.shape[1] - 1)[None, None].contiguous()]
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=MASK_BLOCK, mask_mod=mask_mod, seq_lengths=lengths)


def _visible_runs(first: Tensor, Tk: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each row of blocks: first and last query, first visible block, and the block after the last visible one."""
    Tq = first.shape[0]
    top = torch.arange(-(-Tq // MASK_BLOCK), device=first.device, dtype=torch.int32) * MASK_BLOCK
    bottom = (top + MASK_BLOCK - 1).clamp_max(Tq - 1)
    return top, bottom, first[top] // MASK_BLOCK, (bottom + Tk - Tq) // MASK_BLOCK + 1
