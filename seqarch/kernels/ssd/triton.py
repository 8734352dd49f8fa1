"""The recurrence of Mamba-2 on Triton: the launches, registered as operators so that torch.compile sees them whole."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from seqarch.kernels.launch import gradient_of, operator, padded, precision, token_rows
from seqarch.kernels.packed import cut_documents
from seqarch.kernels.ssd.triton_chunks import (
    decay_gradient_kernel,
    gradient_kernel,
    output_kernel,
    piece_kernel,
    state_kernel,
    step_kernel,
    walk_kernel,
)

ENOUGH_PROGRAMS = 512
"""Programs that keep a GPU busy. With fewer, several programs share the heads of a group or the chunks of a row."""
SHORTEST_PIECE = 4
"""Chunks in the shortest piece of a row."""


class Launch(NamedTuple):
    """How a kernel is launched."""

    warps: int
    stages: int
    programs: int = ENOUGH_PROGRAMS
    """Programs to aim at."""
    rows: int = 64
    """Rows of the state that a program holds, if it need not hold all."""


class Tuning(NamedTuple):
    """Sizes of chunks and launches of all kernels."""

    forward_chunk: int = 64
    backward_chunk: int = 64
    state: Launch = Launch(4, 2)
    output: Launch = Launch(4, 2)
    inputs: Launch = Launch(8, 1)
    projections: Launch = Launch(4, 1)
    sums: Launch | None = None
    """A kernel of its own for gradients of the decays; otherwise they come with those of the inputs."""
    joined: Launch | None = None
    """One kernel for both, which reads everything once."""
    walk: Launch | None = None
    """One kernel for states and outputs, for rows without documents. It writes no states."""


SMALL = Tuning(
    state=Launch(8, 3, 384, 128),
    output=Launch(4, 3),
    inputs=Launch(4, 3),
    projections=Launch(4, 3),
    sums=Launch(4, 2),
    walk=Launch(4, 2),
)
"""For heads up to 64 and states up to 128 rows, in 16 bits."""
LARGE = Tuning()
FULL = Tuning(32, 32)
"""For float32."""


def tuning_of(x: Tensor, B: Tensor) -> Tuning:
    if x.dtype == torch.float32:
        return FULL
    return SMALL if x.shape[3] <= 64 and B.shape[3] <= 128 else LARGE


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


def _heads_of_a_program(chunks: Chunks, shapes: Shapes, enough: int) -> int:
    """Heads that one program takes, a divisor of R; the whole group if there are enough programs."""
    heads = shapes.R
    while heads > 1 and chunks.count * (shapes.H // heads) < enough:
        heads = next(n for n in range(heads - 1, 0, -1) if shapes.R % n == 0)
    return heads


def _chunks_of_a_piece(chunks: Chunks, programs: int, enough: int) -> int:
    """Chunks of a row that one program walks, out of `programs` if each walks a whole row."""
    count = chunks.count // chunks.documents
    if chunks.starts is not None or programs >= enough:
        return max(count, 1)
    return max(triton.cdiv(count, triton.cdiv(enough, programs)), min(SHORTEST_PIECE, count))


def _states(
    x: Tensor, decays: Decays, B: Tensor, initial: Tensor | None, chunks: Chunks, launch: Launch, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """States before all chunks `[count, H, N, P]` and the final ones `[documents, H, N, P]`; see `state_kernel`.

    A long row is cut into pieces: what each adds to the state, the states before the pieces, then all states."""
    s = _shapes(x, B)
    states = torch.empty(chunks.count, s.H, s.N, s.P, dtype=x.dtype, device=x.device)
    final = torch.empty(chunks.documents, s.H, s.N, s.P, dtype=torch.float32, device=x.device)
    pieces = _pieces(x, decays, B, initial, final, chunks, launch, reverse)
    if pieces.count > 1:
        _walk_states(x, decays, B, pieces.before, states, None, None, chunks, launch, pieces, reverse)
    else:
        _walk_states(x, decays, B, initial, states, final, None, chunks, launch, pieces, reverse)
    return states, final


class Pieces(NamedTuple):
    """Parts of each row that programs walk at the same time."""

    count: int
    size: int
    """Chunks."""
    before: Tensor | None = None
    """The states before them, `[rows * count, H, N, P]` in float32."""


def _state_tiles(s: Shapes, launch: Launch) -> tuple[int, int, int]:
    """Rows and columns of a program's part of a state, and the number of parts."""
    block_n, block_p = min(s.BN, launch.rows), min(s.BP, 64)
    return block_n, block_p, triton.cdiv(s.N, block_n) * triton.cdiv(s.P, block_p)


def _pieces(
    x: Tensor, decays: Decays, B: Tensor, initial: Tensor | None, final: Tensor, chunks: Chunks, launch: Launch,
    reverse: bool,
) -> Pieces:  # fmt: skip
    """Cut long rows. If there are several pieces, also write the final states."""
    s = _shapes(x, B)
    each = _chunks_of_a_piece(chunks, chunks.documents * s.H * _state_tiles(s, launch)[2], launch.programs)
    count = 1 if chunks.starts is not None else triton.cdiv(triton.cdiv(chunks.length, chunks.size), each)
    if count == 1:
        return Pieces(1, each)
    before = torch.empty(chunks.documents * count, s.H, s.N, s.P, dtype=torch.float32, device=x.device)
    totals = torch.empty(chunks.documents * count, s.H, dtype=torch.float32, device=x.device)
    _walk_states(x, decays, B, None, None, before, totals, chunks, launch, Pieces(count, each), reverse)
    block = min(padded(s.N * s.P), 1024)
    piece_kernel[(chunks.documents * s.H, triton.cdiv(s.N * s.P, block))](
        before, totals, initial, final, count, s.H, s.N * s.P, block, initial is not None, reverse,
    )  # fmt: skip
    return Pieces(count, each, before)


def _walk_states(
    x: Tensor, decays: Decays, B: Tensor, initial: Tensor | None, states: Tensor | None, final: Tensor | None,
    totals: Tensor | None, chunks: Chunks, launch: Launch, pieces: Pieces, reverse: bool,
) -> None:  # fmt: skip
    s = _shapes(x, B)
    block_n, block_p, tiles = _state_tiles(s, launch)
    state_kernel[(chunks.documents * pieces.count * s.H, tiles)](
        x, *decays, B, initial, states, final, totals, chunks.cu_seqlens, chunks.first, chunks.length,
        pieces.count, pieces.size, x.stride(1), B.stride(1), s.H, s.R, s.N, s.P, chunks.size, block_n, block_p,
        chunks.starts is not None, decays.sums is not None, initial is not None, reverse,
        states is not None, final is not None, s.precision, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def _outputs(
    x: Tensor, decays: Decays, B: Tensor, C: Tensor, states: Tensor, y: Tensor, chunks: Chunks, launch: Launch
) -> None:
    s = _shapes(x, B)
    heads = _heads_of_a_program(chunks, s, launch.programs)
    output_kernel[(chunks.count, s.H // heads)](
        x, *decays, B, C, states, y, *chunks.tables, x.stride(1), B.stride(1), C.stride(1),
        s.H, s.R, s.N, s.P, chunks.size, s.BN, s.BP, heads, chunks.starts is not None, decays.sums is not None,
        s.precision, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


def _walk(
    x: Tensor, decays: Decays, B: Tensor, C: Tensor, initial: Tensor | None, y: Tensor, chunks: Chunks, state: Launch,
    launch: Launch,
) -> Tensor:  # fmt: skip
    """Write the outputs of rows without documents; the final states."""
    s = _shapes(x, B)
    final = torch.empty(chunks.documents, s.H, s.N, s.P, dtype=torch.float32, device=x.device)
    pieces = _pieces(x, decays, B, initial, final, chunks, state, False)
    before = initial if pieces.before is None else pieces.before
    walk_kernel[(chunks.documents * pieces.count * s.H,)](
        x, *decays, B, C, before, y, final, chunks.length, pieces.count, pieces.size,
        x.stride(1), B.stride(1), C.stride(1), s.H, s.R, s.N, s.P, chunks.size, s.BN, s.BP,
        decays.sums is not None, before is not None, pieces.count == 1, s.precision,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return final


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
    tuning = tuning_of(x, B)
    chunks = chunks_of(x, cu_seqlens, tuning.forward_chunk)
    decays = _decays(dt, g, chunks)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if tuning.walk is not None and cu_seqlens is None:
        return y, _walk(x, decays, B, C, initial, y, chunks, tuning.state, tuning.walk)
    states, final = _states(x, decays, B, initial, chunks, tuning.state, reverse=False)
    _outputs(x, decays, B, C, states, y, chunks, tuning.output)
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
    like_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    dy = torch.zeros_like(like_x) if dy is None else dy.to(x.dtype).contiguous()
    dfinal = None if dfinal is None else dfinal.contiguous()
    tuning = tuning_of(x, B)
    chunks = chunks_of(x, cu_seqlens, tuning.backward_chunk)
    decays = _decays(dt, g, chunks)
    states, _ = _states(x, decays, B, initial, chunks, tuning.state, reverse=False)
    dstates, dinitial = _states(dy, decays, C, dfinal, chunks, tuning.state, reverse=True)
    read = x, decays, B, C, states, dy, dstates
    dx, ddt = like_x, torch.empty_like(dt)
    da = None if g is None else torch.empty_like(decays.steps)
    through = None if g is None else da.new_empty(da.shape[:2])
    into = dx, ddt, da, through
    if tuning.joined is None:
        if tuning.sums is None or g is None:
            _gradients(read, into, chunks, tuning.inputs)
        else:
            _gradients(read, (dx, ddt, None, None), chunks, tuning.inputs)
            _gradients(read, (None, None, da, through), chunks, tuning.sums)
        dB, dC = _gradients(read, None, chunks, tuning.projections, projections=True)
    else:
        dB, dC = _gradients(read, into, chunks, tuning.joined, projections=True)
    dg = torch.empty(x.shape[:3] if g is not None else (0,), dtype=torch.float32, device=x.device)
    if g is not None:
        heads, block = x.shape[2], min(padded(x.shape[2]), 32)
        decay_gradient_kernel[(chunks.count, triton.cdiv(heads, block))](
            da, through, dg, *chunks.tables, heads, chunks.size, block, chunks.starts is not None
        )
    return dx, ddt, dg, dB, dC, dinitial


def _gradients(read: Any, into: Any, chunks: Chunks, launch: Launch, projections: bool = False) -> Any:
    """Launch `gradient_kernel` for the gradients `into`, if given, and for those of B and C, which it returns."""
    x, decays, B, C, states, dy, dstates = read
    s = _shapes(x, B)
    heads = _heads_of_a_program(chunks, s, launch.programs)
    parts = s.R // heads
    dtype = x.dtype if parts == 1 else torch.float32
    dB, dC = (torch.empty(parts, *B.shape, dtype=dtype, device=x.device) if projections else None for _ in range(2))
    block_n = s.BN if into else min(s.BN, launch.rows)
    gradient_kernel[(chunks.count, s.H // heads, triton.cdiv(s.N, block_n))](
        x, *decays, B, C, states, dy, dstates, *(into or [None] * 4), dB, dC, *chunks.tables,
        x.stride(1), B.stride(1), C.stride(1), B.numel(), s.H, s.R, s.N, s.P, chunks.size, block_n, s.BP, heads,
        chunks.starts is not None, decays.sums is not None,
        bool(into) and into[0] is not None, bool(into) and into[2] is not None, projections, s.precision,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if projections:
        return tuple(t.squeeze(0) if parts == 1 else t.sum(0).to(x.dtype) for t in (dB, dC))
    return None


def recur(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, log_decay: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    """As the public `ssd`."""
    if A is not None:
        log_decay = dt * A.to(dt.dtype)
    return forward(x, dt, None if log_decay is None else log_decay.to(dt.dtype), B, C, *others)
