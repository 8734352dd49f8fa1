"""The selective scan on Triton: what its kernels load, store and add up. triton_scan.py describes the layout."""

import triton
import triton.language as tl

FULL = tl.constexpr(0)
ONE = tl.constexpr(1)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def state_index(NR: tl.constexpr, NL: tl.constexpr, DL: tl.constexpr):
    """Indices of states `[NR, 1, NL, DL]`."""
    n = tl.arange(0, NR)[:, None, None, None] * NL + tl.arange(0, NL)[None, None, :, None]
    return tl.max_contiguous((n + tl.zeros((1, 1, 1, DL), tl.int32)).to(tl.int64), [1, 1, 1, 1])


@triton.jit
def channel_index(block, DR: tl.constexpr, NL: tl.constexpr, DL: tl.constexpr):
    """Indices of channels `[1, DR, NL, DL]`."""
    d = tl.arange(0, DR)[None, :, None, None] * DL + tl.arange(0, DL)[None, None, None, :]
    d = (d + tl.zeros((1, 1, NL, 1), tl.int32)).to(tl.int64) + block * (DR * DL)
    return tl.max_contiguous(d, [1, 1, 1, 1])


@triton.jit
def sum_states(v, NL: tl.constexpr, DL: tl.constexpr):
    v = tl.sum(tl.sum(v, axis=0, keep_dims=True), axis=2, keep_dims=True)
    return tl.broadcast_to(v, (1, v.shape[1], NL, DL))


@triton.jit
def sum_channels(v, NL: tl.constexpr, DL: tl.constexpr):
    v = tl.sum(tl.sum(v, axis=1, keep_dims=True), axis=3, keep_dims=True)
    return tl.broadcast_to(v, (v.shape[0], 1, NL, DL))


@triton.jit
def _token(p, t, i: tl.constexpr, length, STRIDE: tl.constexpr, EXACT: tl.constexpr):
    """Where token t + i begins; beyond the segment, where its last token begins."""
    return p + t * STRIDE + i * STRIDE if EXACT else p + tl.minimum(t + i, length - 1) * STRIDE


@triton.jit
def load_row(
    p, t, i: tl.constexpr, length, o_d, DIM: tl.constexpr, STRIDE: tl.constexpr, EVEN: tl.constexpr,
    EXACT: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """A row of channels in float32; beyond the segment, the row of its last token or, with ZERO, zeros.

    Steps of zero do not change the states."""
    q = _token(p, t, i, length, STRIDE, EXACT) + o_d
    v = tl.load(q) if EVEN else tl.load(q, mask=o_d < DIM, other=0.0)
    v = v.to(tl.float32)
    return v if EXACT or not ZERO else tl.where(t + i < length, v, 0.0)


@triton.jit
def load_four_rows(
    p, t, length, o_d, DIM: tl.constexpr, STRIDE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """The rows of tokens t to t + 3."""
    found = ()
    for i in tl.static_range(4):
        found += (load_row(p, t, i, length, o_d, DIM, STRIDE, EVEN, EXACT, ZERO),)
    return found


@triton.jit
def load_weights(BC, t, i: tl.constexpr, length, o_n, N: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr):
    """B and C of a token."""
    q = _token(BC, t, i, length, N, EXACT) + o_n
    v = tl.load(q) if EVEN else tl.load(q, mask=o_n < N, other=0)
    return v.to(tl.int32).to(tl.float32, bitcast=True), (v >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_row(p, t, i: tl.constexpr, length, o_d, v, DIM: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr):
    q = p + t * DIM + i * DIM + o_d
    v = v.to(p.dtype.element_ty)
    if EVEN and EXACT:
        tl.store(q, v)
    elif EXACT:
        tl.store(q, v, mask=o_d < DIM)
    else:
        tl.store(q, v, mask=o_d < tl.where(t + i < length, DIM, 0))


@triton.jit
def load_log(log_decay, t, i: tl.constexpr, length, MODE: tl.constexpr, EXACT: tl.constexpr):
    """The log decay of a token with ONE, 0 beyond the segment."""
    if MODE == ONE:
        log = tl.load(_token(log_decay, t, i, length, 1, EXACT)).to(tl.float32)
        if not EXACT:
            log = tl.where(t + i < length, log, 0.0)
    else:
        log = 0.0
    return log


@triton.jit
def decay_of(b_dt, b_A, log_decay, t, i: tl.constexpr, length, MODE: tl.constexpr, EXACT: tl.constexpr):
    """`a_t`; `b_A` holds `A / ln 2`."""
    if MODE == FULL:
        a = tl.exp2(b_dt * b_A)
    elif MODE == ONE:
        a = tl.exp2(load_log(log_decay, t, i, length, MODE, EXACT) * LOG2_E)
    else:
        a = 1.0
    return a


@triton.jit
def _state_offsets(o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr):
    """Offsets in a state `[d, N]`, or `[N, d]` with INNER."""
    offsets = o_n * DIM + o_d if INNER else o_d * N + o_n
    return tl.max_contiguous(offsets + 0, [1, 1, 1, 1])


@triton.jit
def load_state(p, index, o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr):
    p += index.to(tl.int64) * (N * DIM)
    ok = (o_n < N) & (o_d < DIM)
    return tl.load(p + _state_offsets(o_n, o_d, N, DIM, INNER), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def store_state(p, index, h, o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr):
    p += index.to(tl.int64) * (N * DIM)
    ok = (o_n < N) & (o_d < DIM)
    tl.store(p + _state_offsets(o_n, o_d, N, DIM, INNER), h, mask=ok)


@triton.jit
def load_rates(A, o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, MODE: tl.constexpr):
    """`A / ln 2`."""
    if MODE == FULL:
        p = A + tl.max_contiguous(o_d * N + o_n, [1, 1, 1, 1])
        b_A = tl.load(p, mask=(o_n < N) & (o_d < DIM), other=0.0).to(tl.float32) * LOG2_E
    else:
        b_A = 0.0
    return b_A


@triton.jit
def segment_place(begins, ends, DIM: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr):
    """The program's block of channels, its segment, the segment's first token and its length."""
    blocks: tl.constexpr = (DIM + DR * DL - 1) // (DR * DL)
    block, segment = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    begin = tl.load(begins + segment).to(tl.int64)
    return block, segment, begin, (tl.load(ends + segment) - begin).to(tl.int32)


@triton.jit
def store_total(total, segment, block, o_d, sum_dt, sum_log, DIM: tl.constexpr, MODE: tl.constexpr):
    if MODE == FULL:
        tl.store(total + segment.to(tl.int64) * DIM + o_d, sum_dt, mask=o_d < DIM)
    elif MODE == ONE:
        tl.store(total + segment, sum_log, mask=block == 0)
