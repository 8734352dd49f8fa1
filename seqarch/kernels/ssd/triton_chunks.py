"""The kernels of Mamba-2's recurrence in Triton; README.md has the formulas.

Tokens of all rows or documents follow each other. A chunk has BT tokens of one document, fewer at its end; its
number runs over all documents. `b_a` is the running sum of log decays (to base 2) in a chunk. Tables of steps, running
sums and their gradients are `[chunks, H, BT]`, so that a program reads one piece of memory per head.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_tokens(chunk, length, starts, stops, BT: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk, its places `[BT]`, and which of them have a token.

    Places are small numbers, so that addresses within a chunk take one register each."""
    if PACKED:
        start, stop = tl.load(starts + chunk).to(tl.int64), tl.load(stops + chunk).to(tl.int64)
    else:
        chunks = tl.cdiv(length, BT)
        row = chunk // chunks
        start = row.to(tl.int64) * length + (chunk - row * chunks) * BT
        stop = tl.minimum(start + BT, (row.to(tl.int64) + 1) * length)
    o_t = tl.arange(0, BT)
    return start, o_t, o_t < (stop - start).to(tl.int32)


@triton.jit
def step_kernel(
    dt, g, steps, sums, starts, stops, length, g_token, g_head,
    H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
    """The tables of the steps and of `b_a` of one chunk and BH heads; tokens that do not exist have steps of zero."""
    chunk = tl.program_id(0)
    start, o_t, m_t = chunk_tokens(chunk, length, starts, stops, BT, PACKED)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m = m_t[:, None] & (o_h < H)[None, :]
    o = (chunk.to(tl.int64) * H + o_h[None, :]) * BT + o_t[:, None]
    m_o = (o_h < H)[None, :] & (o_t < BT)[:, None]
    tl.store(steps + o, tl.load(dt + start * H + o_t[:, None] * H + o_h[None, :], mask=m, other=0.0), mask=m_o)
    if DECAYS:
        b_g = tl.load(g + start * g_token + o_t[:, None] * g_token + o_h[None, :] * g_head, mask=m, other=0.0)
        tl.store(sums + o, tl.cumsum(b_g * LOG2E, 0), mask=m_o)


@triton.jit
def decay_gradient_kernel(
    da, through, dg, starts, stops, length,
    H: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of log decays from those of `b_a` and what reaches every token of a chunk."""
    chunk = tl.program_id(0)
    start, o_t, m_t = chunk_tokens(chunk, length, starts, stops, BT, PACKED)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    m_h = o_h < H
    row = chunk.to(tl.int64) * H + o_h
    m_o = m_h[None, :] & (o_t < BT)[:, None]
    b_da = tl.load(da + row[None, :] * BT + o_t[:, None], mask=m_o, other=0.0)
    b_dg = tl.cumsum(b_da, 0, reverse=True) + tl.load(through + row, mask=m_h, other=0.0)[None, :]
    tl.store(dg + start * H + o_t[:, None] * H + o_h[None, :], b_dg, mask=m_t[:, None] & m_h[None, :])


@triton.jit
def decay_of(sums, row, BT: tl.constexpr, DECAYS: tl.constexpr):
    """`b_a` of a chunk and head, and its last value; both are zero without decay."""
    if DECAYS:
        b_a = tl.load(sums + row * BT + tl.arange(0, BT))
        b_last = tl.load(sums + row * BT + BT - 1)
    else:
        b_a = tl.zeros([BT], dtype=tl.float32)
        b_last = tl.sum(b_a, 0)
    return b_a, b_last


@triton.jit
def load_rows(t, o_t, m_t, o_d, token_stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """`[BT, BLOCK]` of a tensor whose rows are tokens; blocks that divide D need no check of columns."""
    if D % BLOCK == 0:  # noqa: SIM108 - compiled for one of them
        mask = m_t[:, None]
    else:
        mask = m_t[:, None] & (o_d < D)[None, :]
    return tl.load(t + (o_t[:, None] * token_stride + o_d[None, :]), mask=mask, other=0.0)


@triton.jit
def store_rows(t, value, o_t, m_t, o_d, token_stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write `[BT, BLOCK]`; see `load_rows`."""
    if D % BLOCK == 0:  # noqa: SIM108 - compiled for one of them
        mask = m_t[:, None]
    else:
        mask = m_t[:, None] & (o_d < D)[None, :]
    tl.store(t + (o_t[:, None] * token_stride + o_d[None, :]), value.to(t.dtype.element_ty), mask=mask)


@triton.jit
def load_state(t, o_n, o_p, N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr):
    """`[BN, BP]` of a state `[N, P]`."""
    if N % BN == 0 and P % BP == 0:
        found = tl.load(t + (o_n[:, None] * P + o_p[None, :]))
    else:
        found = tl.load(t + (o_n[:, None] * P + o_p[None, :]), mask=(o_n < N)[:, None] & (o_p < P)[None, :], other=0.0)
    return found


@triton.jit
def store_state(t, value, o_n, o_p, N: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr):
    """Write `[BN, BP]` of a state `[N, P]`."""
    b = value.to(t.dtype.element_ty)
    if N % BN == 0 and P % BP == 0:
        tl.store(t + (o_n[:, None] * P + o_p[None, :]), b)
    else:
        tl.store(t + (o_n[:, None] * P + o_p[None, :]), b, mask=(o_n < N)[:, None] & (o_p < P)[None, :])


@triton.jit
def state_kernel(
    x, steps, sums, B, initial, states, final, totals, cu_seqlens, first, length, pieces, piece_chunks,
    x_token, B_token,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, INITIAL: tl.constexpr, REVERSE: tl.constexpr,
    STORE: tl.constexpr, FINAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk of a piece, chunk after chunk; with REVERSE the gradient of the state after each.

    A piece is a document, or `piece_chunks` chunks of a row that has several pieces. With REVERSE, x is dy, B is C,
    `initial` is the final state's gradient and `final` the initial state's. STORE writes `states`; FINAL writes `final`
    and, for rows of several pieces, the sum of the piece's log decays to `totals`."""
    piece, head = tl.program_id(0) // H, tl.program_id(0) % H
    i_n, i_p = tl.program_id(1) // tl.cdiv(P, BP), tl.program_id(1) % tl.cdiv(P, BP)
    if PACKED:
        start, stop = tl.load(cu_seqlens + piece).to(tl.int64), tl.load(cu_seqlens + piece + 1).to(tl.int64)
        chunk = tl.load(first + piece).to(tl.int64)
        chunks = tl.cdiv(stop - start, BT).to(tl.int32)
    else:
        row_chunks = tl.cdiv(length, BT)
        skipped = (piece % pieces) * piece_chunks
        row = (piece // pieces).to(tl.int64)
        start = row * length + skipped * BT
        stop = (row + 1) * length
        chunk = row * row_chunks + skipped
        chunks = tl.minimum(row_chunks - skipped, piece_chunks)
    o_n, o_p = i_n * BN + tl.arange(0, BN), i_p * BP + tl.arange(0, BP)
    own = tl.program_id(0).to(tl.int64) * N * P
    if INITIAL:
        b_state = load_state(initial + own, o_n, o_p, N, P, BN, BP).to(tl.float32)
    else:
        b_state = tl.zeros([BN, BP], dtype=tl.float32)
    b_total = 0.0
    for step in range(chunks):
        i = chunks - 1 - step if REVERSE else step
        place = start + i * BT
        o_t = tl.arange(0, BT)
        m_t = o_t < tl.minimum(stop - place, BT).to(tl.int32)
        row_head = (chunk + i) * H + head
        if STORE:
            store_state(states + row_head * N * P, b_state, o_n, o_p, N, P, BN, BP)
        b_a, b_last = decay_of(sums, row_head, BT, DECAYS)
        b_x = load_rows(x + place * x_token + head * P, o_t, m_t, o_p, x_token, P, BP)
        b_B = load_rows(B + place * B_token + (head // R) * N, o_t, m_t, o_n, B_token, N, BN)
        if REVERSE:  # noqa: SIM108 - compiled for one of them
            b_scale = tl.exp2(b_a)
        else:
            b_scale = tl.exp2(b_last - b_a) * tl.load(steps + row_head * BT + tl.arange(0, BT))
        b_x = (b_x * b_scale[:, None]).to(b_x.dtype)
        b_state = b_state * tl.exp2(b_last) + tl.dot(tl.trans(b_B), b_x, input_precision=PRECISION)
        b_total += b_last
    if FINAL:
        store_state(final + own, b_state, o_n, o_p, N, P, BN, BP)
        if not STORE:
            tl.store(totals + tl.program_id(0), b_total)


@triton.jit
def piece_kernel(
    ends, totals, initial, final, pieces,
    H: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    INITIAL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace what each piece of a row adds to the state by the state before it, in place, and write the last state.

    With REVERSE, pieces follow each other from the last to the first."""
    row, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    own = (row * H + head) * SIZE
    if INITIAL:
        b_state = tl.load(initial + own + o, mask=m, other=0.0).to(tl.float32)
    else:
        b_state = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(pieces):
        piece = pieces - 1 - step if REVERSE else step
        place = (row * pieces + piece) * H + head
        b_end = tl.load(ends + place * SIZE + o, mask=m, other=0.0)
        tl.store(ends + place * SIZE + o, b_state, mask=m)
        b_state = b_state * tl.exp2(tl.load(totals + place)) + b_end
    tl.store(final + own + o, b_state, mask=m)


@triton.jit
def output_kernel(
    x, steps, sums, B, C, states, y, starts, stops, length,
    x_token, B_token, C_token,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`y` of one chunk and HEADS heads of one group, which share `C B^T`."""
    chunk, first_head = tl.program_id(0), tl.program_id(1) * HEADS
    group = first_head // R
    start, o_t, m_t = chunk_tokens(chunk, length, starts, stops, BT, PACKED)
    o_n, o_p = tl.arange(0, BN), tl.arange(0, BP)
    causal = o_t[:, None] >= o_t[None, :]
    b_C = load_rows(C + start * C_token + group * N, o_t, m_t, o_n, C_token, N, BN)
    b_B = load_rows(B + start * B_token + group * N, o_t, m_t, o_n, B_token, N, BN)
    b_s = tl.dot(b_C, tl.trans(b_B), input_precision=PRECISION)
    for head in range(first_head, first_head + HEADS):
        row_head = chunk.to(tl.int64) * H + head
        b_a, _ = decay_of(sums, row_head, BT, DECAYS)
        b_dt = tl.load(steps + row_head * BT + tl.arange(0, BT))
        b_x = load_rows(x + start * x_token + head * P, o_t, m_t, o_p, x_token, P, BP)
        b_h = load_state(states + row_head * N * P, o_n, o_p, N, P, BN, BP)
        b_y = tl.dot(b_C, b_h, input_precision=PRECISION) * tl.exp2(b_a)[:, None]
        b_w = b_s * tl.exp2(tl.where(causal, b_a[:, None] - b_a[None, :], float("-inf"))) * b_dt[None, :]
        b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y, input_precision=PRECISION)
        store_rows(y + (start * H + head) * P, b_y, o_t, m_t, o_p, H * P, P, BP)


@triton.jit
def gradient_kernel(
    x, steps, sums, B, C, states, dy, dstates, first, second, starts, stops, length,
    x_token, B_token, C_token, part_stride,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Two gradients of one chunk and HEADS heads of one group, `first` and `second`.

    For OF "inputs", of x and the steps. For "decays", of `b_a` and what reaches every token of the chunk. BN holds all
    of N for both. For "projections", what these heads add to BN columns of the gradients of B and C."""
    chunk, first_head = tl.program_id(0), tl.program_id(1) * HEADS
    group, part = first_head // R, (first_head % R) // HEADS
    start, o_t, m_t = chunk_tokens(chunk, length, starts, stops, BT, PACKED)
    o_n, o_p = tl.program_id(2) * BN + tl.arange(0, BN), tl.arange(0, BP)
    later = o_t[None, :] >= o_t[:, None]  # rows are keys
    b_B = load_rows(B + start * B_token + group * N, o_t, m_t, o_n, B_token, N, BN)
    b_C = load_rows(C + start * C_token + group * N, o_t, m_t, o_n, C_token, N, BN)
    if OF == "projections":
        b_dB = tl.zeros([BT, BN], dtype=tl.float32)
        b_dC = tl.zeros([BT, BN], dtype=tl.float32)
    else:
        b_s = tl.dot(b_B, tl.trans(b_C), input_precision=PRECISION)
    for head in range(first_head, first_head + HEADS):
        row_head = chunk.to(tl.int64) * H + head
        b_a, b_last = decay_of(sums, row_head, BT, DECAYS)
        b_dt = tl.load(steps + row_head * BT + tl.arange(0, BT))
        b_x = load_rows(x + start * x_token + head * P, o_t, m_t, o_p, x_token, P, BP)
        b_dy = load_rows(dy + (start * H + head) * P, o_t, m_t, o_p, H * P, P, BP)
        b_dh = load_state(dstates + row_head * N * P, o_n, o_p, N, P, BN, BP)
        b_reach = tl.exp2(tl.where(later, b_a[None, :] - b_a[:, None], float("-inf")))
        b_out = tl.exp2(b_last - b_a)
        if OF != "inputs":
            b_h = load_state(states + row_head * N * P, o_n, o_p, N, P, BN, BP)
            b_e = tl.dot(b_x, tl.trans(b_dy), input_precision=PRECISION) * b_dt[:, None] * b_reach
        if OF == "projections":
            b_eh = b_e.to(b_B.dtype)
            b_dB = tl.dot(b_eh, b_C, b_dB, input_precision=PRECISION)
            b_dC = tl.dot(tl.trans(b_eh), b_B, b_dC, input_precision=PRECISION)
            b_dys = (b_dy * tl.exp2(b_a)[:, None]).to(b_dy.dtype)
            b_dC = tl.dot(b_dys, tl.trans(b_h), b_dC, input_precision=PRECISION)
            b_xs = (b_x * (b_out * b_dt)[:, None]).to(b_x.dtype)
            b_dB = tl.dot(b_xs, tl.trans(b_dh), b_dB, input_precision=PRECISION)
        else:
            b_left = tl.dot(b_B, b_dh, input_precision=PRECISION) * b_out[:, None]
        if OF == "decays":
            # a path from a key to a later query, or to or from a state, passes all decays in between
            b_pair = tl.where(o_t[None, :] > o_t[:, None], b_e * b_s, 0.0)
            b_in = tl.dot(b_C, b_h, input_precision=PRECISION)
            b_in = tl.sum(b_in * b_dy, 1) * tl.exp2(b_a) + tl.sum(b_pair, 0)
            b_from = tl.sum(b_left * b_x, 1) * b_dt
            b_all = tl.sum(tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1), 0) * tl.exp2(b_last)
            tl.store(first + row_head * BT + o_t, b_in - b_from - tl.sum(b_pair, 1))
            tl.store(second + row_head, b_all + tl.sum(b_from, 0))
        if OF == "inputs":
            b_dv = tl.dot((b_s * b_reach).to(b_dy.dtype), b_dy, b_left, input_precision=PRECISION)
            store_rows(first + (start * H + head) * P, b_dv * b_dt[:, None], o_t, m_t, o_p, H * P, P, BP)
            tl.store(second + start * H + head + o_t * H, tl.sum(b_dv * b_x, 1), mask=m_t)
    if OF == "projections":
        place = part.to(tl.int64) * part_stride + (start * (H // R) + group) * N
        store_rows(first + place, b_dB, o_t, m_t, o_n, (H // R) * N, N, BN)
        store_rows(second + place, b_dC, o_t, m_t, o_n, (H // R) * N, N, BN)
