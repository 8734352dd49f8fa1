"""What a model does between its loops, for instance an embedding of the loop or halting."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from seqarch.arguments import Limited
from seqarch.mixers.base import Losses, linear_flops

RunLoop = Callable[[Tensor, int], Tensor]


class Looping(Limited, nn.Module, ABC):
    """Runs the loops of a model; `looping` of a model takes such a class.

    Args:
        d_model: width of the residual stream.
        loops: number of loops.
    """

    def __init__(self, d_model: int, loops: int) -> None:
        super().__init__()
        self.d_model, self.loops = d_model, loops

    @abstractmethod
    def forward(self, x: Tensor, run: RunLoop, losses: Losses | None) -> Tensor:
        """The output `[B, T, d_model]` of all loops.

        It is computed token by token: no token of the output depends on other tokens than through `run`.

        Args:
            x: `[B, T, d_model]`, the embedded tokens.
            run: `run(x, loop)` is `x` after all blocks in a loop, from 0. Call it once for each, in order: each loop
                has its own decoding state.
            losses: in training `Losses` to write into, as in `Mixer.forward`, else `None`.
        """

    def flops_per_token(self) -> float:
        """Forward operations per token, of all loops."""
        return self.loops * linear_flops(*(layer for layer in self.modules() if isinstance(layer, nn.Linear)))
