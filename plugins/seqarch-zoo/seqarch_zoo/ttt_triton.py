"""TTT-Linear on Triton: a program trains the model of one head of one sequence, from the first mini-batch to the last.

The backward pass goes back from the last mini-batch. It reads the linear model before each mini-batch from memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _through(t, plain, deviation, D: tl.constexpr):
    """`t [M, D]` through the derivative of the normalisation, a symmetric matrix for each token."""
    along = tl.sum(t * plain, 1)[:, None] / D
    return (t - tl.sum(t, 1)[:, None] / D - plain * along) / deviation


@triton.jit
def _gradient(k, target, W, bias, gain, shift, eps, D: tl.constexpr):
    """The loss's gradient `[M, D]` at the linear model's outputs, and what its own derivative needs."""
    z = tl.dot(k, W) + bias
    z -= tl.sum(z, 1)[:, None] / D
    deviation = tl.sqrt(tl.sum(z * z, 1)[:, None] / D + eps)
    plain = z / deviation
    error = gain * plain + shift - target
    return _through(error * gain, plain, deviation, D), error, plain, deviation


@triton.jit
def _places(program, n, T, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Places of mini-batch n of the program's head: of its tokens `[M]` in `[B, T, H]`, of its vectors `[M, D]`."""
    token = (program // H).to(tl.int64) * T + n * M + tl.arange(0, M)
    token = token * H + program % H
    return token, token[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def forward_kernel(
    q, k, target, rates, decays, weight, bias, gain, shift, read, weights, biases, T, eps,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    m, d = tl.arange(0, M), tl.arange(0, D)
    square = d[:, None] * D + d[None, :]
    W = tl.load(weight + program * D * D + square)
    b = tl.load(bias + program * D + d)[None, :]
    g, s = tl.load(gain + program % H * D + d)[None, :], tl.load(shift + program % H * D + d)[None, :]
    decay, last = tl.load(decays + m)[:, None], tl.load(decays + M - 1)
    lower = m[:, None] >= m[None, :]
    entry = program.to(tl.int64) * (T // M + 1)
    for n in range(T // M):
        tl.store(weights + (entry + n) * (D * D) + square, W)
        tl.store(biases + (entry + n) * D + d[None, :], b)
        token, vector = _places(program, n, T, H, D, M)
        query, key = tl.load(q + vector), tl.load(k + vector)
        gradient, _, _, _ = _gradient(key, tl.load(target + vector), W, b, g, s, eps, D)
        wanted = tl.load(rates + token)[:, None] * gradient
        pairs = tl.where(lower, tl.dot(query, tl.trans(key)) + 1, 0.0)
        tl.store(read + vector, tl.dot(query, W) + b - decay * tl.dot(pairs, wanted))
        W -= last * tl.dot(tl.trans(key), wanted)
        b -= last * tl.sum(wanted, 0)[None, :]
    tl.store(weights + (entry + T // M) * (D * D) + square, W)
    tl.store(biases + (entry + T // M) * D + d[None, :], b)


@triton.jit
def backward_kernel(
    q, k, target, rates, decays, gain, shift, weights, biases, dread, dweight_end, dbias_end,
    dq, dk, dtarget, drates, ddecays, dweight, dbias, dgain, dshift, T, eps,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    m, d = tl.arange(0, M), tl.arange(0, D)
    square = d[:, None] * D + d[None, :]
    dW = tl.load(dweight_end + program * D * D + square)
    db = tl.load(dbias_end + program * D + d)[None, :]
    g, s = tl.load(gain + program % H * D + d)[None, :], tl.load(shift + program % H * D + d)[None, :]
    decay, last = tl.load(decays + m)[:, None], tl.load(decays + M - 1)
    lower = m[:, None] >= m[None, :]
    entry = program.to(tl.int64) * (T // M + 1)
    dg, ds = tl.zeros((1, D), tl.float32), tl.zeros((1, D), tl.float32)
    ddecay, dlast = tl.zeros((M, 1), tl.float32), tl.zeros((M, 1), tl.float32)
    for i in range(T // M):
        n = T // M - 1 - i
        W = tl.load(weights + (entry + n) * (D * D) + square)
        b = tl.load(biases + (entry + n) * D + d[None, :])
        token, vector = _places(program, n, T, H, D, M)
        query, key, do = tl.load(q + vector), tl.load(k + vector), tl.load(dread + vector)
        rate = tl.load(rates + token)[:, None]
        gradient, error, plain, deviation = _gradient(key, tl.load(target + vector), W, b, g, s, eps, D)
        wanted = rate * gradient
        pairs = tl.where(lower, tl.dot(query, tl.trans(key)) + 1, 0.0)
        # What the tokens read
        dmoved = -decay * do
        ddecay -= tl.sum(do * tl.dot(pairs, wanted), 1)[:, None]
        dpairs = tl.where(lower, tl.dot(dmoved, tl.trans(wanted)), 0.0)
        tl.store(dq + vector, tl.dot(do, tl.trans(W)) + tl.dot(dpairs, key))
        # The step of the linear model, whose later gradients are dW and db
        later = tl.dot(key, dW) + db
        dlast -= tl.sum(wanted * later, 1)[:, None]
        dwanted = tl.dot(tl.trans(pairs), dmoved) - last * later
        dkey = tl.dot(tl.trans(dpairs), query) - last * tl.dot(wanted, tl.trans(dW))
        # The loss's gradient
        tl.store(drates + token, tl.sum(dwanted * gradient, 1))
        dgradient = rate * dwanted
        dinner = _through(dgradient, plain, deviation, D)
        inner = error * g
        dplain = g * g * dinner
        dplain -= dgradient * (tl.sum(inner * plain, 1)[:, None] / D) / deviation
        dplain -= inner * (tl.sum(dgradient * plain, 1)[:, None] / D) / deviation
        ddeviation = -tl.sum(dgradient * gradient, 1)[:, None] / deviation
        dz = _through(dplain, plain, deviation, D) + ddeviation * plain / D
        dg += tl.sum(dinner * (g * plain + error), 0)[None, :]
        ds += tl.sum(dinner * g, 0)[None, :]
        tl.store(dtarget + vector, -dinner * g)
        tl.store(dk + vector, dkey + tl.dot(dz, tl.trans(W)))
        dW += tl.dot(tl.trans(query), do) + tl.dot(tl.trans(key), dz)
        db += tl.sum(do + dz, 0)[None, :]
    ddecay += tl.where(m[:, None] == M - 1, tl.sum(dlast, 0)[None, :], 0.0)
    tl.store(dweight + program * D * D + square, dW)
    tl.store(dbias + program * D + d[None, :], db)
    tl.store(dgain + program * D + d[None, :], dg)
    tl.store(dshift + program * D + d[None, :], ds)
    tl.store(ddecays + program * M + m[:, None], ddecay)


class TrainLinear(torch.autograd.Function):
    """The op `ttt_linear` for whole mini-batches in float32."""

    @staticmethod
    def forward(ctx: Any, q, k, target, rates, decays, weight, bias, gain, shift, eps):
        inputs = tuple(t.contiguous() for t in (q, k, target, rates, decays, weight, bias, gain, shift))
        B, T, H, D = q.shape
        M = decays.shape[0]
        read = torch.empty_like(inputs[0])
        weights = q.new_empty(B, H, T // M + 1, D, D)
        biases = q.new_empty(B, H, T // M + 1, 1, D)
        with torch.cuda.device_of(q):
            forward_kernel[(B * H,)](
                *inputs, read, weights, biases, T, eps, H, D, M, num_warps=max(4, D // 16), num_stages=1
            )
        ctx.save_for_backward(*inputs, weights, biases)
        ctx.eps = eps
        return read, weights[:, :, -1].clone(), biases[:, :, -1].clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dread: Tensor, dweight_end: Tensor, dbias_end: Tensor):  # pyright: ignore
        q, k, target, rates, decays, weight, bias, gain, shift, weights, biases = ctx.saved_tensors
        B, T, H, D = q.shape
        M = decays.shape[0]
        given = (dread.contiguous(), dweight_end.contiguous(), dbias_end.contiguous())
        dq, dk, dtarget, drates = (torch.empty_like(t) for t in (q, k, target, rates))
        dweight, dbias, dgain, dshift = torch.empty_like(weight), *(torch.empty_like(bias) for _ in range(3))
        ddecays = q.new_empty(B, H, M)
        with torch.cuda.device_of(q):
            backward_kernel[(B * H,)](
                q, k, target, rates, decays, gain, shift, weights, biases, *given,
                dq, dk, dtarget, drates, ddecays, dweight, dbias, dgain, dshift, T, ctx.eps,
                H, D, M, num_warps=max(4, D // 16), num_stages=1,
            )  # fmt: skip
        return dq, dk, dtarget, drates, ddecays.sum((0, 1)), dweight, dbias, dgain.sum(0), dshift.sum(0), None
