"""The gated delta rule of one chunk as fla's kernels compute it, with products in TF32 if its tensors are float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tests.kernels.precision import DroppedBits


def as_fla_in_tf32(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, log_decay: Tensor, bits: int = 10, **_: Any
) -> tuple[Tensor, None]:
    """Outputs `[B, T, H, V]` without a state; arguments as in `delta_rule`.

    fla takes the gradient of the decays from differences (`chunk_bwd_kernel_dqkwg`): q times its gradient less k times
    its gradient, summed over the later tokens. Most of these terms cancel. In TF32 they leave a rest, which is large
    where RMSNorm enlarges the gradient of a small output.
    """
    heads = (t.transpose(1, 2) for t in (q, k, v, beta, log_decay))
    return _OneChunk.apply(*heads, bits).transpose(1, 2), None  # pyright: ignore[reportOptionalMemberAccess]


class _OneChunk(torch.autograd.Function):
    """fla/ops/gated_delta_rule/chunk.py of fla 0.6.0 without states; tensors `[B, H, T, dim]` and `[B, H, T]`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, bits: int) -> Tensor:
        g, b = log_decay.cumsum(-1), beta[..., None]
        scale = k.shape[-1] ** -0.5
        ratio = (g[..., :, None] - g[..., None, :]).exp().tril()
        with DroppedBits(bits):
            system = (b * (k @ k.mT) * ratio).tril(-1)
            unit = torch.eye(q.shape[-2]).to(q).expand_as(system)
            solve = torch.linalg.solve_triangular(system, unit, upper=False, unitriangular=True)
            scores = (q @ k.mT) * ratio * scale
        u = solve @ (b * v)  # fla multiplies these without TF32
        ctx.save_for_backward(q, k, v, b, ratio, solve, u, scores)
        ctx.scale, ctx.bits = scale, bits
        with DroppedBits(bits):
            return scores @ u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, b, ratio, solve, u, scores = ctx.saved_tensors
        with DroppedBits(ctx.bits):
            du = scores.mT @ do
            dscores = (do @ u.mT) * ratio * ctx.scale
            dq, dk = dscores @ k, dscores.mT @ q
            dg = (dq * q).sum(-1) - (dk * k).sum(-1)
            written = solve.mT @ du
            dsolve = (du @ (v * b).mT).tril(-1)
            dsystem = -(solve.mT @ (dsolve @ solve.mT) * ratio).tril(-1)
            read = dsystem @ k
            dk = dk + read * b + dsystem.mT @ (k * b)
            products = dsystem * (k @ k.mT) * b
        dg = dg + products.sum(-1) - products.sum(-2)
        dbeta = (written * v).sum(-1) + (read * k).sum(-1)
        return dq, dk, written * b, dbeta, dg.flip(-1).cumsum(-1).flip(-1), None
