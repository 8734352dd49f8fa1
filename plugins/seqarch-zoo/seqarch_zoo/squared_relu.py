"""The feed-forward layer of Primer (arXiv 2109.08668)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.mixers.base import init_linear, residual_std
from seqarch.model import FeedForward


class SquaredReLU(FeedForward):
    """`down(relu(up(x)) ** 2)` without biases; `hidden` defaults to `4 * d_model` (arXiv 2109.08668, section 4)."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, hidden: Count | None = None) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.up = nn.Linear(d_model, hidden or 4 * d_model, bias=False)
        self.down = nn.Linear(hidden or 4 * d_model, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_linear(self.up)
        init_linear(self.down, residual_std(self.n_layers))

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.down(F.relu(self.up(x)).square())
