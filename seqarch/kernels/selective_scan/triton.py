"""The selective scan on Triton: the launches, registered as operators so that torch.compile sees them whole."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from seqarch.kernels.launch import gradient_of, operator, token_rows
from seqarch.kernels.selective_scan.op import scan_flops
from seqarch.kernels.selective_scan.triton_scan import backward_kernel, carry_kernel, chain_kernel, forward_kernel
from seqarch.kernels.tensors import is_tracked
from seqarch.kernels.triton_documents import Pieces, cut_into_pieces

CHANNELS = 32
"""Channels of one program, which is one warp."""

PROGRAMS_PER_PROCESSOR = 16
"""Programs that keep one processor of the GPU busy. With fewer programs, sequences are cut into segments."""

EVERY = 64
"""Tokens between states that the backward pass finds kept; a multiple of 4."""

MIN_SEGMENT = 256
"""Tokens of the shortest segments; a multiple of `EVERY`."""

STATES_ACROSS_LANES = {"forward": 2, "backward": 4}
"""Lanes that share the states of a channel. With more lanes, sums over states exchange more. With fewer lanes, sums
over channels do; only the backward pass has them."""


def segment_length(B: int, T: int, d: int, processors: int) -> int:
    """Tokens of a segment: all, where rows and channels keep the GPU busy; 32-bit offsets bound it."""
    parts = max(processors * PROGRAMS_PER_PROCESSOR // (B * triton.cdiv(d, CHANNELS)), 1)
    length = triton.cdiv(triton.cdiv(T, parts), MIN_SEGMENT) * MIN_SEGMENT
    return min(length, 2**30 // (d + 1) // MIN_SEGMENT * MIN_SEGMENT)


@functools.lru_cache(maxsize=16)
def _equal_segments(B: int, T: int, length: int, device: torch.device) -> Pieces:
    parts = triton.cdiv(T, length)
    segment = torch.arange(B * parts, device=device, dtype=torch.int32)
    rows = segment // parts
    begins = rows * T + segment % parts * length
    first = torch.arange(B + 1, device=device, dtype=torch.int32) * parts
    return Pieces(begins, torch.minimum(begins + length, (rows + 1) * T), rows, first)


def segments_of(B: int, T: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> Pieces:
    """Segments of at most `length` of the `B * T` tokens, for programs; each row counts as a document."""
    if cu_seqlens is None:
        return _equal_segments(B, T, length, device)
    return cut_into_pieces(cu_seqlens, length, T)


class _Launch:
    """What the launches of one call share: the inputs as the kernels read them, sizes and segments."""

    def __init__(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, others: Sequence[Tensor | None], cu_seqlens: Tensor | None
    ) -> None:
        """`others`: A, D and log_decay; in place of one that is not given the kernels get x, and do not read it."""
        A, _, log_decay = others
        self.x, self.dt, self.BC = x.contiguous(), token_rows(dt), _pairs(B, C)
        self.rates, self.skip, self.log = (self.x if t is None else t.contiguous() for t in others)
        self.B, self.T, self.d = x.shape
        self.N = B.shape[2]
        length = segment_length(self.B, self.T, self.d, _processors(x.device))
        self.segments = segments_of(self.B, self.T, length, cu_seqlens, x.device)
        self.count = self.segments.begins.shape[0]
        self.rows = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.chained = cu_seqlens is not None or self.count > self.B
        self.blocks = triton.cdiv(self.d, CHANNELS)
        self.mode = 0 if A is not None else 1 if log_decay is not None else 2
        self.exact = cu_seqlens is None and self.T % 4 == 0

    def lanes(self, direction: str) -> dict[str, int]:
        states = max(triton.next_power_of_2(self.N), STATES_ACROSS_LANES[direction])
        across = STATES_ACROSS_LANES[direction]
        return {"NR": states // across, "NL": across, "DR": CHANNELS * across // 32, "DL": 32 // across}

    def shape(self) -> dict[str, Any]:
        return {"DIM": self.d, "N": self.N, "MODE": self.mode, "num_warps": 1}

    def guards(self, direction: str) -> dict[str, Any]:
        lanes = self.lanes(direction)
        return {
            **self.shape(),
            **lanes,
            "DT_STRIDE": self.dt.stride(1),
            "EVEN_D": self.d % CHANNELS == 0,
            "EVEN_N": lanes["NR"] * lanes["NL"] == self.N,
            "EXACT": self.exact,
        }

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def grid(self, count: int) -> tuple[int]:
        return (count * self.blocks,)

    def chain(self, total: Tensor, carry: Tensor, given: Tensor | None, *, reverse: bool) -> Tensor:
        """Turn `carry` into the state that each segment starts from, and return the state after each row.

        With `reverse`, into the gradient that each segment ends with, and the gradient before each row.
        """
        last = self.empty(self.rows, self.d, self.N)
        chain_kernel[self.grid(self.rows)](
            self.rates, total, carry, last if given is None else given, last, self.segments.first,
            HAS_GIVEN=given is not None, REVERSE=reverse, **self.shape(), **self.lanes("forward"),
        )  # fmt: skip
        return last

    def carry(self, x: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
        """Each segment's contribution to the state, and its length in steps; see `carry_kernel`."""
        carry = self.empty(self.count, self.N, self.d)
        total = self.empty(self.count, self.d) if self.mode == 0 else self.empty(self.count)
        carry_kernel[self.grid(self.count)](
            x, self.dt, self.rates, self.BC, self.log, *self.segments[:2], carry, total, REVERSE=reverse,
            **self.guards("forward"),
        )  # fmt: skip
        return carry, total


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _pairs(B: Tensor, C: Tensor) -> Tensor:
    """`[B, T, N]` int64: the bits of B and C in float32, so that one load brings both."""
    return torch.stack((B, C), dim=-1).float().view(torch.int64).squeeze(-1)


def _slots(segments: int, x: Tensor) -> int:
    """Kept states: slot `begin // EVERY + segment` is the first of a segment."""
    return x.shape[0] * x.shape[1] // EVERY + segments


def _empty(x, dt, A, B, C, D, log_decay, initial_state, cu_seqlens, save):
    batch, T, d = x.shape
    length = segment_length(batch, T, d, _processors(x.device))
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    count = batch * triton.cdiv(T, length) if cu_seqlens is None else T // length + rows
    final = x.new_empty(rows, d, B.shape[2], dtype=torch.float32)
    checkpoints = x.new_empty(_slots(count, x) if save else 0, B.shape[2], d, dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), final, checkpoints


@operator("seqarch::selective_scan", _empty, flops=scan_flops)
def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and, with `save`, the states before every `EVERY` tokens `[slots, N, d]`."""
    launch = _Launch(x, dt, B, C, (A, D, log_decay), cu_seqlens)
    y = torch.empty_like(launch.x)
    start = None if initial_state is None else initial_state.contiguous()
    checkpoints = launch.empty(_slots(launch.count, x) if save else 0, launch.N, launch.d)
    kind = 0 if start is None else 1
    if launch.chained:
        carry, total = launch.carry(launch.x, reverse=False)
        final = launch.chain(total, carry, start, reverse=False)
        start, kind = carry, 2
    else:
        final = launch.empty(launch.rows, launch.d, launch.N)
    forward_kernel[launch.grid(launch.count)](
        launch.x, launch.dt, launch.rates, launch.BC, launch.skip, launch.log, final if start is None else start, y,
        final, checkpoints, *launch.segments[:3],
        HAS_D=D is not None, START=kind, FINAL=not launch.chained, EVERY=EVERY if save else 0,
        **launch.guards("forward"),
    )  # fmt: skip
    return y, final, checkpoints


@gradient_of(forward, gradients=8, outputs=2, keep=[2])
def backward(dy, dfinal, x, dt, A, B, C, D, log_decay, initial_state, cu_seqlens, save, checkpoints):
    """Gradients of x, dt, A, B, C, D, log_decay and the initial state."""
    dy, dfinal = dy.contiguous(), dfinal.contiguous()
    launch = _Launch(x, dt, B, C, (A, D, log_decay), cu_seqlens)
    tokens, N, count = launch.B * launch.T, launch.N, launch.count
    later, kind = dfinal, 1
    dstart = launch.empty(launch.rows, launch.d, N)
    if launch.chained:
        kind, (later, total) = 2, launch.carry(dy, reverse=True)
        dstart = launch.chain(total, later, dfinal, reverse=True)
    dx = torch.empty_like(launch.x)
    ddt = torch.empty_like(launch.dt, memory_format=torch.contiguous_format)
    dA = launch.empty(count if A is not None else 0, launch.d, N)
    dD = launch.empty(count if D is not None else 0, launch.d)
    dBC = launch.empty(launch.blocks, tokens, N, dtype=torch.int64)
    dlog = launch.empty(launch.blocks if log_decay is not None else 0, tokens)
    backward_kernel[launch.grid(count)](
        launch.x, launch.dt, launch.rates, launch.BC, launch.skip, launch.log, dy, checkpoints, later,
        *launch.segments[:3],
        launch.empty(count * launch.blocks, EVERY // 4, CHANNELS * triton.next_power_of_2(max(N, 4))),
        dx, ddt, dA, dBC, dD, dlog, dstart, tokens,
        HAS_D=D is not None, LATER=kind, START=not launch.chained and initial_state is not None, EVERY=EVERY,
        **launch.guards("backward"),
    )  # fmt: skip
    pairs = dBC.view(torch.float32).view(launch.blocks, *B.shape, 2).sum(0)
    dB, dC = (grad.to(B.dtype, copy=True, memory_format=torch.contiguous_format) for grad in pairs.unbind(-1))
    dA, dD, dlog = (None if t is None else sums.sum(0) for t, sums in ((A, dA), (D, dD), (log_decay, dlog)))
    dlog = None if dlog is None else dlog.view(log_decay.shape)
    return dx, ddt, dA, dB, dC, dD, dlog, dstart if initial_state is not None else None


def scan(*args: Any) -> tuple[Tensor, Tensor]:
    return forward(*args, is_tracked(*args))[:2]
