"""MesaNet's equations token by token with a direct solver, and the inputs that its tests share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def draw(B: int, T: int, H: int, K: int, V: int | None = None) -> dict[str, Tensor]:
    """Random arguments of `mesa_net` in float64, by name and in order."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(B, T, H, K), dim=-1) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": normal(B, T, H, V or K),
        "log_decay": F.logsigmoid(normal(B, T, H) + 3),
        "beta": normal(B, T, H).sigmoid(),
        "regulariser": 0.25 + torch.rand(H, K, generator=generator, dtype=torch.float64),
    }


def direct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    regulariser: Tensor,
    gram: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equations 6 to 9: outputs, and the final G and S, from the initial ones or zeros."""
    B, T, H, K = q.shape
    gram = q.new_zeros(B, H, K, K) if gram is None else gram
    sums = q.new_zeros(B, H, K, v.shape[-1]) if sums is None else sums
    outputs = []
    for t in range(T):
        decay, key = log_decay[:, t, :, None, None].exp(), (beta[:, t, :, None] * k[:, t])[..., None]
        gram = decay * gram + key * k[:, t, :, None, :]
        sums = decay * sums + key * v[:, t, :, None, :]
        solved = torch.linalg.solve(gram + torch.diag_embed(regulariser), q[:, t])
        outputs.append((sums.mT @ solved[..., None])[..., 0])
    return torch.stack(outputs, dim=1), gram, sums
