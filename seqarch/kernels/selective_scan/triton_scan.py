"""The selective scan on Triton: the kernels.

A program owns a few channels with all their states and walks one segment of the sequence token by token, the states in
registers. They are held as `[NR, DR, NL, DL]`: state `n = nr * NL + nl` and channel `dr * DL + dl`, where `NL * DL` is
the 32 lanes of the program's one warp. Splitting the lanes over states and channels keeps both sums, over states for
outputs and over channels for the gradients of B and C, to a few exchanges between lanes.

All tensors have four dimensions, whose last two are the lanes, and every offset is marked as not contiguous. So the
compiler gives all of them one layout, and only the sums move numbers between lanes.

B and C come as pairs of float32 in one 64-bit integer, which one load brings. EXACT says that all segments are
multiples of four tokens, the tokens of one step of the loops: nothing then needs to be guarded.
"""

import triton
import triton.language as tl

from seqarch.kernels.selective_scan.triton_parts import (
    FULL,
    LN_2,
    LOG2_E,
    ONE,
    channel_index,
    decay_of,
    load_four_rows,
    load_log,
    load_rates,
    load_row,
    load_state,
    load_weights,
    segment_place,
    state_index,
    store_row,
    store_state,
    store_total,
    sum_channels,
    sum_states,
)


@triton.jit
def carry_kernel(
    x, dt, A, BC, log_decay, begins, ends, carry, total,
    DIM: tl.constexpr, N: tl.constexpr, DT_STRIDE: tl.constexpr, MODE: tl.constexpr, REVERSE: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The final state of each segment that starts from zero, and the sum of its steps (log decays with ONE).

    With REVERSE, x is dy, and the state is the gradient of the one before each segment, from its own outputs."""
    block, segment, begin, length = segment_place(begins, ends, DIM, DR, DL)
    if length <= 0:
        return
    o_n, o_d = state_index(NR, NL, DL), channel_index(block, DR, NL, DL)
    x += begin * DIM
    dt += begin * DT_STRIDE
    BC += begin * N
    log_decay += begin
    b_A = load_rates(A, o_n, o_d, N, DIM, MODE)
    h = tl.zeros((NR, DR, NL, DL), tl.float32)
    sum_dt = tl.zeros((1, DR, NL, DL), tl.float32)
    sum_log = 0.0
    FIRST: tl.constexpr = 3 if REVERSE else 0
    STEP: tl.constexpr = -1 if REVERSE else 1
    for k in range(0, length, 4):
        t = (length - 1) // 4 * 4 - k if REVERSE else k
        for i in tl.static_range(FIRST, FIRST + 4 * STEP, STEP):
            b_dt = load_row(dt, t, i, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT, ZERO=True)
            b_B, b_C = load_weights(BC, t, i, length, o_n, N, EVEN_N, EXACT)
            a = decay_of(b_dt, b_A, log_decay, t, i, length, MODE, EXACT)
            if REVERSE:
                b_dy = load_row(x, t, i, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=True)
                h = (h + b_dy * b_C) * a
            else:
                b_x = load_row(x, t, i, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=False)
                h = a * h + (b_dt * b_x) * b_B
            sum_dt += b_dt
            sum_log += load_log(log_decay, t, i, length, MODE, EXACT)
    store_state(carry, segment, h, o_n, o_d, N, DIM, True)
    store_total(total, segment, block, o_d, sum_dt, sum_log, DIM, MODE)


@triton.jit
def chain_kernel(
    A, total, carry, given, last, first_segment,
    DIM: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr, HAS_GIVEN: tl.constexpr, REVERSE: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
):  # fmt: skip
    """Replace what each segment carries by the state it starts from (with REVERSE, the gradient it ends with)."""
    blocks: tl.constexpr = (DIM + DR * DL - 1) // (DR * DL)
    block, row = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    o_n, o_d = state_index(NR, NL, DL), channel_index(block, DR, NL, DL)
    b_A = load_rates(A, o_n, o_d, N, DIM, MODE)
    h = tl.zeros((NR, DR, NL, DL), tl.float32)
    if HAS_GIVEN:
        h = load_state(given, row, o_n, o_d, N, DIM, False)
    first, stop = tl.load(first_segment + row), tl.load(first_segment + row + 1)
    for k in range(0, stop - first):
        segment = first + k
        if REVERSE:
            segment = stop - 1 - k
        own = load_state(carry, segment, o_n, o_d, N, DIM, True)
        store_state(carry, segment, h, o_n, o_d, N, DIM, True)
        if MODE == FULL:
            b_total = tl.load(total + segment.to(tl.int64) * DIM + o_d, mask=o_d < DIM, other=0.0)
            h = h * tl.exp2(b_total * b_A) + own
        elif MODE == ONE:
            h = h * tl.exp2(tl.load(total + segment) * LOG2_E) + own
        else:
            h = h + own
    store_state(last, row, h, o_n, o_d, N, DIM, False)


@triton.jit
def forward_kernel(
    x, dt, A, BC, D, log_decay, start, y, final, checkpoints, begins, ends, rows,
    DIM: tl.constexpr, N: tl.constexpr, DT_STRIDE: tl.constexpr, MODE: tl.constexpr, HAS_D: tl.constexpr,
    START: tl.constexpr, FINAL: tl.constexpr, EVERY: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Outputs of each segment, the state before every EVERY tokens of it (0: none) and, with FINAL, after it.

    START: 0, from zero; 1, from the state of the row; 2, from the state of the segment.
    """
    block, segment, begin, length = segment_place(begins, ends, DIM, DR, DL)
    if length <= 0:
        return
    o_n, o_d = state_index(NR, NL, DL), channel_index(block, DR, NL, DL)
    row = tl.load(rows + segment)
    x += begin * DIM
    dt += begin * DT_STRIDE
    BC += begin * N
    y += begin * DIM
    log_decay += begin
    b_A = load_rates(A, o_n, o_d, N, DIM, MODE)
    b_D = tl.zeros((1, DR, NL, DL), tl.float32)
    if HAS_D:
        b_D = tl.load(D + o_d, mask=o_d < DIM, other=0.0).to(tl.float32)
    h = tl.zeros((NR, DR, NL, DL), tl.float32)
    if START:
        h = load_state(start, segment if START == 2 else row, o_n, o_d, N, DIM, START == 2)
    # the steps and inputs of the next four tokens are on their way while four are computed
    dts = load_four_rows(dt, 0, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT, ZERO=True)
    xs = load_four_rows(x, 0, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=False)
    for t in range(0, length, 4):
        if EVERY > 0:  # noqa: SIM102  the remainder by 0 must not be compiled
            if t % EVERY == 0:
                slot = begin // EVERY + segment + t // EVERY
                store_state(checkpoints, slot, h, o_n, o_d, N, DIM, True)
        ahead = tl.minimum(t + 4, (length - 1) // 4 * 4)
        for i in tl.static_range(4):
            b_dt, b_x = dts[0], xs[0]
            dt_ahead = load_row(dt, ahead, i, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT, ZERO=True)
            x_ahead = load_row(x, ahead, i, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=False)
            dts, xs = (dts[1], dts[2], dts[3], dt_ahead), (xs[1], xs[2], xs[3], x_ahead)
            b_B, b_C = load_weights(BC, t, i, length, o_n, N, EVEN_N, EXACT)
            h = decay_of(b_dt, b_A, log_decay, t, i, length, MODE, EXACT) * h + (b_dt * b_x) * b_B
            b_y = sum_states(h * b_C, NL, DL)
            if HAS_D:
                b_y += b_D * b_x
            store_row(y, t, i, length, o_d, b_y, DIM, EVEN_D, EXACT)
    if FINAL:
        store_state(final, row, h, o_n, o_d, N, DIM, False)


@triton.jit
def _token_backward(
    g, b_dA, b_dD, h, h_before, a, b_dt, b_x, b_dy, b_B, b_C, b_A, b_D, t, i: tl.constexpr, length, o_n, o_d,
    dx, ddt, dBC, dlog, DIM: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr, HAS_D: tl.constexpr,
    NL: tl.constexpr, DL: tl.constexpr, EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of token t + i and of the state before it, from the gradient `g` of its state `h` by later tokens."""
    g = g + b_dy * b_C
    b_dC = sum_channels(b_dy * h, NL, DL).to(tl.int32, bitcast=True).to(tl.int64)
    b_dB = sum_channels((b_dt * b_x) * g, NL, DL).to(tl.int32, bitcast=True).to(tl.int64)
    store_row(dBC, t, i, length, o_n, (b_dC << 32) | (b_dB & 0xFFFFFFFF), N, EVEN_N, EXACT)
    b_du = sum_states(g * b_B, NL, DL)
    g = g * a
    b_ddt = b_du * b_x
    if MODE == FULL:
        through = g * h_before
        b_ddt += sum_states(through * b_A, NL, DL) * LN_2
        b_dA += through * b_dt
    elif MODE == ONE:
        inside = t + i < length
        total = tl.sum(tl.sum(tl.sum(tl.sum(g * h_before, axis=3), axis=2), axis=1), axis=0)
        tl.store(dlog + t + i, total, mask=inside)
    b_dx = b_du * b_dt
    if HAS_D:
        b_dx += b_D * b_dy
        b_dD += b_dy * b_x
    store_row(ddt, t, i, length, o_d, b_ddt, DIM, EVEN_D, EXACT)
    store_row(dx, t, i, length, o_d, b_dx, DIM, EVEN_D, EXACT)
    return g, b_dA, b_dD


@triton.jit
def backward_kernel(  # noqa: C901  most branches are settled when it is compiled
    x, dt, A, BC, D, log_decay, dy, checkpoints, later, begins, ends, rows, scratch,
    dx, ddt, dA, dBC, dD, dlog, dstart, tokens,
    DIM: tl.constexpr, N: tl.constexpr, DT_STRIDE: tl.constexpr, MODE: tl.constexpr, HAS_D: tl.constexpr,
    LATER: tl.constexpr, START: tl.constexpr, EVERY: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """All gradients of each segment, from its last token to its first.

    States are computed from the kept ones again: first those before every fourth token of EVERY, which go to `scratch`,
    then four at a time. Gradients of B, C and log_decay are sums over the program's channels, gradients of A and D over
    the segment. LATER: the gradient of the state after the segment is 0, zero; 1, the row's; 2, the segment's.
    START: the gradient of the state before the segment is wanted.
    """
    block, segment, begin, length = segment_place(begins, ends, DIM, DR, DL)
    o_n, o_d = state_index(NR, NL, DL), channel_index(block, DR, NL, DL)
    g = tl.zeros((NR, DR, NL, DL), tl.float32)
    b_dA = tl.zeros((NR, DR, NL, DL), tl.float32)
    b_dD = tl.zeros((1, DR, NL, DL), tl.float32)
    row = tl.load(rows + segment)
    x += begin * DIM
    dt += begin * DT_STRIDE
    BC += begin * N
    dy += begin * DIM
    dx += begin * DIM
    ddt += begin * DIM
    dBC += (block.to(tl.int64) * tokens + begin) * N
    dlog += block.to(tl.int64) * tokens + begin
    log_decay += begin
    SIZE: tl.constexpr = NR * DR * NL * DL
    scratch += tl.program_id(0).to(tl.int64) * (EVERY // 4 * SIZE)
    register = tl.arange(0, NR)[:, None, None, None] * DR + tl.arange(0, DR)[None, :, None, None]
    lane = tl.arange(0, NL)[None, None, :, None] * DL + tl.arange(0, DL)[None, None, None, :]
    o_s = tl.max_contiguous((register * (NL * DL) + lane).to(tl.int64), [1, 1, 1, 1])
    b_A = load_rates(A, o_n, o_d, N, DIM, MODE)
    b_D = tl.zeros((1, DR, NL, DL), tl.float32)
    if HAS_D:
        b_D = tl.load(D + o_d, mask=o_d < DIM, other=0.0).to(tl.float32)
    if LATER:
        g = load_state(later, segment if LATER == 2 else row, o_n, o_d, N, DIM, LATER == 2)
    pieces = tl.cdiv(length, EVERY)
    for k in range(0, pieces):
        piece = pieces - 1 - k
        h = load_state(checkpoints, begin // EVERY + segment + piece, o_n, o_d, N, DIM, True)
        groups = tl.cdiv(tl.minimum(length - piece * EVERY, EVERY), 4)
        # as in the forward kernel, the steps and inputs of the next four tokens are on their way
        t = piece * EVERY
        dts = load_four_rows(dt, t, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT, ZERO=True)
        xs = load_four_rows(x, t, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=False)
        for j in range(0, groups - 1):
            tl.store(scratch + j * SIZE + o_s, h)
            t = piece * EVERY + j * 4
            for i in tl.static_range(4):
                b_dt, b_x = dts[0], xs[0]
                dt_ahead = load_row(dt, t + 4, i, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT, ZERO=True)
                x_ahead = load_row(x, t + 4, i, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=False)
                dts, xs = (dts[1], dts[2], dts[3], dt_ahead), (xs[1], xs[2], xs[3], x_ahead)
                b_B, _ = load_weights(BC, t, i, length, o_n, N, EVEN_N, EXACT)
                h = decay_of(b_dt, b_A, log_decay, t, i, length, MODE, EXACT) * h + (b_dt * b_x) * b_B
        tl.debug_barrier()
        h0 = h
        for j in range(0, groups):
            group = groups - 1 - j
            t = piece * EVERY + group * 4
            if j > 0:
                h0 = tl.load(scratch + group * SIZE + o_s)
                dts = load_four_rows(dt, t, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT, ZERO=True)
                xs = load_four_rows(x, t, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=False)
            dys = load_four_rows(dy, t, length, o_d, DIM, DIM, EVEN_D, EXACT, ZERO=True)
            states, decays, Bs, Cs = (h0,), (), (), ()
            for i in tl.static_range(4):
                b_B, b_C = load_weights(BC, t, i, length, o_n, N, EVEN_N, EXACT)
                Bs += (b_B,)
                Cs += (b_C,)
            for i in tl.static_range(4):
                decays += (decay_of(dts[i], b_A, log_decay, t, i, length, MODE, EXACT),)
            for i in tl.static_range(4):
                states += (decays[i] * states[i] + (dts[i] * xs[i]) * Bs[i],)
            for i in tl.static_range(3, -1, -1):
                g, b_dA, b_dD = _token_backward(
                    g, b_dA, b_dD, states[i + 1], states[i], decays[i], dts[i], xs[i], dys[i], Bs[i], Cs[i], b_A, b_D,
                    t, i, length, o_n, o_d, dx, ddt, dBC, dlog, DIM, N, MODE, HAS_D, NL, DL, EVEN_D, EVEN_N, EXACT,
                )  # fmt: skip
        tl.debug_barrier()
    if START:
        store_state(dstart, row, g, o_n, o_d, N, DIM, False)
    if MODE == FULL:
        store_state(dA, segment, b_dA, o_n, o_d, N, DIM, False)
    if HAS_D:
        tl.store(dD + segment.to(tl.int64) * DIM + o_d, b_dD, mask=o_d < DIM)
