"""The kernels of Mamba-2's recurrence in Triton; README.md has the formulas.

Tokens of all rows or documents follow each other. A chunk has BT tokens of one document, fewer at its end; its
number runs over all documents. `b_a` is the running sum of log decays (to base 2) in a chunk.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def chunk_tokens(chunk, length, starts, stops, BT: tl.constexpr, PACKED: tl.constexpr):
    """The tokens of a chunk `[BT]`, and which of them exist."""
    if PACKED:
        start, stop = tl.load(starts + chunk).to(tl.int64), tl.load(stops + chunk).to(tl.int64)
    else:
        chunks = tl.cdiv(length, BT)
        row = chunk // chunks
        start = row.to(tl.int64) * length + (chunk - row * chunks) * BT
        stop = tl.minimum(start + BT, (row.to(tl.int64) + 1) * length)
    o_t = start + tl.arange(0, BT)
    return o_t, o_t < stop


@triton.jit
def running_decay(g, o_t, m_t, head, g_token, g_head, DECAYS: tl.constexpr):
    """`b_a` and its last value; both are zero without decay."""
    if DECAYS:
        b_g = tl.load(g + o_t * g_token + head * g_head, mask=m_t, other=0.0) * LOG2E
    else:
        b_g = tl.zeros_like(o_t).to(tl.float32)
    return tl.cumsum(b_g, 0), tl.sum(b_g, 0)


@triton.jit
def load_rows(t, o_t, m_t, o_d, token_stride, D):
    """`[BT, D]` of a tensor whose rows are tokens."""
    return tl.load(t + o_t[:, None] * token_stride + o_d[None, :], mask=m_t[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def state_kernel(
    x, g, B, initial, states, final, cu_seqlens, first, length,
    g_token, g_head, B_token,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, INITIAL: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk, chunk after chunk; with REVERSE the gradient of the state after each chunk.

    With REVERSE, x is dy, B is C, `initial` is the final state's gradient and `final` the initial state's."""
    document, head = tl.program_id(0) // H, tl.program_id(0) % H
    i_n, i_p = tl.program_id(1) // tl.cdiv(P, BP), tl.program_id(1) % tl.cdiv(P, BP)
    if PACKED:
        start, stop = tl.load(cu_seqlens + document).to(tl.int64), tl.load(cu_seqlens + document + 1).to(tl.int64)
        chunk = tl.load(first + document).to(tl.int64)
    else:
        start = document.to(tl.int64) * length
        stop = start + length
        chunk = document.to(tl.int64) * tl.cdiv(length, BT)
    chunks = tl.cdiv(stop - start, BT).to(tl.int32)
    o_n, o_p = i_n * BN + tl.arange(0, BN), i_p * BP + tl.arange(0, BP)
    o_s = o_n[:, None] * P + o_p[None, :]
    m_s = (o_n < N)[:, None] & (o_p < P)[None, :]
    row = tl.program_id(0).to(tl.int64) * N * P
    if INITIAL:
        b_state = tl.load(initial + row + o_s, mask=m_s, other=0.0).to(tl.float32)
    else:
        b_state = tl.zeros([BN, BP], dtype=tl.float32)
    for step in range(chunks):
        i = chunks - 1 - step if REVERSE else step
        o_t = start + i * BT + tl.arange(0, BT)
        m_t = o_t < stop
        p_states = states + ((chunk + i) * H + head) * N * P + o_s
        tl.store(p_states, b_state.to(states.dtype.element_ty), mask=m_s)
        b_a, b_last = running_decay(g, o_t, m_t, head, g_token, g_head, DECAYS)
        b_x = load_rows(x + head * P, o_t, m_t, o_p, H * P, P)
        b_B = load_rows(B + (head // R) * N, o_t, m_t, o_n, B_token, N)
        b_left = b_a if REVERSE else b_last - b_a
        b_x = (b_x * tl.exp2(b_left)[:, None]).to(b_x.dtype)
        b_state = b_state * tl.exp2(b_last) + tl.dot(tl.trans(b_B), b_x, input_precision=PRECISION)
    tl.store(final + row + o_s, b_state, mask=m_s)


@triton.jit
def output_kernel(
    x, g, B, C, states, y, starts, stops, length,
    g_token, g_head, B_token, C_token,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`y` of one chunk and HEADS heads of one group, which share `C B^T`."""
    chunk, first_head = tl.program_id(0), tl.program_id(1) * HEADS
    group = first_head // R
    o_t, m_t = chunk_tokens(chunk, length, starts, stops, BT, PACKED)
    o_n, o_p = tl.arange(0, BN), tl.arange(0, BP)
    causal = o_t[:, None] >= o_t[None, :]
    m_s = (o_n < N)[:, None] & (o_p < P)[None, :]
    b_C = load_rows(C + group * N, o_t, m_t, o_n, C_token, N)
    b_B = load_rows(B + group * N, o_t, m_t, o_n, B_token, N)
    b_s = tl.dot(b_C, tl.trans(b_B), input_precision=PRECISION)
    for head in range(first_head, first_head + HEADS):
        b_a, _ = running_decay(g, o_t, m_t, head, g_token, g_head, DECAYS)
        b_x = load_rows(x + head * P, o_t, m_t, o_p, H * P, P)
        p_states = states + (chunk.to(tl.int64) * H + head) * N * P + o_n[:, None] * P + o_p[None, :]
        b_h = tl.load(p_states, mask=m_s, other=0.0)
        b_y = tl.dot(b_C, b_h, input_precision=PRECISION) * tl.exp2(b_a)[:, None]
        b_w = b_s * tl.exp2(tl.where(causal, b_a[:, None] - b_a[None, :], float("-inf")))
        b_y = tl.dot(b_w.to(b_x.dtype), b_x, b_y, input_precision=PRECISION)
        p_y = y + head * P + o_t[:, None] * (H * P) + o_p[None, :]
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_t[:, None] & (o_p < P)[None, :])


@triton.jit
def input_gradient_kernel(
    x, g, B, C, states, dy, dstates, dx, dg, starts, stops, length,
    g_token, g_head, B_token, C_token,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of `x` and of the log decays, of one chunk and HEADS heads of one group."""
    chunk, first_head = tl.program_id(0), tl.program_id(1) * HEADS
    group = first_head // R
    o_t, m_t = chunk_tokens(chunk, length, starts, stops, BT, PACKED)
    o_n, o_p = tl.arange(0, BN), tl.arange(0, BP)
    m_s = (o_n < N)[:, None] & (o_p < P)[None, :]
    b_B = load_rows(B + group * N, o_t, m_t, o_n, B_token, N)
    b_C = load_rows(C + group * N, o_t, m_t, o_n, C_token, N)
    b_s = tl.dot(b_B, tl.trans(b_C), input_precision=PRECISION)  # rows are keys here
    for head in range(first_head, first_head + HEADS):
        b_a, b_last = running_decay(g, o_t, m_t, head, g_token, g_head, DECAYS)
        b_x = load_rows(x + head * P, o_t, m_t, o_p, H * P, P)
        b_dy = load_rows(dy + head * P, o_t, m_t, o_p, H * P, P)
        o_s = (chunk.to(tl.int64) * H + head) * N * P + o_n[:, None] * P + o_p[None, :]
        b_dh = tl.load(dstates + o_s, mask=m_s, other=0.0)
        later = o_t[None, :] >= o_t[:, None]
        b_w = b_s * tl.exp2(tl.where(later, b_a[None, :] - b_a[:, None], float("-inf")))
        b_left = tl.dot(b_B, b_dh, input_precision=PRECISION) * tl.exp2(b_last - b_a)[:, None]
        b_dx = tl.dot(b_w.to(b_dy.dtype), b_dy, b_left, input_precision=PRECISION)
        p_dx = dx + head * P + o_t[:, None] * (H * P) + o_p[None, :]
        tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m_t[:, None] & (o_p < P)[None, :])
        if DECAYS:
            # a path from a key to a later query, or to or from a state, passes all decays in between
            b_h = tl.load(states + o_s, mask=m_s, other=0.0)
            b_pair = b_w * tl.dot(b_x, tl.trans(b_dy), input_precision=PRECISION)
            b_pair = tl.where(o_t[None, :] > o_t[:, None], b_pair, 0.0)
            b_in = tl.dot(b_C, b_h, input_precision=PRECISION) * tl.exp2(b_a)[:, None]
            b_in = tl.sum(b_in * b_dy, 1) + tl.sum(b_pair, 0)
            b_left = tl.sum(b_left * b_x, 1)
            b_through = tl.sum(tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1), 0) * tl.exp2(b_last)
            b_da = b_in - b_left - tl.sum(b_pair, 1)
            b_dg = tl.cumsum(b_da, 0, reverse=True) + b_through + tl.sum(b_left, 0)
            tl.store(dg + o_t * H + head, b_dg, mask=m_t)


@triton.jit
def projection_gradient_kernel(
    x, g, B, C, states, dy, dstates, dB, dC, starts, stops, length,
    g_token, g_head, B_token, C_token, part_stride,
    H: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, HEADS: tl.constexpr,
    PACKED: tl.constexpr, DECAYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The contribution of HEADS heads of one group to BN columns of the gradients of `B` and `C` of one chunk."""
    chunk, first_head = tl.program_id(0), tl.program_id(1) * HEADS
    group, part = first_head // R, (first_head % R) // HEADS
    o_t, m_t = chunk_tokens(chunk, length, starts, stops, BT, PACKED)
    o_n, o_p = tl.program_id(2) * BN + tl.arange(0, BN), tl.arange(0, BP)
    m_s = (o_n < N)[:, None] & (o_p < P)[None, :]
    causal = o_t[:, None] >= o_t[None, :]
    b_B = load_rows(B + group * N, o_t, m_t, o_n, B_token, N)
    b_C = load_rows(C + group * N, o_t, m_t, o_n, C_token, N)
    b_dB = tl.zeros([BT, BN], dtype=tl.float32)
    b_dC = tl.zeros([BT, BN], dtype=tl.float32)
    for head in range(first_head, first_head + HEADS):
        b_a, b_last = running_decay(g, o_t, m_t, head, g_token, g_head, DECAYS)
        b_x = load_rows(x + head * P, o_t, m_t, o_p, H * P, P)
        b_dy = load_rows(dy + head * P, o_t, m_t, o_p, H * P, P)
        b_w = tl.dot(b_dy, tl.trans(b_x), input_precision=PRECISION)
        b_w = b_w * tl.exp2(tl.where(causal, b_a[:, None] - b_a[None, :], float("-inf")))
        b_w = b_w.to(b_B.dtype)
        b_dC = tl.dot(b_w, b_B, b_dC, input_precision=PRECISION)
        b_dB = tl.dot(tl.trans(b_w), b_C, b_dB, input_precision=PRECISION)
        o_s = (chunk.to(tl.int64) * H + head) * N * P + o_n[:, None] * P + o_p[None, :]
        b_h = tl.load(states + o_s, mask=m_s, other=0.0)
        b_dy = (b_dy * tl.exp2(b_a)[:, None]).to(b_dy.dtype)
        b_dC = tl.dot(b_dy, tl.trans(b_h), b_dC, input_precision=PRECISION)
        b_dh = tl.load(dstates + o_s, mask=m_s, other=0.0)
        b_x = (b_x * tl.exp2(b_last - b_a)[:, None]).to(b_x.dtype)
        b_dB = tl.dot(b_x, tl.trans(b_dh), b_dB, input_precision=PRECISION)
    o_d = part * part_stride + group * N + o_t[:, None] * ((H // R) * N) + o_n[None, :]
    m_d = m_t[:, None] & (o_n < N)[None, :]
    tl.store(dB + o_d, b_dB.to(dB.dtype.element_ty), mask=m_d)
    tl.store(dC + o_d, b_dC.to(dC.dtype.element_ty), mask=m_d)
