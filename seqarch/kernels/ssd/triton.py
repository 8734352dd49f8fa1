"""The recurrence of Mamba-2 on Triton: the launches, registered as operators so that torch.compile sees them whole."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from seqarch.kernels.launch import gradient_of, operator, padded, precision, token_rows
from seqarch.kernels.packed import cut_documents
from seqarch.kernels.ssd.op import scaled_inputs
from seqarch.kernels.ssd.triton_chunks import (
    input_gradient_kernel,
    output_kernel,
    projection_gradient_kernel,
    state_kernel,
)

ENOUGH_PROGRAMS = 512
"""Programs that keep a GPU busy. With fewer chunks, several programs share the heads of a group."""


class Chunks(NamedTuple):
    """Where the chunks of all rows or documents lie."""

    size: int
    count: int
    documents: int
    length: int
    """Tokens per row, without documents."""
    cu_seqlens: Tensor | None = None
    first: Tensor | None = None
    """`[documents + 1]`: number of the first chunk of each document."""
    starts: Tensor | None = None
    """`[count]`: first token of each chunk; a few chunks at the end may be empty."""
    stops: Tensor | None = None


def chunks_of(x: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    """The chunks of `x [B, T, ...]`; nothing is read on the host."""
    size = 32 if x.dtype == torch.float32 else 64
    batch, length = x.shape[:2]
    if cu_seqlens is None:
        return Chunks(size, batch * triton.cdiv(length, size), batch, length)
    documents = cu_seqlens.shape[0] - 1
    count = length // size + documents
    first, document, starts = cut_documents(cu_seqlens, size, count, length)
    stops = torch.minimum(starts + size, cu_seqlens[document + 1])
    return Chunks(size, count, documents, length, cu_seqlens, first, starts, stops)


class Shapes(NamedTuple):
    """Arguments of all launches: sizes, blocks, flags."""

    H: int
    R: int
    N: int
    P: int
    BN: int
    BP: int
    precision: str


def _shapes(x: Tensor, B: Tensor) -> Shapes:
    heads, width = x.shape[2:]
    groups, size = B.shape[2:]
    block_n, block_p = (padded(n) for n in (size, width))
    return Shapes(heads, heads // groups, size, width, block_n, block_p, precision(x))


def _heads_of_a_program(chunks: Chunks, shapes: Shapes) -> int:
    """Heads that one program takes, a divisor of R; the whole group if there are enough programs."""
    heads = shapes.R
    while heads > 1 and chunks.count * (shapes.H // heads) < ENOUGH_PROGRAMS:
        heads = next(n for n in range(heads - 1, 0, -1) if shapes.R % n == 0)
    return heads


def _decay_strides(log_decay: Tensor | None) -> tuple[int, int]:
    if log_decay is None:
        return 0, 0
    return log_decay.shape[2], int(log_decay.shape[2] > 1)


def _states(
    x: Tensor, g: Tensor | None, B: Tensor, initial: Tensor | None, chunks: Chunks, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """States before all chunks `[count, H, N, P]` and the final ones `[documents, H, N, P]`; see `state_kernel`."""
    s = _shapes(x, B)
    states = torch.empty(chunks.count, s.H, s.N, s.P, dtype=x.dtype, device=x.device)
    final = torch.empty(chunks.documents, s.H, s.N, s.P, dtype=torch.float32, device=x.device)
    block_n, block_p = min(s.BN, 64), min(s.BP, 64)
    grid = (chunks.documents * s.H, triton.cdiv(s.N, block_n) * triton.cdiv(s.P, block_p))
    state_kernel[grid](
        x, g, B, initial, states, final, chunks.cu_seqlens, chunks.first, chunks.length,
        *_decay_strides(g), B.stride(1), s.H, s.R, s.N, s.P, chunks.size, block_n, block_p,
        chunks.starts is not None, g is not None, initial is not None, reverse, s.precision,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return states, final


def _contiguous(
    x: Tensor, B: Tensor, C: Tensor, log_decay: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    g, initial = (None if t is None else t.contiguous() for t in (log_decay, initial))
    return x.contiguous(), token_rows(B), token_rows(C), g, initial


def _state(x, B, cu_seqlens):
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(rows, x.shape[2], B.shape[3], x.shape[3], dtype=torch.float32)


def _empty(x, log_decay, B, C, initial, cu_seqlens):
    return torch.empty_like(x, memory_format=torch.contiguous_format), _state(x, B, cu_seqlens)


def _flops(x, log_decay, B, *_):
    return 4 * math.prod(x) * B[3]


@operator("seqarch::ssd_forward", _empty, flops=_flops)
def forward(
    x: Tensor, log_decay: Tensor | None, B: Tensor, C: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`y` and the final states of `ssd`, for `x` scaled by its step and float32 decays and states."""
    x, B, C, g, initial = _contiguous(x, B, C, log_decay, initial)
    chunks, s = chunks_of(x, cu_seqlens), _shapes(x, B)
    states, final = _states(x, g, B, initial, chunks, reverse=False)
    y = torch.empty_like(x)
    heads = _heads_of_a_program(chunks, s)
    output_kernel[(chunks.count, s.H // heads)](
        x, g, B, C, states, y, chunks.starts, chunks.stops, chunks.length, *_decay_strides(g), B.stride(1), C.stride(1),
        s.H, s.R, s.N, s.P, chunks.size, s.BN, s.BP, heads, chunks.starts is not None, g is not None, s.precision,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return y, final


def _empty_gradients(dy, dfinal, x, log_decay, B, C, initial, cu_seqlens):
    dg = x.new_empty(x.shape[:3] if log_decay is not None else (0,), dtype=torch.float32)
    dx, dB, dC = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, B, C))
    return dx, dg, dB, dC, _state(x, B, cu_seqlens)


def _for_all_heads(found, x, log_decay, *_):
    """Sum the heads' gradients of a decay that they share."""
    dx, dg, *others = found
    return dx, dg.sum(2, keepdim=True) if log_decay is not None and log_decay.shape[2] == 1 else dg, *others


@gradient_of(forward, gradients=5, outputs=2, empty=_empty_gradients, finish=_for_all_heads, materialize=False)
def backward(dy, dfinal, x, log_decay, B, C, initial, cu_seqlens):
    """Gradients of `x`, the log decays (of each head), `B`, `C` and the initial states."""
    x, B, C, g, initial = _contiguous(x, B, C, log_decay, initial)
    dy = torch.zeros_like(x) if dy is None else dy.to(x.dtype).contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    chunks, s = chunks_of(x, cu_seqlens), _shapes(x, B)
    states, _ = _states(x, g, B, initial, chunks, reverse=False)
    dstates, dinitial = _states(dy, g, C, dfinal, chunks, reverse=True)
    heads = _heads_of_a_program(chunks, s)
    dx = torch.empty_like(x)
    dg = torch.empty(x.shape[:3] if g is not None else (0,), dtype=torch.float32, device=x.device)
    tables = chunks.starts, chunks.stops, chunks.length
    strides = *_decay_strides(g), B.stride(1), C.stride(1)
    flags = chunks.starts is not None, g is not None, s.precision
    input_gradient_kernel[(chunks.count, s.H // heads)](
        x, g, B, C, states, dy, dstates, dx, dg, *tables, *strides,
        s.H, s.R, s.N, s.P, chunks.size, s.BN, s.BP, heads, *flags, num_warps=8, num_stages=1,
    )  # fmt: skip
    parts = s.R // heads
    dtype = x.dtype if parts == 1 else torch.float32
    dB, dC = (torch.empty(parts, *B.shape, dtype=dtype, device=x.device) for _ in range(2))
    block_n = min(s.BN, 64)  # more columns do not fit into registers
    projection_gradient_kernel[(chunks.count, s.H // heads, triton.cdiv(s.N, block_n))](
        x, g, B, C, states, dy, dstates, dB, dC, *tables, *strides, B.numel(),
        s.H, s.R, s.N, s.P, chunks.size, block_n, s.BP, heads, *flags, num_warps=4, num_stages=1,
    )  # fmt: skip
    dB, dC = (t.squeeze(0) if parts == 1 else t.sum(0).to(x.dtype) for t in (dB, dC))
    return dx, dg, dB, dC, dinitial


def recur(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """As the public `ssd`."""
    return forward(*scaled_inputs(x, dt, A, log_decay), B, C, *others)
