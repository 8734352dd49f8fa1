"""The selective scan on Triton: the kernels.

A program owns a few channels with all their states and walks one segment of the sequence token by token, the states in
registers. They are held as `[NR, DR, NL, DL]`: state `n = nr * NL + nl` and channel `dr * DL + dl`, where `NL * DL` is
the 32 lanes of the program's one warp. Splitting the lanes over states and channels keeps both sums, over states for
outputs and over channels for the gradients of B and C, to a few exchanges between lanes.

All tensors have four dimensions, whose last two are the lanes, and every offset is marked as not contiguous: so the
compiler gives all of them one layout, and nothing moves between lanes but in the sums.

B and C come as pairs of float32 in one 64-bit integer, which one load brings. EXACT says that all segments are
multiples of four tokens, the tokens of one step of the loops: nothing then needs to be guarded.
"""

import triton
import triton.language as tl

FULL = tl.constexpr(0)
ONE = tl.constexpr(1)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _states(NR: tl.constexpr, NL: tl.constexpr, DL: tl.constexpr):
    """Indices of states `[NR, 1, NL, DL]`."""
    n = tl.arange(0, NR)[:, None, None, None] * NL + tl.arange(0, NL)[None, None, :, None]
    return tl.max_contiguous((n + tl.zeros((1, 1, 1, DL), tl.int32)).to(tl.int64), [1, 1, 1, 1])


@triton.jit
def _channels(block, DR: tl.constexpr, NL: tl.constexpr, DL: tl.constexpr):
    """Indices of channels `[1, DR, NL, DL]`."""
    d = tl.arange(0, DR)[None, :, None, None] * DL + tl.arange(0, DL)[None, None, None, :]
    d = (d + tl.zeros((1, 1, NL, 1), tl.int32)).to(tl.int64) + block * (DR * DL)
    return tl.max_contiguous(d, [1, 1, 1, 1])


@triton.jit
def _sum_states(v, NL: tl.constexpr, DL: tl.constexpr):
    v = tl.sum(tl.sum(v, axis=0, keep_dims=True), axis=2, keep_dims=True)
    return tl.broadcast_to(v, (1, v.shape[1], NL, DL))


@triton.jit
def _sum_channels(v, NL: tl.constexpr, DL: tl.constexpr):
    v = tl.sum(tl.sum(v, axis=1, keep_dims=True), axis=3, keep_dims=True)
    return tl.broadcast_to(v, (v.shape[0], 1, NL, DL))


@triton.jit
def _token(p, t, i: tl.constexpr, length, STRIDE: tl.constexpr, EXACT: tl.constexpr):
    """Where token t + i begins, or the last one beyond the segment."""
    return p + t * STRIDE + i * STRIDE if EXACT else p + tl.minimum(t + i, length - 1) * STRIDE


@triton.jit
def _row(p, t, i: tl.constexpr, length, o_d, DIM: tl.constexpr, STRIDE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip  # noqa: E501
    """A row of channels in float32; beyond the segment that of its last token."""
    q = _token(p, t, i, length, STRIDE, EXACT) + o_d
    v = tl.load(q) if EVEN else tl.load(q, mask=o_d < DIM, other=0.0)
    return v.to(tl.float32)


@triton.jit
def _zero_row(p, t, i: tl.constexpr, length, o_d, DIM: tl.constexpr, STRIDE: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip  # noqa: E501
    """A row of channels in float32; zeros beyond the segment: steps that leave the states alone."""
    v = _row(p, t, i, length, o_d, DIM, STRIDE, EVEN, EXACT)
    if not EXACT:
        v = tl.where(t + i < length, v, 0.0)
    return v


@triton.jit
def _weights(BC, t, i: tl.constexpr, length, o_n, N: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr):
    """B and C of a token."""
    q = _token(BC, t, i, length, N, EXACT) + o_n
    v = tl.load(q) if EVEN else tl.load(q, mask=o_n < N, other=0)
    return v.to(tl.int32).to(tl.float32, bitcast=True), (v >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _write(p, t, i: tl.constexpr, length, o_d, v, DIM: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr):
    q = p + t * DIM + i * DIM + o_d
    v = v.to(p.dtype.element_ty)
    if EVEN and EXACT:
        tl.store(q, v)
    elif EXACT:
        tl.store(q, v, mask=o_d < DIM)
    else:
        tl.store(q, v, mask=o_d < tl.where(t + i < length, DIM, 0))


@triton.jit
def _log(log_decay, t, i: tl.constexpr, length, MODE: tl.constexpr, EXACT: tl.constexpr):
    """The log decay of a token with ONE, 0 beyond the segment."""
    if MODE == ONE:
        log = tl.load(_token(log_decay, t, i, length, 1, EXACT)).to(tl.float32)
        if not EXACT:
            log = tl.where(t + i < length, log, 0.0)
    else:
        log = 0.0
    return log


@triton.jit
def _decay(b_dt, b_A, log_decay, t, i: tl.constexpr, length, MODE: tl.constexpr, EXACT: tl.constexpr):
    """`a_t`; `b_A` holds `A / ln 2`."""
    if MODE == FULL:
        a = tl.exp2(b_dt * b_A)
    elif MODE == ONE:
        a = tl.exp2(_log(log_decay, t, i, length, MODE, EXACT) * LOG2_E)
    else:
        a = 1.0
    return a


@triton.jit
def _state_offsets(o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr):
    """Offsets in a state `[d, N]`, or `[N, d]` with INNER."""
    offsets = o_n * DIM + o_d if INNER else o_d * N + o_n
    return tl.max_contiguous(offsets + 0, [1, 1, 1, 1])


@triton.jit
def _load_state(p, index, o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr):
    p += index.to(tl.int64) * (N * DIM)
    ok = (o_n < N) & (o_d < DIM)
    return tl.load(p + _state_offsets(o_n, o_d, N, DIM, INNER), mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _store_state(p, index, h, o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr):
    p += index.to(tl.int64) * (N * DIM)
    ok = (o_n < N) & (o_d < DIM)
    tl.store(p + _state_offsets(o_n, o_d, N, DIM, INNER), h, mask=ok)


@triton.jit
def _rates(A, o_n, o_d, N: tl.constexpr, DIM: tl.constexpr, MODE: tl.constexpr):
    """`A / ln 2`."""
    if MODE == FULL:
        p = A + tl.max_contiguous(o_d * N + o_n, [1, 1, 1, 1])
        b_A = tl.load(p, mask=(o_n < N) & (o_d < DIM), other=0.0).to(tl.float32) * LOG2_E
    else:
        b_A = 0.0
    return b_A


@triton.jit
def _place(begins, ends, DIM: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr):
    """The program's block of channels, its segment, the first token of that and its length."""
    blocks: tl.constexpr = (DIM + DR * DL - 1) // (DR * DL)
    block, segment = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    begin = tl.load(begins + segment).to(tl.int64)
    return block, segment, begin, (tl.load(ends + segment) - begin).to(tl.int32)


@triton.jit
def _store_total(total, segment, block, o_d, sum_dt, sum_log, DIM: tl.constexpr, MODE: tl.constexpr):
    if MODE == FULL:
        tl.store(total + segment.to(tl.int64) * DIM + o_d, sum_dt, mask=o_d < DIM)
    elif MODE == ONE:
        tl.store(total + segment, sum_log, mask=block == 0)


@triton.jit
def carry_kernel(
    x, dt, A, BC, log_decay, begins, ends, carry, total,
    DIM: tl.constexpr, N: tl.constexpr, DT_STRIDE: tl.constexpr, MODE: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The final state of each segment that starts from zero, and the sum of its steps (log decays with ONE)."""
    block, segment, begin, length = _place(begins, ends, DIM, DR, DL)
    if length <= 0:
        return
    o_n, o_d = _states(NR, NL, DL), _channels(block, DR, NL, DL)
    x += begin * DIM
    dt += begin * DT_STRIDE
    BC += begin * N
    log_decay += begin
    b_A = _rates(A, o_n, o_d, N, DIM, MODE)
    h = tl.zeros((NR, DR, NL, DL), tl.float32)
    sum_dt = tl.zeros((1, DR, NL, DL), tl.float32)
    sum_log = 0.0
    for t in range(0, length, 4):
        for i in tl.static_range(4):
            b_dt = _zero_row(dt, t, i, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
            b_x = _row(x, t, i, length, o_d, DIM, DIM, EVEN_D, EXACT)
            b_B, _ = _weights(BC, t, i, length, o_n, N, EVEN_N, EXACT)
            h = _decay(b_dt, b_A, log_decay, t, i, length, MODE, EXACT) * h + (b_dt * b_x) * b_B
            sum_dt += b_dt
            sum_log += _log(log_decay, t, i, length, MODE, EXACT)
    _store_state(carry, segment, h, o_n, o_d, N, DIM, True)
    _store_total(total, segment, block, o_d, sum_dt, sum_log, DIM, MODE)


@triton.jit
def reverse_carry_kernel(
    dt, A, BC, log_decay, dy, begins, ends, carry, total,
    DIM: tl.constexpr, N: tl.constexpr, DT_STRIDE: tl.constexpr, MODE: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of the state before each segment, from its own outputs, and its total as in `carry_kernel`."""
    block, segment, begin, length = _place(begins, ends, DIM, DR, DL)
    if length <= 0:
        return
    o_n, o_d = _states(NR, NL, DL), _channels(block, DR, NL, DL)
    dt += begin * DT_STRIDE
    BC += begin * N
    dy += begin * DIM
    log_decay += begin
    b_A = _rates(A, o_n, o_d, N, DIM, MODE)
    g = tl.zeros((NR, DR, NL, DL), tl.float32)
    sum_dt = tl.zeros((1, DR, NL, DL), tl.float32)
    sum_log = 0.0
    groups = tl.cdiv(length, 4)
    for k in range(0, groups):
        t = (groups - 1 - k) * 4
        for j in tl.static_range(4):
            b_dt = _zero_row(dt, t, 3 - j, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
            b_dy = _zero_row(dy, t, 3 - j, length, o_d, DIM, DIM, EVEN_D, EXACT)
            _, b_C = _weights(BC, t, 3 - j, length, o_n, N, EVEN_N, EXACT)
            g = (g + b_dy * b_C) * _decay(b_dt, b_A, log_decay, t, 3 - j, length, MODE, EXACT)
            sum_dt += b_dt
            sum_log += _log(log_decay, t, 3 - j, length, MODE, EXACT)
    _store_state(carry, segment, g, o_n, o_d, N, DIM, True)
    _store_total(total, segment, block, o_d, sum_dt, sum_log, DIM, MODE)


@triton.jit
def chain_kernel(
    A, total, carry, given, last, first_segment,
    DIM: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr, HAS_GIVEN: tl.constexpr, REVERSE: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
):  # fmt: skip
    """Replace what each segment carries by the state it starts from (with REVERSE, the gradient it ends with)."""
    blocks: tl.constexpr = (DIM + DR * DL - 1) // (DR * DL)
    block, row = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    o_n, o_d = _states(NR, NL, DL), _channels(block, DR, NL, DL)
    b_A = _rates(A, o_n, o_d, N, DIM, MODE)
    h = tl.zeros((NR, DR, NL, DL), tl.float32)
    if HAS_GIVEN:
        h = _load_state(given, row, o_n, o_d, N, DIM, False)
    first, stop = tl.load(first_segment + row), tl.load(first_segment + row + 1)
    for k in range(0, stop - first):
        segment = first + k
        if REVERSE:
            segment = stop - 1 - k
        own = _load_state(carry, segment, o_n, o_d, N, DIM, True)
        _store_state(carry, segment, h, o_n, o_d, N, DIM, True)
        if MODE == FULL:
            b_total = tl.load(total + segment.to(tl.int64) * DIM + o_d, mask=o_d < DIM, other=0.0)
            h = h * tl.exp2(b_total * b_A) + own
        elif MODE == ONE:
            h = h * tl.exp2(tl.load(total + segment) * LOG2_E) + own
        else:
            h = h + own
    _store_state(last, row, h, o_n, o_d, N, DIM, False)


@triton.jit
def forward_kernel(  # noqa: C901  most branches are settled when it is compiled
    x, dt, A, BC, D, log_decay, start, y, final, checkpoints, begins, ends, rows,
    DIM: tl.constexpr, N: tl.constexpr, DT_STRIDE: tl.constexpr, MODE: tl.constexpr, HAS_D: tl.constexpr,
    START: tl.constexpr, FINAL: tl.constexpr, EVERY: tl.constexpr,
    NR: tl.constexpr, NL: tl.constexpr, DR: tl.constexpr, DL: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Outputs of each segment, the state before every EVERY tokens of it (0: none) and, with FINAL, after it.

    START: 0, from zero; 1, from the state of the row; 2, from that of the segment.
    """
    block, segment, begin, length = _place(begins, ends, DIM, DR, DL)
    if length <= 0:
        return
    o_n, o_d = _states(NR, NL, DL), _channels(block, DR, NL, DL)
    row = tl.load(rows + segment)
    x += begin * DIM
    dt += begin * DT_STRIDE
    BC += begin * N
    y += begin * DIM
    log_decay += begin
    b_A = _rates(A, o_n, o_d, N, DIM, MODE)
    b_D = tl.zeros((1, DR, NL, DL), tl.float32)
    if HAS_D:
        b_D = tl.load(D + o_d, mask=o_d < DIM, other=0.0).to(tl.float32)
    h = tl.zeros((NR, DR, NL, DL), tl.float32)
    if START == 1:
        h = _load_state(start, row, o_n, o_d, N, DIM, False)
    elif START == 2:
        h = _load_state(start, segment, o_n, o_d, N, DIM, True)
    # the steps and inputs of the next four tokens are on their way while four are computed
    dt0 = _zero_row(dt, 0, 0, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
    dt1 = _zero_row(dt, 0, 1, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
    dt2 = _zero_row(dt, 0, 2, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
    dt3 = _zero_row(dt, 0, 3, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
    x0 = _row(x, 0, 0, length, o_d, DIM, DIM, EVEN_D, EXACT)
    x1 = _row(x, 0, 1, length, o_d, DIM, DIM, EVEN_D, EXACT)
    x2 = _row(x, 0, 2, length, o_d, DIM, DIM, EVEN_D, EXACT)
    x3 = _row(x, 0, 3, length, o_d, DIM, DIM, EVEN_D, EXACT)
    for t in range(0, length, 4):
        if EVERY > 0:  # noqa: SIM102  the remainder by 0 must not be compiled
            if t % EVERY == 0:
                slot = begin // EVERY + segment + t // EVERY
                _store_state(checkpoints, slot, h, o_n, o_d, N, DIM, True)
        ahead = tl.minimum(t + 4, (length - 1) // 4 * 4)
        for i in tl.static_range(4):
            b_dt, b_x = dt0, x0
            dt0, x0 = dt1, x1
            dt1, x1 = dt2, x2
            dt2, x2 = dt3, x3
            dt3 = _zero_row(dt, ahead, i, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
            x3 = _row(x, ahead, i, length, o_d, DIM, DIM, EVEN_D, EXACT)
            b_B, b_C = _weights(BC, t, i, length, o_n, N, EVEN_N, EXACT)
            h = _decay(b_dt, b_A, log_decay, t, i, length, MODE, EXACT) * h + (b_dt * b_x) * b_B
            b_y = _sum_states(h * b_C, NL, DL)
            if HAS_D:
                b_y += b_D * b_x
            _write(y, t, i, length, o_d, b_y, DIM, EVEN_D, EXACT)
    if FINAL:
        _store_state(final, row, h, o_n, o_d, N, DIM, False)


@triton.jit
def _token_backward(
    g, b_dA, b_dD, h, h_before, a, b_dt, b_x, b_dy, b_B, b_C, b_A, b_D, t, i: tl.constexpr, length, o_n, o_d,
    dx, ddt, dBC, dlog, DIM: tl.constexpr, N: tl.constexpr, MODE: tl.constexpr, HAS_D: tl.constexpr,
    NL: tl.constexpr, DL: tl.constexpr, EVEN_D: tl.constexpr, EVEN_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Token t + i, given the gradient `g` of its state `h` from later tokens; that of the state before is returned."""
    g = g + b_dy * b_C
    b_dC = _sum_channels(b_dy * h, NL, DL).to(tl.int32, bitcast=True).to(tl.int64)
    b_dB = _sum_channels((b_dt * b_x) * g, NL, DL).to(tl.int32, bitcast=True).to(tl.int64)
    _write(dBC, t, i, length, o_n, (b_dC << 32) | (b_dB & 0xFFFFFFFF), N, EVEN_N, EXACT)
    b_du = _sum_states(g * b_B, NL, DL)
    g = g * a
    b_ddt = b_du * b_x
    if MODE == FULL:
        through = g * h_before
        b_ddt += _sum_states(through * b_A, NL, DL) * LN_2
        b_dA += through * b_dt
    elif MODE == ONE:
        inside = t + i < length
        total = tl.sum(tl.sum(tl.sum(tl.sum(g * h_before, axis=3), axis=2), axis=1), axis=0)
        tl.store(dlog + t + i, total, mask=inside)
    b_dx = b_du * b_dt
    if HAS_D:
        b_dx += b_D * b_dy
        b_dD += b_dy * b_x
    _write(ddt, t, i, length, o_d, b_ddt, DIM, EVEN_D, EXACT)
    _write(dx, t, i, length, o_d, b_dx, DIM, EVEN_D, EXACT)
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
    then four at a time. Gradients of B, C and log_decay are sums over the program's channels, those of A and D over the
    segment. LATER: the gradient of the state after the segment is 0, zero; 1, that of the row; 2, that of the segment.
    START: the gradient of the state before the segment is wanted.
    """
    block, segment, begin, length = _place(begins, ends, DIM, DR, DL)
    o_n, o_d = _states(NR, NL, DL), _channels(block, DR, NL, DL)
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
    b_A = _rates(A, o_n, o_d, N, DIM, MODE)
    b_D = tl.zeros((1, DR, NL, DL), tl.float32)
    if HAS_D:
        b_D = tl.load(D + o_d, mask=o_d < DIM, other=0.0).to(tl.float32)
    if LATER == 1:
        g = _load_state(later, row, o_n, o_d, N, DIM, False)
    elif LATER == 2:
        g = _load_state(later, segment, o_n, o_d, N, DIM, True)
    pieces = tl.cdiv(length, EVERY)
    for k in range(0, pieces):
        piece = pieces - 1 - k
        h = _load_state(checkpoints, begin // EVERY + segment + piece, o_n, o_d, N, DIM, True)
        groups = tl.cdiv(tl.minimum(length - piece * EVERY, EVERY), 4)
        # as in the forward kernel, the steps and inputs of the next four tokens are on their way
        t = piece * EVERY
        dt0 = _zero_row(dt, t, 0, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
        dt1 = _zero_row(dt, t, 1, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
        dt2 = _zero_row(dt, t, 2, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
        dt3 = _zero_row(dt, t, 3, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
        x0 = _row(x, t, 0, length, o_d, DIM, DIM, EVEN_D, EXACT)
        x1 = _row(x, t, 1, length, o_d, DIM, DIM, EVEN_D, EXACT)
        x2 = _row(x, t, 2, length, o_d, DIM, DIM, EVEN_D, EXACT)
        x3 = _row(x, t, 3, length, o_d, DIM, DIM, EVEN_D, EXACT)
        for j in range(0, groups - 1):
            tl.store(scratch + j * SIZE + o_s, h)
            t = piece * EVERY + j * 4
            for i in tl.static_range(4):
                b_dt, b_x = dt0, x0
                dt0, x0 = dt1, x1
                dt1, x1 = dt2, x2
                dt2, x2 = dt3, x3
                dt3 = _zero_row(dt, t + 4, i, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
                x3 = _row(x, t + 4, i, length, o_d, DIM, DIM, EVEN_D, EXACT)
                b_B, _ = _weights(BC, t, i, length, o_n, N, EVEN_N, EXACT)
                h = _decay(b_dt, b_A, log_decay, t, i, length, MODE, EXACT) * h + (b_dt * b_x) * b_B
        tl.debug_barrier()
        h0 = h
        for j in range(0, groups):
            group = groups - 1 - j
            t = piece * EVERY + group * 4
            if j > 0:
                h0 = tl.load(scratch + group * SIZE + o_s)
                dt0 = _zero_row(dt, t, 0, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
                dt1 = _zero_row(dt, t, 1, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
                dt2 = _zero_row(dt, t, 2, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
                dt3 = _zero_row(dt, t, 3, length, o_d, DIM, DT_STRIDE, EVEN_D, EXACT)
                x0 = _row(x, t, 0, length, o_d, DIM, DIM, EVEN_D, EXACT)
                x1 = _row(x, t, 1, length, o_d, DIM, DIM, EVEN_D, EXACT)
                x2 = _row(x, t, 2, length, o_d, DIM, DIM, EVEN_D, EXACT)
                x3 = _row(x, t, 3, length, o_d, DIM, DIM, EVEN_D, EXACT)
            dy0 = _zero_row(dy, t, 0, length, o_d, DIM, DIM, EVEN_D, EXACT)
            dy1 = _zero_row(dy, t, 1, length, o_d, DIM, DIM, EVEN_D, EXACT)
            dy2 = _zero_row(dy, t, 2, length, o_d, DIM, DIM, EVEN_D, EXACT)
            dy3 = _zero_row(dy, t, 3, length, o_d, DIM, DIM, EVEN_D, EXACT)
            B0, C0 = _weights(BC, t, 0, length, o_n, N, EVEN_N, EXACT)
            B1, C1 = _weights(BC, t, 1, length, o_n, N, EVEN_N, EXACT)
            B2, C2 = _weights(BC, t, 2, length, o_n, N, EVEN_N, EXACT)
            B3, C3 = _weights(BC, t, 3, length, o_n, N, EVEN_N, EXACT)
            a0 = _decay(dt0, b_A, log_decay, t, 0, length, MODE, EXACT)
            a1 = _decay(dt1, b_A, log_decay, t, 1, length, MODE, EXACT)
            a2 = _decay(dt2, b_A, log_decay, t, 2, length, MODE, EXACT)
            a3 = _decay(dt3, b_A, log_decay, t, 3, length, MODE, EXACT)
            h1 = a0 * h0 + (dt0 * x0) * B0
            h2 = a1 * h1 + (dt1 * x1) * B1
            h3 = a2 * h2 + (dt2 * x2) * B2
            h4 = a3 * h3 + (dt3 * x3) * B3
            g, b_dA, b_dD = _token_backward(
                g, b_dA, b_dD, h4, h3, a3, dt3, x3, dy3, B3, C3, b_A, b_D, t, 3, length, o_n, o_d, dx, ddt, dBC, dlog,
                DIM, N, MODE, HAS_D, NL, DL, EVEN_D, EVEN_N, EXACT,
            )  # fmt: skip
            g, b_dA, b_dD = _token_backward(
                g, b_dA, b_dD, h3, h2, a2, dt2, x2, dy2, B2, C2, b_A, b_D, t, 2, length, o_n, o_d, dx, ddt, dBC, dlog,
                DIM, N, MODE, HAS_D, NL, DL, EVEN_D, EVEN_N, EXACT,
            )  # fmt: skip
            g, b_dA, b_dD = _token_backward(
                g, b_dA, b_dD, h2, h1, a1, dt1, x1, dy1, B1, C1, b_A, b_D, t, 1, length, o_n, o_d, dx, ddt, dBC, dlog,
                DIM, N, MODE, HAS_D, NL, DL, EVEN_D, EVEN_N, EXACT,
            )  # fmt: skip
            g, b_dA, b_dD = _token_backward(
                g, b_dA, b_dD, h1, h0, a0, dt0, x0, dy0, B0, C0, b_A, b_D, t, 0, length, o_n, o_d, dx, ddt, dBC, dlog,
                DIM, N, MODE, HAS_D, NL, DL, EVEN_D, EVEN_N, EXACT,
            )  # fmt: skip
        tl.debug_barrier()
    if START:
        _store_state(dstart, row, g, o_n, o_d, N, DIM, False)
    if MODE == FULL:
        _store_state(dA, segment, b_dA, o_n, o_d, N, DIM, False)
    if HAS_D:
        tl.store(dD + segment.to(tl.int64) * DIM + o_d, b_dD, mask=o_d < DIM)
