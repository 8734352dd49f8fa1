"""MesaNet's chunks on Triton: the states before them, and the linear systems of their tokens.

The launches are operators of PyTorch, so that torch.compile fuses what surrounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.op import interpreting

EXACT = tl.constexpr(interpreting())
"""Whether products are those of float32: the interpreter's bf16 products are wrong."""
SOLVED = tl.constexpr(1e-14)
"""Square of a residual that float32 cannot make smaller; steps beyond it divide numbers that underflow."""
ROWS = 32
"""Tokens whose systems one program solves; with more, matrices of 128 columns leave the registers."""
ELEMENTS = 1024
"""Elements of a state that one program carries from chunk to chunk."""


@triton.jit
def halves(t):
    """Two bf16 numbers with the sum `t`, to 16 bits of mantissa."""
    if EXACT:
        return t, t
    high = t.to(tl.bfloat16)
    return high, (t - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def add_product(a_high, a_low, b_high, b_low, total):
    """`total + a @ b` of halves. TF32, with 10 bits, can leave a matrix that is not positive definite."""
    if EXACT:
        return tl.dot(a_high, b_high, total, input_precision="ieee")
    total = tl.dot(a_low, b_high, total)
    total = tl.dot(a_high, b_low, total)
    return tl.dot(a_high, b_high, total)


@triton.jit(do_not_specialize=["steps", "N"])
def solve_kernel(
    k, ratio, passed, before, regulariser, right, solution, steps, N,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    head = (chunk // N) % H
    c, d = tl.arange(0, C), tl.arange(0, D)
    here = d[None, :] < K
    token = chunk * C + tl.program_id(1) * R + tl.arange(0, R)
    vector = token[:, None] * K + d[None, :]
    square = chunk * K * K + d[:, None] * K + d[None, :]
    k_high, k_low = halves(tl.load(k + (chunk * C + c)[:, None] * K + d[None, :], mask=here, other=0.0))
    g_high, g_low = halves(tl.load(before + square, mask=here & (d[:, None] < K), other=0.0))
    weights = tl.load(ratio + token[:, None] * C + c[None, :])
    decay = tl.load(passed + token)[:, None]
    diagonal = tl.load(regulariser + head * K + d, mask=d < K, other=1.0)[None, :]
    r = tl.load(right + vector, mask=here, other=0.0)
    size = tl.max(tl.abs(r), 1)[:, None]
    r = tl.where(size == 0, 0.0, r / size)
    x = tl.zeros([R, D], tl.float32)
    p, squared = r, tl.sum(r * r, 1)[:, None]
    for _ in range(steps):
        p_high, p_low = halves(p)
        scores = add_product(p_high, p_low, tl.trans(k_high), tl.trans(k_low), tl.zeros([R, C], tl.float32))
        s_high, s_low = halves(scores * weights)
        moved = add_product(p_high, p_low, g_high, g_low, tl.zeros([R, D], tl.float32)) * decay
        moved = add_product(s_high, s_low, k_high, k_low, moved) + diagonal * p
        along = tl.sum(p * moved, 1)[:, None]
        alpha = tl.where((along > 0) & (squared > SOLVED), squared / along, 0.0)
        x += alpha * p
        r -= alpha * moved
        last, squared = squared, tl.sum(r * r, 1)[:, None]
        p = r + tl.where(last > 0, squared / last, 0.0) * p
    tl.store(solution + vector, x * size, mask=here)


@triton.jit(do_not_specialize=["N"])
def carry_kernel(written, passed, initial, states, final, N, S: tl.constexpr, E: tl.constexpr):
    row, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * E + tl.arange(0, E)
    state = tl.load(initial + row * S + o, mask=o < S, other=0.0)
    for chunk in range(row * N, row * N + N):
        tl.store(states + chunk * S + o, state, mask=o < S)
        state = tl.load(passed + chunk) * state + tl.load(written + chunk * S + o, mask=o < S, other=0.0)
    tl.store(final + row * S + o, state, mask=o < S)


@triton.jit(do_not_specialize=["N"])
def carry_back_kernel(
    d_states, d_final, passed, states, d_written, d_passed, d_initial, N, S: tl.constexpr, E: tl.constexpr
):
    """`d_passed` has a column for each program of a row."""
    row, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * E + tl.arange(0, E)
    gradient = tl.load(d_final + row * S + o, mask=o < S, other=0.0)
    for n in range(N):
        chunk = row * N + N - 1 - n
        tl.store(d_written + chunk * S + o, gradient, mask=o < S)
        state = tl.load(states + chunk * S + o, mask=o < S, other=0.0)
        tl.store(d_passed + chunk * tl.num_programs(1) + tl.program_id(1), tl.sum(gradient * state, 0))
        gradient = tl.load(passed + chunk) * gradient + tl.load(d_states + chunk * S + o, mask=o < S, other=0.0)
    tl.store(d_initial + row * S + o, gradient, mask=o < S)


@torch.library.custom_op("seqarch_zoo::mesa_solve", mutates_args=())
def solve(
    k: Tensor, ratio: Tensor, passed: Tensor, before: Tensor, regulariser: Tensor, right: Tensor, steps: int
) -> Tensor:
    """`conjugate_gradients` of a `Gram` in float32, with products of three bf16 products each; without gradient."""
    B, H, N, C, K = right.shape
    inputs = (t.contiguous() for t in (k, ratio, passed, before, regulariser, right))
    found = torch.empty_like(right, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(right):
        solve_kernel[(B * H * N, triton.cdiv(C, ROWS))](
            *inputs, found, steps, N, H, C, min(C, ROWS), K, max(16, triton.next_power_of_2(K)),
            num_warps=8 if K > 64 else 4, num_stages=1,
        )  # fmt: skip
    return found


@torch.library.custom_op("seqarch_zoo::mesa_gradient", mutates_args=())
def solved_gradient(
    k: Tensor, ratio: Tensor, passed: Tensor, before: Tensor, regulariser: Tensor, residual: Tensor, steps: int
) -> Tensor:
    """Zeros, whose gradient with respect to the residual of a solution is that of the solution: another system."""
    return torch.zeros_like(residual, memory_format=torch.contiguous_format)


@torch.library.custom_op("seqarch_zoo::mesa_carry", mutates_args=())
def carry(written: Tensor, passed: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """`mesa_net.carry` in float32."""
    written, passed, initial = (t.contiguous() for t in (written, passed, initial))
    B, H, N = written.shape[:3]
    states, final, size = torch.empty_like(written), torch.empty_like(initial), initial.shape[2:].numel()
    with torch.cuda.device_of(written):
        carry_kernel[(B * H, triton.cdiv(size, ELEMENTS))](written, passed, initial, states, final, N, size, ELEMENTS)
    return states, final


@torch.library.custom_op("seqarch_zoo::mesa_carry_backward", mutates_args=())
def carry_backward(d_states: Tensor, d_final: Tensor, passed: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the arguments of `carry`."""
    d_states, d_final, passed, states = (t.contiguous() for t in (d_states, d_final, passed, states))
    B, H, N = states.shape[:3]
    size = d_final.shape[2:].numel()
    programs = triton.cdiv(size, ELEMENTS)
    d_written, d_initial = torch.empty_like(states), torch.empty_like(d_final)
    d_passed = torch.empty(*passed.shape[:3], programs, dtype=passed.dtype, device=passed.device)
    with torch.cuda.device_of(states):
        carry_back_kernel[(B * H, programs)](
            d_states, d_final, passed, states, d_written, d_passed, d_initial, N, size, ELEMENTS
        )
    return d_written, d_passed.sum(-1).view_as(passed), d_initial


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


solve.register_fake(lambda *inputs: _like(inputs[5])[0])
solved_gradient.register_fake(lambda *inputs: _like(inputs[5])[0])
carry.register_fake(lambda written, passed, initial: _like(written, initial))
carry_backward.register_fake(lambda d_states, d_final, passed, states: _like(states, passed, d_final))


def _save_gram(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5])  # so that activation checkpointing computes them again
    ctx.steps = inputs[6]


def _solve_gradient(ctx, gradient: Tensor):
    return *[None] * 5, solve(*ctx.saved_tensors, gradient, ctx.steps), None


def _save_states(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1], output[0])


def _carry_gradient(ctx, d_states: Tensor, d_final: Tensor):
    return carry_backward(d_states, d_final, *ctx.saved_tensors)


solved_gradient.register_autograd(_solve_gradient, setup_context=_save_gram)
carry.register_autograd(_carry_gradient, setup_context=_save_states)
