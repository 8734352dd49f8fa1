"""The short causal convolution of Mamba, DeltaNet and Based: each channel mixes its last few tokens."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.mixers.base import MixerState, refuse_packed_state
from seqarch.mixers.positions import document_positions


@dataclasses.dataclass
class ShortConvolutionState(MixerState):
    """The last `kernel_size - 1` inputs of each sequence, `[B, kernel_size - 1, channels]`; zeros before the first."""

    last: Tensor


class ShortConvolution(nn.Module):
    """`y_t = activation(b + sum_j w_j x_{t - kernel_size + 1 + j})`, channel by channel.

    Sums of shifted inputs rather than a convolution call: compilers fuse them with what surrounds them.

    Args:
        channels: number of channels.
        kernel_size: tokens that an output sees, its own included.
        bias: whether a bias is added.
        activation: "silu" or `None`.
    """

    def __init__(self, channels: int, kernel_size: int = 4, *, bias: bool = False, activation: str | None = "silu"):
        super().__init__()
        if kernel_size < 2:
            raise UserError(f"the kernel of a short convolution must be at least 2 tokens long, not {kernel_size}")
        if activation not in ("silu", None):
            raise UserError(f"activation must be 'silu' or null, not '{activation}'")
        self.channels = channels
        self.kernel_size = kernel_size
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in `+-kernel_size ** -0.5`, as `nn.Conv1d` draws a depthwise kernel and its bias."""
        bound = self.kernel_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def init_state(self, batch_size: int, device: torch.device | str, dtype: torch.dtype) -> ShortConvolutionState:
        """The state before the first token."""
        return ShortConvolutionState(
            torch.zeros(batch_size, self.kernel_size - 1, self.channels, device=device, dtype=dtype)
        )

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the state of one sequence."""
        return (self.kernel_size - 1) * self.channels * dtype.itemsize

    def flops_per_token(self) -> float:
        """Forward operations a token."""
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
        refuse_packed_state(state, cu_seqlens)
        reach = self.kernel_size - 1
        before = x.new_zeros(x.shape[0], reach, self.channels) if state is None else state.last.to(x.dtype)
        padded = torch.cat((before, x), dim=1)
        if state is not None:
            # A copy: a view would keep all of x in memory.
            state.last = padded[:, padded.shape[1] - reach :].to(state.last.dtype, copy=True)
        position = None if cu_seqlens is None else document_positions(x, cu_seqlens=cu_seqlens)[:, None]
        weight = self.weight.to(x.dtype)
        y = x * weight[:, reach]
        for distance in range(1, self.kernel_size):
            shifted = padded[:, reach - distance : reach - distance + x.shape[1]]
            if position is not None:
                shifted = shifted.masked_fill(position < distance, 0)
            y = torch.addcmul(y, shifted, weight[:, reach - distance])
        if self.bias is not None:
            y = y + self.bias.to(x.dtype)
        return F.silu(y) if self.activation == "silu" else y


def optional_convolution(
    channels: int, kernel_size: int | None, conv: bool, *, option: str, bias: bool = False
) -> ShortConvolution | None:
    """The convolution of a mixer that may go without: `None` without `conv`.

    Args:
        channels: number of channels.
        kernel_size: tokens that an output sees; 4 when `None`.
        conv: whether there is a convolution.
        option: the mixer's name for `kernel_size`.
        bias: whether a bias is added.

    Raises:
        UserError: `kernel_size` is given without `conv`.
    """
    if conv:
        return ShortConvolution(channels, 4 if kernel_size is None else kernel_size, bias=bias)
    if kernel_size is not None:
        raise UserError(f"{option}={kernel_size} does nothing without a convolution: leave it out, or set conv to true")
    return None
