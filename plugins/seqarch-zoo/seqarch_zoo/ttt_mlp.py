"""TTT-MLP (arXiv 2407.04620): the state is an MLP with one hidden layer that each mini-batch trains by one step.

Layer and initial values follow the authors' code, github.com/test-time-training/ttt-lm-pytorch, ttt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.arguments import Count, Positive
from seqarch.mixers.base import linear_flops, undecayed
from seqarch.mixers.options import with_options_of
from seqarch_zoo.ttt_linear import Tensors, TTTMixer, add_gradients, after_step, gradient, moved

WIDER = 4
"""Hidden channels of the inner model, in multiples of a head's channels."""


class TTTMLP(TTTMixer):
    """An MLP with GELU per head. Tokens train it to turn keys into values, and queries read it.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        learning_rate: the inner model's rate, before the learned gate of each token; a tenth of `TTTLinear`'s.
        **options: as in `TTTMixer`.
    """

    source: ClassVar[str] = "arXiv 2407.04620"
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "PyTorch"}

    @with_options_of(TTTMixer)
    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        learning_rate: Positive = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads, learning_rate=learning_rate, **options)
        narrow, wide = self.head_dim, WIDER * self.head_dim
        self.weight_1, self.bias_1 = undecayed(n_heads, narrow, wide), undecayed(n_heads, 1, wide)
        self.weight_2, self.bias_2 = undecayed(n_heads, wide, narrow), undecayed(n_heads, 1, narrow)
        self.reset_parameters()

    def inner(self) -> Tensors:
        return self.weight_1, self.bias_1, self.weight_2, self.bias_2

    def train_whole(self, inputs, decays, model, norm):
        reads, unmoved = [], tuple(map(torch.zeros_like, model))
        for batch in zip(*(t.split(len(decays), dim=1) for t in inputs), strict=True):
            read, step = self.train_part(batch, decays[:, None], model, norm, unmoved)
            model = after_step(model, decays[-1], step)
            reads.append(read)
        return torch.cat(reads, dim=1), model

    def train_part(self, inputs, decay, model, norm, step):
        """The dual form (section 2.5) of both layers."""
        q, k, target, rates = (t.transpose(1, 2) for t in inputs)
        weight_1, bias_1, weight_2, bias_2 = model
        hidden = k @ weight_1 + bias_1
        activated = F.gelu(hidden, approximate="tanh")
        wanted_2 = rates * gradient(activated @ weight_2 + bias_2, target, *norm)
        wanted_1 = wanted_2 @ weight_2.mT * _gelu_slope(hidden)
        inside = q @ weight_1 + bias_1 - decay * moved(q, k, wanted_1, step[:2])
        inside = F.gelu(inside, approximate="tanh")
        read = inside @ weight_2 + bias_2 - decay * moved(inside, activated, wanted_2, step[2:])
        step = (*add_gradients(step[:2], k, wanted_1), *add_gradients(step[2:], activated, wanted_2))
        return read.transpose(1, 2), step

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the projections, of seven products with D x 4 D matrices and of two in the mini-batch."""
        products = 7 * WIDER * self.head_dim + 2 * (1 + WIDER) * self.mini_batch
        return (linear_flops(self.qkv, self.rates, self.out) + 2.0 * self.d_model * products) * (3 if training else 1)


def _gelu_slope(x: Tensor) -> Tensor:
    """The derivative of GELU in its form with tanh."""
    slope = (2 / torch.pi) ** 0.5
    t = torch.tanh(slope * x * (1 + 0.044715 * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope * (1 + 3 * 0.044715 * x * x)
