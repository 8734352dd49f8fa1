"""Ops applied to each of the documents that are packed into one row."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.tensors import Recurred, all_documents


def documents(cu_seqlens: Tensor, length: int) -> list[tuple[int, int]]:
    """(start, stop) of each document that is not empty; reads `cu_seqlens` on the host."""
    return [(start, stop) for start, stop in all_documents(cu_seqlens, length) if start < stop]


def complete_chunks(cu_seqlens: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """The chunks of `size` tokens from the start of each document on, without a shorter one at its end.

    Nothing is read on the host.

    Args:
        cu_seqlens: `[N + 1]` borders of the documents.
        size: tokens of a chunk.
        length: tokens of the row.

    Returns:
        The first chunk of each document, `[N + 1]`. And the first token of each, `[length // size]`; `length` where
        there is no chunk. Both are int32.
    """
    chunks = cu_seqlens.diff() // size
    first = F.pad(chunks.cumsum(0, dtype=torch.int32), (1, 0))
    chunk = torch.arange(length // size, device=cu_seqlens.device, dtype=torch.int32)
    # in all of `first`, since Inductor of torch 2.11 cannot search in a slice
    document = (torch.searchsorted(first, chunk, right=True, out_int32=True) - 1).clamp_max(chunks.shape[0] - 1)
    starts = cu_seqlens[document] + (chunk - first[document]) * size
    return first, torch.where(chunk < first[-1], starts, length).to(torch.int32)


def per_document(op: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], cu_seqlens: Tensor) -> Tensor:
    """Apply `op` to each document of `tensors [1, T, ...]` and join the results: nothing crosses a border.

    A tensor that is shorter than the longest holds the last tokens of the row. A document of which it has none is left
    out.
    """
    lengths = [t.shape[1] for t in tensors if t is not None]
    row, first = max(lengths), max(lengths) - min(lengths)

    def part(t: Tensor | None, start: int, stop: int) -> Tensor | None:
        return None if t is None else t[:, max(start + t.shape[1] - row, 0) : stop + t.shape[1] - row]

    inside = [(start, stop) for start, stop in documents(cu_seqlens, row) if stop > first]
    return torch.cat([op(*(part(t, *each) for t in tensors)) for each in inside], dim=1)


State = Tensor | tuple[Tensor, ...]
"""The state of a recurrence: one tensor `[N, ...]` or several."""
Recurrence = Callable[..., tuple[Tensor, Any]]
"""`op(*tensors, initial_state) -> (outputs [B, T, ...], final state)`."""


def each_document(
    op: Recurrence, tensors: Sequence[Tensor | None], initial_state: State | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Any]:
    """Apply a recurrence to each document of `tensors [1, T, ...]`; reads `cu_seqlens` on the host.

    Args:
        op: the recurrence, for rows that are one document each.
        tensors: its arguments along T.
        initial_state: `[N, ...]`, a state for each document, or None for zeros.
        cu_seqlens: `[N + 1]` borders of the documents, an empty one keeps its initial state; None where every row of
            `tensors [B, T, ...]` is one document.

    Returns:
        Outputs `[1, T, ...]` and final states `[N, ...]`.
    """
    if cu_seqlens is None:
        return op(*tensors, initial_state)
    length = next(t.shape[1] for t in tensors if t is not None)
    outputs: list[Tensor] = []
    states: list[State | None] = []
    for index, (start, stop) in enumerate(all_documents(cu_seqlens, length)):
        state = None if initial_state is None else _of_all(lambda t, n=index: t[n : n + 1], initial_state)
        if start < stop:
            output, state = op(*(None if t is None else t[:, start:stop] for t in tensors), state)
            outputs.append(output)
        states.append(state)
    zeros = _of_all(torch.zeros_like, next(state for state in states if state is not None))
    known = (zeros if state is None else state for state in states)
    return torch.cat(outputs, dim=1), _of_all(lambda *each: torch.cat(each), *known)


def recur(
    forms: Sequence[Recurrence],
    tensors: Sequence[Tensor | None],
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Recurred:
    """The reference of a recurrence: `each_document` at least in float32, outputs times `scale` as the first tensor.

    Args:
        forms: the recurrence in steps, which single tokens take, and in chunks.
        tensors: its arguments along T.
        scale: factor on the outputs.
        initial_state: see `each_document`.
        cu_seqlens: see `each_document`.
    """
    first: Any = tensors[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    with torch.autocast(first.device.type, enabled=False):
        given = [None if t is None else t.to(wide) for t in tensors]
        form = forms[1] if first.shape[1] > 1 else forms[0]  # torch.compile 2.10 takes no bool as an index
        o, state = each_document(form, given, initial_state, cu_seqlens)
        return (scale * o).to(first.dtype), state


def _of_all(function: Callable[..., Tensor], *states: Any) -> Any:
    """Apply `function` to the tensors that have the same place in each state."""
    if isinstance(states[0], Tensor):
        return function(*states)
    return tuple(function(*tensors) for tensors in zip(*states, strict=True))
