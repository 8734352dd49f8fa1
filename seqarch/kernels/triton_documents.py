"""Where documents that are packed into one row lie: integer tables for Triton kernels, each filled by one launch.

From PyTorch's ops, the tables of every layer and pass took about thirty launches, and the host was not fast enough.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Pieces, documents or positions that a program handles at once."""
ANY_NUMBER = ("N", "count", "length", "size")
"""Numbers that differ from batch to batch: no new code for those that 16 divides."""


class Pieces(NamedTuple):
    """Documents cut into pieces; a few at the end may be empty, at the last token. All are int32."""

    begins: Tensor
    """`[count]`: the first token of each piece."""
    ends: Tensor
    """`[count]`: one more than its last."""
    documents: Tensor
    """`[count]`: its document."""
    first: Tensor
    """`[N + 1]`: the first piece of each document, and the number of pieces."""


@triton.jit(do_not_specialize=ANY_NUMBER)
def piece_kernel(cu_seqlens, begins, ends, documents, first, N, count, length, size, BLOCK: tl.constexpr):
    """The pieces of one document; the last program fills the places that are left."""
    n, lane = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, n, BLOCK):
        border = cu_seqlens + begin + lane
        there = begin + lane < n
        tokens = tl.load(border + 1, mask=there, other=0) - tl.load(border, mask=there, other=0)
        before += (tokens + size - 1) // size
    piece = tl.sum(before, 0)
    tl.store(first + n, piece)
    is_document = n < N
    start = tl.load(cu_seqlens + n, mask=is_document, other=0)
    stop = tl.load(cu_seqlens + n + 1, mask=is_document, other=0)
    stop = tl.where(is_document, stop, length)
    start = tl.where(is_document, start, length)
    pieces = tl.where(is_document, (stop - start + size - 1) // size, count - piece)
    step = tl.where(is_document, size, 0)
    for begin in range(0, pieces, BLOCK):
        i = begin + lane
        there = (i < pieces) & (piece + i < count)
        tl.store(begins + piece + i, start + i * step, mask=there)
        tl.store(ends + piece + i, tl.minimum(start + i * step + step, stop), mask=there)
        tl.store(documents + piece + i, tl.zeros_like(i) + tl.minimum(n, N - 1), mask=there)


def cut_into_pieces(cu_seqlens: Tensor, size: int, length: int, *, more: int = 0) -> Pieces:
    """Pieces of at most `size` tokens of documents `cu_seqlens [N + 1]` in a row of `length`.

    There is room for all pieces that N documents can have, and for `more`. Nothing is read on the host.
    """
    documents = cu_seqlens.shape[0] - 1
    count = length // size + documents + more
    tables = Pieces(*(cu_seqlens.new_empty(count) for _ in range(3)), torch.empty_like(cu_seqlens))
    piece_kernel[(documents + 1,)](cu_seqlens, *tables, documents, count, length, size, BLOCK)
    return tables


@triton.jit(do_not_specialize=ANY_NUMBER)
def place_kernel(cu_seqlens, first, places, firsts, N, length, size, BLOCK: tl.constexpr):
    """The position of each token in its document; with `first`, its piece and the first piece of its document."""
    lane = tl.arange(0, BLOCK)
    t = tl.program_id(0) * BLOCK + lane
    document = tl.zeros([BLOCK], tl.int32)
    for begin in range(1, N, BLOCK):
        border = tl.load(cu_seqlens + begin + lane, mask=begin + lane < N, other=length)
        document += tl.sum((border[None, :] <= t[:, None]).to(tl.int32), 1)
    there = t < length
    place = t - tl.load(cu_seqlens + document, mask=there, other=0)
    if first is not None:
        piece = tl.load(first + document, mask=there, other=0)
        tl.store(firsts + t, piece, mask=there)
        place = piece + place // size
    tl.store(places + t, place, mask=there)


def positions_in_documents(cu_seqlens: Tensor, length: int) -> Tensor:
    """`[length]` int32: the position of each token of a row in its document."""
    positions = cu_seqlens.new_empty(length)
    _place(cu_seqlens, None, positions, None, length, 1)
    return positions


def pieces_of_tokens(cu_seqlens: Tensor, pieces: Pieces, size: int, length: int) -> tuple[Tensor, Tensor]:
    """For each token of a row its piece and the first piece of its document, both `[length]` int32."""
    own, first = cu_seqlens.new_empty(length), cu_seqlens.new_empty(length)
    _place(cu_seqlens, pieces.first, own, first, length, size)
    return own, first


def _place(
    cu_seqlens: Tensor, first: Tensor | None, places: Tensor, firsts: Tensor | None, length: int, size: int
) -> None:
    grid = (triton.cdiv(length, BLOCK),)
    place_kernel[grid](cu_seqlens, first, places, firsts, cu_seqlens.shape[0] - 1, length, size, BLOCK)
