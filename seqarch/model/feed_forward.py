"""Feed-forward layers: the part of a block that looks at one position at a time (RWKV's looks one back)."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.mixers.base import Device, Layer, MixerState, init_linear, linear_flops, residual_std
from seqarch.mixers.short_convolution import ShortConvolutionState
from seqarch.mixers.token_shift import draw_mixes, token_shift


class FeedForward(Layer):
    """`[B, T, d_model]` to the same shape.

    Args:
        d_model: width of the residual stream.
        layer_idx: index of the layer, from 0.
        n_layers: number of layers of the model.
    """

    @abstractmethod
    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """The output; `state` and `cu_seqlens` as of `Mixer.forward`."""

    def init_state(self, batch_size: int, max_length: int, device: Device, dtype: torch.dtype) -> MixerState | None:
        """Decoding state, `None` for layers that look at one position at a time."""
        return self.canon and self.canon.init_state(batch_size, device, dtype)

    def flops_per_token(self) -> float:
        """Forward operations per token."""
        return linear_flops(*(layer for layer in self.modules() if isinstance(layer, nn.Linear)))

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw the initial weights."""


class GELUMLP(FeedForward):
    """Two layers with GELU between, with biases, as in GPT-2; `hidden` defaults to 4 * d_model.

    `scaled_output`: whether `down` starts `sqrt(2 n_layers)` times smaller than `up`, as in GPT-2.
    """

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, hidden: Count | None = None, scaled_output: bool = True
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.scaled_output = scaled_output
        hidden = hidden or 4 * d_model
        self.canon_channels = hidden
        self.up = nn.Linear(d_model, hidden)
        self.down = nn.Linear(hidden, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_linear(self.up)
        init_linear(self.down, residual_std(self.n_layers, scaled=self.scaled_output))

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        up = self.after_canon(self.up(x), state, cu_seqlens)
        return self.down(F.gelu(up, approximate="tanh"))


class GatedMLP(FeedForward):
    """`down(activation(gate(x)) * up(x))` without biases (arXiv 2002.05202).

    `hidden` defaults to 8/3 * d_model, rounded up to a multiple of 64, which keeps the size of an MLP of 4 * d_model.
    `scaled_output`: whether `down` starts `sqrt(2 n_layers)` times smaller than `up`, as in GPT-2.
    """

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, hidden: Count | None = None, scaled_output: bool = True
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.scaled_output = scaled_output
        hidden = hidden or -(-8 * d_model // (3 * 64)) * 64
        self.canon_channels = 2 * hidden
        # Two matrices: with one for both, the backward pass joins gradients, which takes 3 % of a step on an H200.
        self.gate = nn.Linear(d_model, hidden, bias=False)
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_linear(self.gate)
        init_linear(self.up)
        init_linear(self.down, residual_std(self.n_layers, scaled=self.scaled_output))

    @abstractmethod
    def activation(self, x: Tensor) -> Tensor:
        """The gate's nonlinearity."""

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.canon is not None:
            gate, up = self.after_canon(torch.cat((gate, up), dim=-1), state, cu_seqlens).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class GeGLU(GatedMLP):
    """Gated MLP with GELU (arXiv 2002.05202)."""

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class SwiGLU(GatedMLP):
    """Gated MLP with SiLU (arXiv 2002.05202)."""

    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x)


class TokenShiftFeedForward(FeedForward):
    """The common part of RWKV's channel-mixes: their state, the last token."""

    def init_state(self, batch_size: int, max_length: int, device: Device, dtype: torch.dtype) -> ShortConvolutionState:
        return ShortConvolutionState.empty(batch_size, 1, self.d_model, device, dtype)


class RWKVChannelMix(TokenShiftFeedForward):
    """RWKV-7's channel-mix: `value(relu(key(shifted x))^2)` without biases (arXiv 2503.14456, section 4.2).

    `hidden` defaults to 4 * d_model. Initial weights follow github.com/BlinkDL/RWKV-LM, RWKV-v7/train_temp, as its
    training script draws them: it starts as zero.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, hidden: Count | None = None) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        hidden = hidden or 4 * d_model
        self.mix = nn.Parameter(torch.empty(d_model))
        self.key = nn.Linear(d_model, hidden, bias=False)
        self.value = nn.Linear(hidden, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        channel = torch.arange(self.d_model, device=self.mix.device) / self.d_model
        self.mix.copy_(1 - channel ** ((1 - self.layer_idx / self.n_layers) ** 4))
        nn.init.orthogonal_(self.key.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        delta = token_shift(x, state=state, cu_seqlens=cu_seqlens) - x
        return self.value(F.relu(self.key(torch.addcmul(x, delta, self.mix))).square())


class RWKVGatedChannelMix(TokenShiftFeedForward):
    """The channel-mix of RWKV-5 and RWKV-6: `sigmoid(receptance(shifted x)) * value(relu(key(shifted x))^2)`.

    `hidden` defaults to 3.5 * d_model, rounded down to a multiple of 32. Source: arXiv 2404.05892, section 4; mixes
    `x + (previous - x) * mix` as in RWKV-6 (those of RWKV-5 are one minus these) and initial weights follow
    github.com/BlinkDL/RWKV-LM, RWKV-v5: it starts as zero.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, hidden: Count | None = None) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        hidden = hidden or max(7 * d_model // 64 * 32, 32)
        self.key_mix = nn.Parameter(torch.empty(d_model))
        self.receptance_mix = nn.Parameter(torch.empty(d_model))
        self.key = nn.Linear(d_model, hidden, bias=False)
        self.receptance = nn.Linear(d_model, d_model, bias=False)
        self.value = nn.Linear(hidden, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        draw_mixes(self, key=1.0, receptance=1.0)
        nn.init.orthogonal_(self.key.weight)
        nn.init.zeros_(self.receptance.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        delta = token_shift(x, state=state, cu_seqlens=cu_seqlens) - x
        value = self.value(F.relu(self.key(torch.addcmul(x, delta, self.key_mix))).square())
        return torch.sigmoid(self.receptance(torch.addcmul(x, delta, self.receptance_mix))) * value
