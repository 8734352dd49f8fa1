"""Based (arXiv 2402.18668): Taylor linear attention, window attention and gated short convolutions, by layer.

Layers, their order and initial values follow the authors' code, github.com/HazyResearch/based:
based/models/mixers/{linear_attention,convolution,slide_attention}.py, `_init_weights` in based/models/gpt.py and
train/configs/experiment/reference/based-360m.yaml.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from seqarch.arguments import Count, divide
from seqarch.kernels import OPS, taylor_linear_attention
from seqarch.kernels.taylor_attention import n_features
from seqarch.kernels.tensors import at_least_float32, document_positions
from seqarch.mixers.attention import Attention
from seqarch.mixers.base import Mixer, MixerState, Scale, init_linear, is_fused, linear_flops, residual_std
from seqarch.mixers.recurrent import Composes, Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.short_convolution import Kernel, ShortConvolution, other_backend

Kind = Literal["convolution", "linear", "window"]
GROUP: tuple[Kind, ...] = ("convolution", "linear", "window", "convolution", "convolution")
"""The kinds of five layers, repeated: in the published model layers 1, 6, 11, 16 and 21 have linear attention, and
layers 2, 7, 12, 17 and 22 have window attention."""

ENTROPY_CHANNELS = 64


class TaylorLinearAttention(RecurrentMixer):
    """Linear attention with the second-order Taylor expansion of softmax attention's exponential.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        feature_dim: size of each head's queries and keys; the state grows with its square.
        backend: "auto", "reference" or "fla", see `seqarch.kernels.taylor_linear_attention`.
    """

    family: ClassVar[str] = "based"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "feature_dim": "head"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 12}}
    source: ClassVar[str] = "arXiv 2402.18668"
    ops: ClassVar[tuple[str, ...]] = ("taylor_linear_attention",)
    composes: ClassVar[Composes] = "decays"

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        feature_dim: Count = 16,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        self.n_heads, self.key_dim = n_heads, feature_dim
        self.state_shape = (n_heads, n_features(feature_dim), divide(d_model=d_model, n_heads=n_heads) + 1)
        self.qkv = nn.Linear(d_model, 2 * n_heads * feature_dim + d_model, bias=False)
        is_fused(self.qkv, n_heads * feature_dim, n_heads * feature_dim, d_model)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, smaller where they write to the residual stream, as in GPT-2."""
        init_linear(self.qkv)
        init_linear(self.out, residual_std(self.n_layers))

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        keys = self.n_heads * self.key_dim
        parts = self.qkv(x).split((keys, keys, self.d_model), dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)) for part in parts)
        return Projected(v, (q, k))

    def recur(self, values, q, k, **options):
        return taylor_linear_attention(q, k, values, **options, backend=self.backend)

    def decays(self, q: Tensor, k: Tensor) -> Tensor:
        return at_least_float32(q.new_ones(q.shape[0], 1, 1, 1))  # nothing decays

    def finish(self, o: Tensor) -> Tensor:
        return self.out(o.flatten(2))


class GatedConvolution(Mixer):
    """A short convolution gated by a projection of the input: `out(silu(conv(a)) * b)`, Based's BaseConv.

    Args:
        conv_size: tokens that the convolution sees, its own included.
        expand: channels of the convolution, as a multiple of `d_model`.
        bias: whether the projections have one.
        backend: of the convolution, "auto", "reference" or "triton", see `seqarch.kernels.short_convolution`.
    """

    capabilities: frozenset[str] = frozenset({"decode", "packed", "entropy"})
    implied: bool = True
    family: ClassVar[str] = "based"
    source: ClassVar[str] = "arXiv 2312.04927, arXiv 2402.18668"
    ops: ClassVar[tuple[str, ...]] = ("short_convolution",)

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        conv_size: Kernel = 3,
        expand: Count = 2,
        bias: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        OPS["short_convolution"].check(backend)
        channels = expand * d_model
        self.projection = nn.Linear(d_model, 2 * channels, bias=bias)
        is_fused(self.projection, channels, channels)
        self.convolution = ShortConvolution(channels, conv_size, backend=backend)
        self.out = nn.Linear(channels, d_model, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights, smaller where they write to the residual stream, as in GPT-2; PyTorch's convolution."""
        init_linear(self.projection)
        self.convolution.reset_parameters()
        init_linear(self.out, residual_std(self.n_layers))

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        a, b = self.projection(x).chunk(2, dim=-1)
        return self.out(self.convolution(a, state=state, cu_seqlens=cu_seqlens) * b)

    def init_state(self, batch_size, max_length, device, dtype) -> MixerState:
        """The last inputs of the convolution, none yet; see `Mixer.init_state`."""
        return self.convolution.init_state(batch_size, device, dtype)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        flops = linear_flops(self.projection, self.out) + self.convolution.flops_per_token()
        return flops * (3 if training else 1)

    @torch.no_grad()
    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Entropy `[B, T, H]` in nats of the implied weights, of evenly spaced channels as heads, without gradient.

        SiLU and the gate scale all weights of an output alike, so only the kernel's absolute values count.
        """
        kernel = self.convolution.weight.float().abs()
        channels = kernel.shape[0]
        heads = min(channels, ENTROPY_CHANNELS)
        kernel = kernel[torch.arange(heads, device=x.device) * channels // heads]
        seen = document_positions(x, cu_seqlens=cu_seqlens)
        # Outputs near the start of a document see fewer taps: the last ones of the kernel.
        distance = torch.arange(kernel.shape[1] - 1, -1, -1, device=x.device)
        weights = kernel * (distance <= seen[:, None])[:, None]
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        return -torch.xlogy(weights, weights).sum(-1).expand(x.shape[0], -1, -1)


class Based(Mixer):
    """Based's mixer of each layer: Taylor linear attention, window attention or a gated short convolution.

    Layers form groups of five, from the first layer on. In a group the second layer has linear attention, the third
    window attention, and the others a convolution. Layers after the last whole group have convolutions too. 27 layers
    give the published model. 15 layers have three of each attention, as in arXiv 2505.18522. A model of fewer than five
    layers is the start of a group.

    Args:
        n_heads: heads of both kinds of attention, a divisor of `d_model`.
        window: keys that window attention sees, its own included (with RoPE).
        feature_dim: size of each head's queries and keys in linear attention.
        conv_size: tokens that a convolution sees, its own included.
        expand: channels of a convolution, as a multiple of `d_model`.
        backend: of linear attention: "auto", "reference" or "fla".
    """

    capabilities: frozenset[str] = frozenset({"decode", "packed", "entropy"})
    family: ClassVar[str] = "based"
    scales: ClassVar[Mapping[str, Scale]] = {**TaylorLinearAttention.scales, "window": "length"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = TaylorLinearAttention.published
    source: ClassVar[str] = "arXiv 2402.18668"
    in_every_layer: ClassVar[bool] = True
    ops: ClassVar[tuple[str, ...]] = ("taylor_linear_attention", "short_convolution", "softmax_attention")

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        window: Count = 128,
        feature_dim: Count = 16,
        conv_size: Kernel = 3,
        expand: Count = 2,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        place = (d_model, layer_idx, n_layers)
        kind = based_kind(layer_idx, n_layers)
        if kind == "linear":
            self.layer = TaylorLinearAttention(*place, n_heads=n_heads, feature_dim=feature_dim, backend=backend)
        elif kind == "window":
            self.layer = Attention(*place, n_heads=n_heads, window=window)
        else:
            self.layer = GatedConvolution(*place, conv_size=conv_size, expand=expand, backend=other_backend(backend))
        # The mixers of one model differ in this, unlike those of other families.
        self.implied = self.layer.implied

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.layer(x, state=state, cu_seqlens=cu_seqlens)

    def init_state(self, batch_size, max_length, device, dtype) -> MixerState:
        return self.layer.init_state(batch_size, max_length, device, dtype)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        return self.layer.flops_per_token(seq_len, training=training)

    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """Entropy of softmax attention, or of the implied weights of the other kinds."""
        return self.layer.attention_entropy(x, cu_seqlens=cu_seqlens)


def based_kind(layer_idx: int, n_layers: int) -> Kind:
    """The kind of a layer of `Based`: as in `GROUP`, a convolution beyond the last complete group."""
    if layer_idx >= max(n_layers - n_layers % len(GROUP), len(GROUP)):
        return "convolution"
    return GROUP[layer_idx % len(GROUP)]
