"""Gated DeltaNet-2 (arXiv 2605.22791): the delta rule with an erase gate, a write gate and a decay for each channel.

Layers and initial values follow flash-linear-attention, fla/layers/gdn2.py, which is adapted from the authors' code.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.kernels import gated_delta_rule2
from seqarch.kernels.tensors import at_least_float32, softplus
from seqarch.mixers.base import Scale, init_linear, init_step_bias, is_fused, size_heads, undecayed
from seqarch.mixers.delta_net import value_dim_of
from seqarch.mixers.recurrent import Composes, Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.short_convolution import Kernel, optional_convolution

NORM_EPS = 1e-5


class GatedDeltaNet2(RecurrentMixer):
    """The delta rule with a decay, an erase gate and a write gate for each channel.

    Args:
        n_heads: heads H; the originals have heads of 128 channels.
        head_dim: K, the size of each head's queries and keys; `d_model / n_heads` unless given.
        expand_v: size of each head's values, as a multiple of `head_dim`.
        conv: whether queries, keys and values go through a short convolution.
        conv_size: tokens that the convolution sees, its own included; 4 unless given, and only with `conv`.
        neg_eigval: whether the erase gate reaches 2 instead of 1, so that the state can change sign along a key.
        backend: "auto", "reference" or "fla", see `seqarch.kernels.gated_delta_rule2`; with "reference" the
            convolution is in PyTorch too.
    """

    products: ClassVar[int] = 3  # read at k, write, read at q
    family: ClassVar[str] = "delta"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "head_dim": "head"}
    ops: ClassVar[tuple[str, ...]] = ("gated_delta_rule2", "qkv_convolution")
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 6}, 2048: {"n_heads": 16}}
    source: ClassVar[str] = "arXiv 2605.22791"
    composes: ClassVar[Composes] = "matrix"

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        head_dim: Count | None = None,
        expand_v: float = 1.0,
        conv: bool = True,
        conv_size: Kernel | None = None,
        neg_eigval: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        self.n_heads, self.key_dim = n_heads, size_heads(d_model, n_heads, head_dim)
        self.value_dim = value_dim_of(self.key_dim, expand_v)
        self.state_shape = (n_heads, self.key_dim, self.value_dim)
        self.neg_eigval = neg_eigval
        keys, values = n_heads * self.key_dim, n_heads * self.value_dim
        self.qkv = nn.Linear(d_model, 2 * keys + values, bias=False)
        is_fused(self.qkv, keys, keys, values)
        self.convolution = optional_convolution(2 * keys + values, conv_size, conv, backend=backend)
        self.canon_channels = None if conv else 2 * keys + values
        self.erase, self.write = nn.Linear(d_model, keys, bias=False), nn.Linear(d_model, values, bias=False)
        # the rank of both low-rank projections is the size of a head's values
        self.step_down, self.gate_down = (nn.Linear(d_model, self.value_dim, bias=False) for _ in range(2))
        self.step_up, self.gate_up = nn.Linear(self.value_dim, keys, bias=False), nn.Linear(self.value_dim, values)
        self.A_log, self.dt_bias = undecayed(n_heads), undecayed(keys)
        self.norm = nn.RMSNorm(self.value_dim, eps=NORM_EPS)
        self.out = nn.Linear(values, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices start as those of `GatedDeltaNet`: flash-linear-attention has this layer, but no model of it."""
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                init_linear(layer)
        if self.convolution is not None:
            nn.init.normal_(self.convolution.weight, std=0.02)
        self.A_log.uniform_(1, 16).log_()
        init_step_bias(self.dt_bias)
        self.norm.reset_parameters()

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        q, k, v = self.convolved_heads(self.qkv(x), self.n_heads, self.key_dim, state, cu_seqlens)
        step = softplus(at_least_float32(self.step_up(self.step_down(x))) + self.dt_bias).view(k.shape)
        log_decay = -at_least_float32(self.A_log).exp()[:, None] * step
        erase = self.erase(x).sigmoid().view(k.shape) * (2 if self.neg_eigval else 1)
        gated = v * self.write(x).sigmoid().view(v.shape)
        return Projected(gated, (q, k, log_decay, erase), (self.gate_up(self.gate_down(x)),))

    def recur(self, values, q, k, log_decay, erase, **options):
        return gated_delta_rule2(q, k, values, log_decay, erase, **options, backend=self.backend)

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        wide = at_least_float32(o)
        wide = F.rms_norm(wide, (self.value_dim,), self.norm.weight.to(wide.dtype), self.norm.eps)
        wide = wide * at_least_float32(gate).sigmoid().view_as(wide)
        return self.out(wide.to(o.dtype).flatten(2))
