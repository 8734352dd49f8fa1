"""The integer tables that the Triton kernels walk: where chunks lie, and which queries selected each chunk."""

from typing import NamedTuple

import torch
from torch import Tensor

from seqarch.kernels.triton_documents import cut_into_pieces, pieces_of_tokens


class Layout(NamedTuple):
    """Chunks of all documents in order. A *slot* is the index of a chunk in that order."""

    slots: int
    """Slots of the tables; at most a few at the end are empty."""
    starts: Tensor | None = None
    """`[slots + 1]` int32: first key of each slot; the slot ends where the next one starts. None without documents:
    slot s starts at s * chunk_size."""
    own: Tensor | None = None
    """`[Tk]` int32: the slot of each position. None without documents."""
    first: Tensor | None = None
    """`[Tk]` int32: the first slot of each position's document. None without documents."""


def chunk_layout(length: int, chunk_size: int, cu_seqlens: Tensor | None) -> Layout:
    """The slots of `length` keys; each document of `cu_seqlens` starts a new one. Nothing is read on the host."""
    if cu_seqlens is None:
        return Layout(-(-length // chunk_size))
    pieces = cut_into_pieces(cu_seqlens, chunk_size, length, more=1)
    own, first = pieces_of_tokens(cu_seqlens, pieces, chunk_size, length)
    return Layout(len(pieces.begins) - 1, pieces.begins, own, first)


class Buckets(NamedTuple):
    """Entries sorted by chunk. An *entry* is a query and one of the K chunks it selected, a *segment* one slot of one
    key head of one sequence."""

    order: Tensor
    """`[K * B * H * Tq]` int32: indices into `[K, B, H, Tq]`, sorted by segment; without a remote chunk: last."""
    offsets: Tensor
    """`[segments + 1]` int32: where each segment starts in `order`."""


def bucket_queries(keys: Tensor, segments: int) -> Buckets:
    """Sort entries by segment, `keys [K * B * H * Tq]`; the sort is stable, so all that follows is deterministic."""
    keys, order = keys.sort(stable=True)
    borders = torch.arange(segments + 1, device=keys.device, dtype=keys.dtype)
    return Buckets(order.to(torch.int32), torch.searchsorted(keys, borders, out_int32=True))


def tiles(offsets: Tensor, size: int, queries: int, *, full: bool = False) -> tuple[Tensor, Tensor]:
    """Cut every segment into tiles of at most `size` queries.

    With `full`, cut segments of at least `2 * size` queries into tiles of at least `size`, and leave out the others.

    Returns:
        The segment of each tile, or `segments` if there is no such tile; its length is the largest possible number of
        tiles for `queries` queries. And the first tile of each segment, `[segments + 1]`. Both are int32.
    """
    count, most = offsets.diff(), queries // size
    if full:
        count = torch.where(count >= 2 * size, count // size, 0)
    else:
        count, most = (count + size - 1) // size, most + len(count)
    stop = count.cumsum(0, dtype=torch.int32)
    index = torch.arange(most, device=offsets.device, dtype=torch.int32)
    segment = torch.searchsorted(stop, index, right=True, out_int32=True)
    return segment, torch.cat([stop.new_zeros(1), stop])
