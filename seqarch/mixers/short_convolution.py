"""The short causal convolution of Mamba, DeltaNet and Based: each channel mixes its last few tokens."""

import dataclasses
from typing import Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from seqarch.arguments import Interval, Limited
from seqarch.errors import UserError
from seqarch.kernels import qkv_convolution, short_convolution
from seqarch.mixers.base import Device, MixerState
from seqarch.mixers.pieces import Piece

Kernel = Annotated[int, Interval(2)]
"""Tokens that an output of a convolution sees, its own included."""


@dataclasses.dataclass
class ShortConvolutionState(MixerState):
    """The last `kernel_size - 1` inputs of each sequence, `[B, kernel_size - 1, channels]`; zeros before the first.

    A token shift has the same state: it moves the last token, as a convolution over two tokens would.
    """

    last: Tensor
    static: ClassVar[bool] = True

    @classmethod
    def empty(cls, batch_size: int, tokens: int, channels: int, device: Device, dtype: torch.dtype) -> Self:
        return cls(torch.zeros(batch_size, tokens, channels, device=device, dtype=dtype))

    def split(self, piece: Piece) -> "ShortConvolutionState":
        return dataclasses.replace(self, piece=piece)


class ShortConvolution(Limited, nn.Module):
    """`y_t = activation(b + sum_j w_j x_{t - kernel_size + 1 + j})`, channel by channel.

    Args:
        channels: number of channels.
        kernel_size: tokens that an output sees, its own included.
        bias: whether a bias is added.
        activation: "silu" or `None`.
        backend: "auto", "reference" or "triton", see `seqarch.kernels.short_convolution`.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Kernel = 4,
        *,
        bias: bool = False,
        activation: Literal["silu"] | None = "silu",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.channels = channels
        self.kernel_size = kernel_size
        self.activation = activation
        self.backend: str = backend
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in `+-kernel_size ** -0.5`, as `nn.Conv1d` draws a depthwise kernel and its bias."""
        bound = self.kernel_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def init_state(self, batch_size: int, device: Device, dtype: torch.dtype) -> ShortConvolutionState:
        """The state before the first token."""
        return ShortConvolutionState.empty(batch_size, self.kernel_size - 1, self.channels, device, dtype)

    def flops_per_token(self) -> float:
        """Forward operations per token."""
        return 2.0 * self.kernel_size * self.channels

    def forward(
        self, x: Tensor, *, state: ShortConvolutionState | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Convolve `x [B, T, channels]`.

        Args:
            x: the sequence.
            state: the inputs before `x`; holds the last ones of `x` after the call.
            cu_seqlens: `[N + 1]` borders of packed documents; nothing crosses a border.
        """
        x, known, cu_seqlens = self._after_state(x, state, cu_seqlens)
        y = short_convolution(
            x, self.weight, self.bias, activation=self.activation, cu_seqlens=cu_seqlens, backend=self.backend
        )
        return y[:, known:] if known else y

    def qkv(
        self,
        x: Tensor,
        n_heads: int,
        key_dim: int,
        *,
        state: ShortConvolutionState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolve queries, keys and values side by side; see `qkv_convolution`."""
        if self.bias is not None or self.activation != "silu":
            raise UserError("queries, keys and values are convolved without bias and with SiLU")
        x, known, cu_seqlens = self._after_state(x, state, cu_seqlens)
        q, k, v = qkv_convolution(x, self.weight, n_heads, key_dim, cu_seqlens=cu_seqlens, backend=self.backend)
        return (q[:, known:], k[:, known:], v[:, known:]) if known else (q, k, v)

    def _after_state(
        self, x: Tensor, state: ShortConvolutionState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, int, Tensor | None]:
        """`x` after the tokens of the state, if there is one, their number, and borders in both. Updates the state."""
        if state is None:
            return x, 0, cu_seqlens
        known = self.kernel_size - 1
        last = state.last if state.piece is None else state.piece.before(x, known)
        x = torch.cat((last.to(x.dtype), x), dim=1)
        # A copy: a view would keep all of x in memory.
        state.last = x[:, x.shape[1] - known :].to(state.last.dtype, copy=True)
        return x, known, state.piece.borders(cu_seqlens, known) if state.piece else cu_seqlens


def optional_convolution(
    channels: int, kernel_size: int | None, conv: bool, *, bias: bool = False, backend: str = "auto"
) -> ShortConvolution | None:
    """The optional convolution of a mixer; `None` without `conv`.

    Args:
        channels: number of channels.
        kernel_size: tokens that an output sees; 4 when `None`.
        conv: whether there is a convolution.
        bias: whether a bias is added.
        backend: the mixer's, see `other_backend`.

    Raises:
        UserError: `kernel_size` is given without `conv`.
    """
    if conv:
        size = 4 if kernel_size is None else kernel_size
        return ShortConvolution(channels, size, bias=bias, backend=other_backend(backend))
    if kernel_size is not None:
        raise UserError(f"conv_size={kernel_size} does nothing without conv: leave it out, or set conv to true")
    return None


def other_backend(backend: str) -> str:
    """The backend of a mixer's other ops: "reference" if its recurrence uses the reference, else "auto"."""
    return "reference" if backend == "reference" else "auto"
