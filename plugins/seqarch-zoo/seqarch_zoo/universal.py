"""The Universal Transformer (arXiv 1807.03819): an embedding of the loop, and tokens that halt by themselves.

Halting follows appendix C of the paper and the authors' code, github.com/tensorflow/tensor2tensor,
models/research/universal_transformer_util.py, universal_transformer_act.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from seqarch.arguments import Interval
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers.base import Losses, init_linear
from seqarch.model.looping import Looping, RunLoop

LONGEST = 10_000.0


class Universal(Looping):
    """Adds a sinusoidal embedding of the loop before each loop; with `halting`, each token has a number of loops.

    All loops run for all tokens, also for halted ones, whose keys and values others see. So halting saves no time.
    Positions come from the mixers or from `learned_positions`.

    Args:
        d_model: width of the residual stream.
        loops: number of loops.
        halting: whether tokens halt, by adaptive computation time (arXiv 1603.08983).
        threshold: sum of a token's probabilities to halt, above which it halts.
        ponder: weight of the loss `ponder`, the mean number of loops of a token plus its last remainder.
    """

    def __init__(
        self,
        d_model: int,
        loops: int,
        *,
        halting: bool = True,
        threshold: Annotated[float, Interval(0, 1, "()")] = 0.99,
        ponder: Annotated[float, Interval(0)] = 0.01,
    ) -> None:
        super().__init__(d_model, loops)
        self.threshold, self.ponder = threshold, ponder
        self.halt = nn.Linear(d_model, 1) if halting else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights of halting: a probability of 0.73 in the first loop, as in the authors' code."""
        if self.halt is not None:
            init_linear(self.halt)
            nn.init.ones_(self.halt.bias)

    def forward(self, x: Tensor, run: RunLoop, losses: Losses | None) -> Tensor:
        if self.halt is None:
            for loop in range(self.loops):
                x = run(self._embedded(x, loop), loop)
            return x
        mixed = torch.zeros_like(x)
        total, remainders, count = (at_least_float32(x.new_zeros(x.shape[:2])) for _ in range(3))
        for loop in range(self.loops):
            x = self._embedded(x, loop)
            running = total <= self.threshold  # a token that halts gets the rest of 1, which is above
            p = torch.sigmoid(at_least_float32(self.halt(x)).squeeze(-1)) * running
            halts = running & (total + p > self.threshold)
            weight = torch.where(halts, 1 - total, p)
            remainders = remainders + torch.where(halts, weight, 0)
            total, count = total + weight, count + running
            x = run(x, loop)
            share = weight.unsqueeze(-1).to(x.dtype)
            mixed = share * x + (1 - share) * mixed
        if losses is not None:
            losses["ponder"] = self.ponder * (count + remainders).mean()
        return mixed

    def _embedded(self, x: Tensor, loop: int) -> Tensor:
        exponents = torch.arange(0, self.d_model, 2, device=x.device) / self.d_model
        angles = (loop + 1) * LONGEST**-exponents
        return x + torch.cat((angles.sin(), angles.cos()))[: self.d_model].to(x.dtype)
