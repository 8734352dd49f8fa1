"""MesaNet's linear systems on Triton: a program solves those of the tokens of one chunk of one head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from seqarch.kernels.op import interpreting

if TYPE_CHECKING:
    from seqarch_zoo.mesa_net import Gram

# 16 bits of mantissa: products in TF32, with 10, can leave a matrix that is not positive definite
PRECISION = tl.constexpr("ieee" if interpreting() else "bf16x3")
SOLVED = tl.constexpr(1e-14)
"""Square of a residual that float32 cannot make smaller; steps beyond it divide numbers that underflow."""


@triton.jit(do_not_specialize=["steps", "N"])
def solve_kernel(
    k, ratio, passed, before, regulariser, right, solution, steps, N,
    H: tl.constexpr, C: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    head = (chunk // N) % H
    c, d = tl.arange(0, C), tl.arange(0, D)
    vector, here = (chunk * C + c)[:, None] * K + d[None, :], d[None, :] < K
    square = chunk * K * K + d[:, None] * K + d[None, :]
    keys = tl.load(k + vector, mask=here, other=0.0)
    weights = tl.load(ratio + (chunk * C + c)[:, None] * C + c[None, :])
    decay = tl.load(passed + chunk * C + c)[:, None]
    gram = tl.load(before + square, mask=here & (d[:, None] < K), other=0.0)
    diagonal = tl.load(regulariser + head * K + d, mask=d < K, other=1.0)[None, :]
    r = tl.load(right + vector, mask=here, other=0.0)
    size = tl.max(tl.abs(r), 1)[:, None]
    r = tl.where(size == 0, 0.0, r / size)
    x = tl.zeros([C, D], tl.float32)
    p, squared = r, tl.sum(r * r, 1)[:, None]
    for _ in range(steps):
        inside = tl.dot(tl.dot(p, tl.trans(keys), input_precision=PRECISION) * weights, keys, input_precision=PRECISION)
        moved = tl.dot(p * decay, gram, inside, input_precision=PRECISION) + diagonal * p
        along = tl.sum(p * moved, 1)[:, None]
        alpha = tl.where((along > 0) & (squared > SOLVED), squared / along, 0.0)
        x += alpha * p
        r -= alpha * moved
        last, squared = squared, tl.sum(r * r, 1)[:, None]
        p = r + tl.where(last > 0, squared / last, 0.0) * p
    tl.store(solution + vector, x * size, mask=here)


def solve(gram: Gram, right: Tensor, steps: int) -> Tensor:
    """`conjugate_gradients` in float32, with products of three bf16 products each."""
    B, H, N, C, K = right.shape
    inputs = (gram.k, gram.ratio, gram.passed, gram.before, gram.regulariser, right)
    solution = torch.empty_like(right, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(right):
        solve_kernel[(B * H * N,)](
            *(t.detach().contiguous() for t in inputs), solution, steps, N,
            H, C, K, max(16, triton.next_power_of_2(K)), num_warps=8 if K > 32 else 4, num_stages=1,
        )  # fmt: skip
    return solution
