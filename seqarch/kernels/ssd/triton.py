"""The recurrence of Mamba-2 on Triton: the launches, registered as operators so that torch.compile sees them whole."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from seqarch.kernels.launch import gradient_of, operator, padded, precision, token_rows
from seqarch.kernels.packages import is_hopper
from seqarch.kernels.ssd.op import log_decays
from seqarch.kernels.ssd.triton_chunks import (
    decay_gradient_kernel,
    gradient_kernel,
    output_kernel,
    piece_kernel,
    state_kernel,
    step_kernel,
)
from seqarch.kernels.triton_documents import cut_into_pieces

ENOUGH_PROGRAMS = 512
"""Programs that keep a GPU busy. With fewer chunks, several programs share the heads of a group."""
ENOUGH_WALKS = 384
"""As many programs walk chunks, if rows are long enough to be cut into pieces."""
SHORTEST_PIECE = 4
"""Chunks in the shortest piece of a row."""


class Launch(NamedTuple):
    """How a kernel is launched."""

    num_warps: int
    num_stages: int


class Tuning(NamedTuple):
    """Tokens per chunk of both passes, rows of a state that a program walks, and the launch of each kernel."""

    forward_chunk: int
    backward_chunk: int
    rows: int
    state: Launch
    output: Launch
    inputs: Launch
    decays: Launch
    projections: Launch


FASTEST = Tuning(128, 64, 128, Launch(8, 3), Launch(8, 3), Launch(4, 3), Launch(4, 2), Launch(4, 3))
"""On an H200, for 16 bits, heads up to 64 and states up to 128 rows."""
USUAL = Tuning(64, 64, 64, Launch(4, 2), Launch(4, 2), Launch(8, 1), Launch(8, 1), Launch(4, 1))


def tuning_of(x: Tensor, B: Tensor) -> Tuning:
    if x.dtype == torch.float32:
        return USUAL._replace(forward_chunk=32, backward_chunk=32)
    small = x.shape[3] <= 64 and B.shape[3] <= 128
    return FASTEST if small and x.is_cuda and is_hopper(x.device) else USUAL


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

    @property
    def tables(self) -> tuple[Tensor | None, Tensor | None, int]:
        return self.starts, self.stops, self.length


def chunks_of(x: Tensor, cu_seqlens: Tensor | None, size: int) -> Chunks:
    """The chunks of `x [B, T, ...]`; nothing is read on the host."""
    batch, length = x.shape[:2]
    if cu_seqlens is None:
        return Chunks(size, batch * triton.cdiv(length, size), batch, length)
    documents = cu_seqlens.shape[0] - 1
    pieces = cut_into_pieces(cu_seqlens, size, length)
    return Chunks(size, len(pieces.begins), documents, length, cu_seqlens, pieces.first, pieces.begins, pieces.ends)


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


class Decays(NamedTuple):
    """Tables of one choice of chunks, `[count, H, size]` in float32: steps, and running sums of log decays."""

    steps: Tensor
    sums: Tensor | None


def _decays(dt: Tensor, g: Tensor | None, chunks: Chunks) -> Decays:
    heads = dt.shape[2]
    steps = torch.empty(chunks.count, heads, chunks.size, dtype=torch.float32, device=dt.device)
    sums = None if g is None else torch.empty_like(steps)
    strides = (0, 0) if g is None else (g.shape[2], int(g.shape[2] > 1))
    block = min(padded(heads), 32)
    step_kernel[(chunks.count, triton.cdiv(heads, block))](
        dt, g, steps, sums, *chunks.tables, *strides,
        heads, chunks.size, block, chunks.starts is not None, g is not None,
    )  # fmt: skip
    return Decays(steps, sums)


def _heads_of_a_program(chunks: Chunks, shapes: Shapes) -> int:
    """Heads that one program takes, a divisor of R; the whole group if there are enough programs."""
    heads = shapes.R
    while heads > 1 and chunks.count * (shapes.H // heads) < ENOUGH_PROGRAMS:
        heads = next(n for n in range(heads - 1, 0, -1) if shapes.R % n == 0)
    return heads


def _pieces(chunks: Chunks, programs: int) -> tuple[int, int]:
    """Pieces of each row and their chunks, if `programs` would walk whole rows; documents stay whole."""
    count = max(triton.cdiv(chunks.length, chunks.size), 1)
    if chunks.starts is not None or programs >= ENOUGH_WALKS:
        return 1, count
    size = max(triton.cdiv(count, triton.cdiv(ENOUGH_WALKS, programs)), min(SHORTEST_PIECE, count))
    return triton.cdiv(count, size), size


def _states(
    x: Tensor, decays: Decays, B: Tensor, initial: Tensor | None, chunks: Chunks, tuning: Tuning, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """States before all chunks `[count, H, N, P]` and the final ones `[documents, H, N, P]`; see `state_kernel`.

    A long row is cut into pieces: what each adds to the state, the states before the pieces, then all states."""
    s, rows = _shapes(x, B), chunks.documents
    block_n, block_p = min(s.BN, tuning.rows), min(s.BP, 64)
    tiles = triton.cdiv(s.N, block_n) * triton.cdiv(s.P, block_p)
    pieces, size = _pieces(chunks, rows * s.H * tiles)

    def walk(initial: Tensor | None, states: Tensor | None, final: Tensor | None, totals: Tensor | None) -> None:
        state_kernel[(rows * pieces * s.H, tiles)](
            x, *decays, B, initial, states, final, totals, chunks.cu_seqlens, chunks.first, chunks.length,
            pieces, size, x.stride(1), B.stride(1), s.H, s.R, s.N, s.P, chunks.size, block_n, block_p,
            chunks.starts is not None, decays.sums is not None, initial is not None, reverse,
            states is not None, final is not None, s.precision, **tuning.state._asdict(),
        )  # fmt: skip

    states = torch.empty(chunks.count, s.H, s.N, s.P, dtype=x.dtype, device=x.device)
    final = torch.empty(rows, s.H, s.N, s.P, dtype=torch.float32, device=x.device)
    if pieces == 1:
        walk(initial, states, final, None)
        return states, final
    before, totals = final.new_empty(rows * pieces, s.H, s.N, s.P), final.new_empty(rows * pieces, s.H)
    walk(None, None, before, totals)
    block = min(padded(s.N * s.P), 1024)
    piece_kernel[(rows * s.H, triton.cdiv(s.N * s.P, block))](
        before, totals, initial, final, pieces, s.H, s.N * s.P, block, initial is not None, reverse
    )
    walk(before, states, None, None)
    return states, final


def _in_rows(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, log_decay: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    g, initial = (None if t is None else t.contiguous() for t in (log_decay, initial))
    return token_rows(x), dt.contiguous(), token_rows(B), token_rows(C), g, initial


def _state(x, B, cu_seqlens):
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(rows, x.shape[2], B.shape[3], x.shape[3], dtype=torch.float32)


def _empty(x, dt, log_decay, B, C, initial, cu_seqlens):
    return torch.empty_like(x, memory_format=torch.contiguous_format), _state(x, B, cu_seqlens)


def _flops(x, dt, log_decay, B, *_):
    return 4 * math.prod(x) * B[3]


@operator("seqarch::ssd_forward", _empty, flops=_flops)
def forward(
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor | None,
    B: Tensor,
    C: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`y` and the final states of `ssd`, for float32 steps, decays and states."""
    x, dt, B, C, g, initial = _in_rows(x, dt, B, C, log_decay, initial)
    tuning, s = tuning_of(x, B), _shapes(x, B)
    chunks = chunks_of(x, cu_seqlens, tuning.forward_chunk)
    decays = _decays(dt, g, chunks)
    states, final = _states(x, decays, B, initial, chunks, tuning, reverse=False)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    heads = _heads_of_a_program(chunks, s)
    output_kernel[(chunks.count, s.H // heads)](
        x, *decays, B, C, states, y, *chunks.tables, x.stride(1), B.stride(1), C.stride(1),
        s.H, s.R, s.N, s.P, chunks.size, s.BN, s.BP, heads, chunks.starts is not None, g is not None,
        s.precision, **tuning.output._asdict(),
    )  # fmt: skip
    return y, final


def _empty_gradients(dy, dfinal, x, dt, log_decay, B, C, initial, cu_seqlens):
    dg = x.new_empty(x.shape[:3] if log_decay is not None else (0,), dtype=torch.float32)
    dx, ddt, dB, dC = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, B, C))
    return dx, ddt, dg, dB, dC, _state(x, B, cu_seqlens)


def _for_all_heads(found, x, dt, log_decay, *_):
    """Sum the heads' gradients of a decay that they share."""
    dx, ddt, dg, *others = found
    shared = log_decay is not None and log_decay.shape[2] == 1
    return dx, ddt, dg.sum(2, keepdim=True) if shared else dg, *others


@gradient_of(forward, gradients=6, outputs=2, empty=_empty_gradients, finish=_for_all_heads, materialize=False)
def backward(dy, dfinal, x, dt, log_decay, B, C, initial, cu_seqlens):
    """Gradients of `x`, the steps, the log decays (of each head), `B`, `C` and the initial states."""
    x, dt, B, C, g, initial = _in_rows(x, dt, B, C, log_decay, initial)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dy = torch.zeros_like(dx) if dy is None else dy.to(x.dtype).contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    tuning, s = tuning_of(x, B), _shapes(x, B)
    chunks = chunks_of(x, cu_seqlens, tuning.backward_chunk)
    decays = _decays(dt, g, chunks)
    states, _ = _states(x, decays, B, initial, chunks, tuning, reverse=False)
    dstates, dinitial = _states(dy, decays, C, dfinal, chunks, tuning, reverse=True)
    heads = _heads_of_a_program(chunks, s)

    def write(of: str, first: Tensor, second: Tensor, launch: Launch, block_n: int = s.BN) -> None:
        gradient_kernel[(chunks.count, s.H // heads, triton.cdiv(s.N, block_n))](
            x, *decays, B, C, states, dy, dstates, first, second, *chunks.tables,
            x.stride(1), B.stride(1), C.stride(1), B.numel(), s.H, s.R, s.N, s.P, chunks.size, block_n, s.BP, heads,
            chunks.starts is not None, g is not None, of, s.precision, **launch._asdict(),
        )  # fmt: skip

    ddt = torch.empty_like(dt)
    write("inputs", dx, ddt, tuning.inputs)
    parts = s.R // heads
    dtype = x.dtype if parts == 1 else torch.float32
    dB, dC = (torch.empty(parts, *B.shape, dtype=dtype, device=x.device) for _ in range(2))
    write("projections", dB, dC, tuning.projections, min(s.BN, 64))  # more columns do not fit into registers
    dB, dC = (t.squeeze(0) if parts == 1 else t.sum(0).to(x.dtype) for t in (dB, dC))
    if g is None:
        return dx, ddt, ddt.new_empty(0), dB, dC, dinitial
    da, through, dg = torch.empty_like(decays.steps), ddt.new_empty(chunks.count, s.H), torch.empty_like(ddt)
    write("decays", da, through, tuning.decays)
    block = min(padded(s.H), 32)
    decay_gradient_kernel[(chunks.count, triton.cdiv(s.H, block))](
        da, through, dg, *chunks.tables, s.H, chunks.size, block, chunks.starts is not None
    )
    return dx, ddt, dg, dB, dC, dinitial


def recur(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """As the public `ssd`."""
    return forward(x, dt, log_decays(dt, A, log_decay), B, C, *others)
