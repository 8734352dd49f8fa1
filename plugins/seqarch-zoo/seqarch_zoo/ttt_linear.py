"""TTT-Linear (arXiv 2407.04620): the state is a linear model that each mini-batch of tokens trains by one step.

Layer and initial values follow the authors' code, github.com/test-time-training/ttt-lm-pytorch, ttt.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError, check_counts
from seqarch.kernels.packed import document_positions, per_document
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers import Mixer, MixerState
from seqarch.mixers.base import Scale, init_linear, linear_flops, refuse_packed_state, undecayed
from seqarch.mixers.positions import apply_rope, rope_tables
from seqarch.mixers.recurrent import empty_state

NORM_EPS = 1e-6


@dataclasses.dataclass
class FastWeights(MixerState):
    """The change of each sequence's linear model, the step that its mini-batch prepares, and the place in it.

    `moved` and `step` hold a matrix `[B, H, D, D]` and a bias `[B, H, 1, D]` each.
    """

    moved: tuple[Tensor, Tensor]
    step: tuple[Tensor, Tensor]
    position: int = 0


class TTTLinear(Mixer):
    """A linear model per head. Tokens train it to turn keys into values, and queries read it.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        mini_batch: tokens of a step. All their gradients are taken at the model before the step.
        learning_rate: the linear model's rate, before the learned gate of each token.
        rope_base: base of the rotary positions within a mini-batch.
    """

    family: ClassVar[str] = "ttt"
    source: ClassVar[str] = "arXiv 2407.04620"
    capabilities: frozenset[str] = frozenset({"decode", "packed"})
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 12}, 2048: {"n_heads": 32}}
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "PyTorch"}

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: int,
        mini_batch: int = 16,
        learning_rate: float = 1.0,
        rope_base: float = 10000.0,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        check_counts(n_heads=n_heads, mini_batch=mini_batch)
        if d_model % (2 * n_heads):
            raise UserError(f"n_heads={n_heads} must give heads of an even size: d_model is {d_model}")
        if not learning_rate > 0:
            raise UserError(f"learning_rate must be positive, not {learning_rate}")
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.mini_batch, self.learning_rate, self.rope_base = mini_batch, learning_rate, rope_base
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.rates = nn.Linear(d_model, n_heads)
        self.weight = undecayed(n_heads, self.head_dim, self.head_dim)
        self.bias = undecayed(n_heads, 1, self.head_dim)
        self.norm_weight, self.norm_bias = (undecayed(n_heads, 1, self.head_dim) for _ in range(2))
        self.places = nn.Parameter(torch.empty(mini_batch))
        self.norm = nn.LayerNorm(d_model, eps=NORM_EPS)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices normal with standard deviation 0.02, as the authors do; the inner model too."""
        for layer in (self.qkv, self.rates, self.out):
            init_linear(layer)
        self.weight.normal_(std=0.02)
        for parameter in (self.bias, self.norm_bias, self.places):
            parameter.zero_()
        self.norm_weight.fill_(1)
        self.norm.reset_parameters()

    def forward(self, x: Tensor, *, state: FastWeights | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        refuse_packed_state(state, cu_seqlens)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, self.head_dim)).unbind(2)
        q, k, v = (at_least_float32(t) for t in (q, k, v))
        start = state.position if state else 0
        places = document_positions(x, start=start, cu_seqlens=cu_seqlens) % self.mini_batch
        tables = rope_tables(places, self.head_dim, self.rope_base, q.dtype)
        rates = self.learning_rate / self.head_dim * torch.sigmoid(at_least_float32(self.rates(x)))[..., None]
        inputs = apply_rope(q, tables), apply_rope(k, tables), v, rates
        if cu_seqlens is None:
            o = self._train(*inputs, state or self._start(x))
        else:
            o = per_document(lambda q, k, v, r: self._train(q, k, v, r, self._start(x)), inputs, cu_seqlens)
        gain, shift = self.norm.weight.to(o.dtype), self.norm.bias.to(o.dtype)
        return self.out(F.layer_norm(o.flatten(2), (self.d_model,), gain, shift, NORM_EPS).to(x.dtype))

    @torch.compiler.disable()  # a graph would contain every mini-batch separately
    def _train(self, q: Tensor, k: Tensor, v: Tensor, rates: Tensor, state: FastWeights) -> Tensor:
        """Outputs `[B, T, H, D]`; updates the state. Inside a mini-batch this is the dual form of section 2.5."""
        with torch.autocast(q.device.type, enabled=False):
            q, k, v, rates = (t.transpose(1, 2) for t in (q, k, v, rates))
            places = torch.arange(1, self.mini_batch + 1, device=q.device, dtype=q.dtype)
            decays = (1 / places + self.places).clamp_min(0)
            weight, bias = self.weight + state.moved[0], self.bias + state.moved[1]
            step_weight, step_bias = state.step
            outputs = []
            for here, place in self._pieces(q.shape[2], state.position):
                query, key, value, rate = (t[:, :, here] for t in (q, k, v, rates))
                wanted = rate * self._gradient(key @ weight + bias, value - key)
                decay = decays[place : place + query.shape[2], None]
                moved = (query @ key.mT).tril() @ wanted + wanted.cumsum(dim=2)
                moved = moved + query @ step_weight + step_bias
                read = query @ weight + bias - decay * moved
                outputs.append(query + self._normalised(read)[0])
                step_weight = step_weight + key.mT @ wanted
                step_bias = step_bias + wanted.sum(dim=2, keepdim=True)
                if place + query.shape[2] == self.mini_batch:
                    weight, bias = weight - decays[-1] * step_weight, bias - decays[-1] * step_bias
                    step_weight, step_bias = torch.zeros_like(step_weight), torch.zeros_like(step_bias)
            state.moved = weight - self.weight, bias - self.bias
            state.step = step_weight, step_bias
            state.position = (state.position + q.shape[2]) % self.mini_batch
            return torch.cat(outputs, dim=2).transpose(1, 2)

    def _pieces(self, length: int, position: int) -> Iterator[tuple[slice, int]]:
        """The parts of a call that lie in one mini-batch each, and the place of their first token in it."""
        start = 0
        while start < length:
            stop = min(length, start + self.mini_batch - position)
            yield slice(start, stop), position
            start, position = stop, 0

    def _normalised(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inner model's layer norm, `z` before its gain, and the deviation."""
        deviation = (z.var(dim=-1, unbiased=False, keepdim=True) + NORM_EPS).sqrt()
        plain = (z - z.mean(dim=-1, keepdim=True)) / deviation
        return self.norm_weight * plain + self.norm_bias, plain, deviation

    def _gradient(self, z: Tensor, target: Tensor) -> Tensor:
        """The gradient of `0.5 |norm(z) - target|^2` with respect to `z`."""
        normed, plain, deviation = self._normalised(z)
        g = (normed - target) * self.norm_weight
        return (g - g.mean(dim=-1, keepdim=True) - plain * (g * plain).mean(dim=-1, keepdim=True)) / deviation

    def _start(self, x: Tensor) -> FastWeights:
        return self.init_state(x.shape[0], x.shape[1], x.device, x.dtype)

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> FastWeights:
        """The learned inner model, not yet moved; see `Mixer.init_state`."""
        shapes = (self.n_heads, self.head_dim, self.head_dim), (self.n_heads, 1, self.head_dim)
        return FastWeights(*(empty_state(batch_size, shapes, device, dtype) for _ in range(2)))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the projections, of four products with D x D matrices and of two in the mini-batch."""
        inner = 2.0 * self.d_model * (4 * self.head_dim + 2 * self.mini_batch)
        return (linear_flops(self.qkv, self.rates, self.out) + inner) * (3 if training else 1)
