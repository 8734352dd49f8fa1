"""TTT-Linear (arXiv 2407.04620): the state is a linear model that each mini-batch of tokens trains by one step.

Layer and initial values follow the authors' code, github.com/test-time-training/ttt-lm-pytorch, ttt.py.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, Positive
from seqarch.errors import UserError
from seqarch.kernels import Backend, Op, kernels_of
from seqarch.kernels.packed import per_document
from seqarch.kernels.tensors import at_least_float32, check_sequences, document_positions
from seqarch.mixers import Mixer, MixerState
from seqarch.mixers.base import Scale, init_linear, is_fused, linear_flops, undecayed
from seqarch.mixers.options import with_options_of
from seqarch.mixers.positions import Base, apply_rope, rope_tables
from seqarch.mixers.recurrent import empty_state

NORM_EPS = 1e-6
HEADS, MINI_BATCHES = (16, 32, 64, 128), (16, 32, 64)
"""Sizes that the Triton kernels take."""


@dataclasses.dataclass
class FastWeights(MixerState):
    """The change of each sequence's inner model, the step that its mini-batch prepares, and the place in it.

    `moved` and `step` hold a tensor for each of the model's parameters. For a linear model these are a matrix
    `[B, H, D, D]` and a bias `[B, H, 1, D]`.
    """

    moved: tuple[Tensor, ...]
    step: tuple[Tensor, ...]
    position: int = 0


Tensors = tuple[Tensor, ...]


def _reference(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rates: Tensor,
    decays: Tensor,
    weight: Tensor,
    bias: Tensor,
    gain: Tensor,
    shift: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Train linear models by whole mini-batches, and read them.

    Args:
        q: queries `[B, T, H, D]`, which read the model; T in whole mini-batches of M tokens.
        k: keys `[B, T, H, D]`, the inputs that train it.
        target: what the model's normalised outputs should be `[B, T, H, D]`.
        rates: learning rates of the tokens `[B, T, H, 1]`.
        decays: factors of the step at each place of a mini-batch `[M]`.
        weight: the models before the first token `[B, H, D, D]`.
        bias: their biases `[B, H, 1, D]`.
        gain: of the models' normalisation `[H, 1, D]`.
        shift: of the models' normalisation `[H, 1, D]`.

    Returns:
        What the queries read `[B, T, H, D]`, before the normalisation, and the models after the last token.
    """
    reads = []
    for query, key, aim, rate in zip(*(t.split(len(decays), dim=1) for t in (q, k, target, rates)), strict=True):
        zeros = torch.zeros_like(weight), torch.zeros_like(bias)
        read, step = _part(query, key, aim, rate, decays[:, None], weight, bias, gain, shift, zeros)
        weight, bias = weight - decays[-1] * step[0], bias - decays[-1] * step[1]
        reads.append(read)
    return torch.cat(reads, dim=1), weight, bias


def _part(
    q: Tensor,
    k: Tensor,
    target: Tensor,
    rates: Tensor,
    decay: Tensor,
    weight: Tensor,
    bias: Tensor,
    gain: Tensor,
    shift: Tensor,
    step: Tensors,
) -> tuple[Tensor, Tensors]:
    """What the tokens of a part of one mini-batch read, and the step that they prepare: the dual form (section 2.5)."""
    q, k, target, rates = (t.transpose(1, 2) for t in (q, k, target, rates))
    wanted = rates * gradient(k @ weight + bias, target, gain, shift)
    read = q @ weight + bias - decay * moved(q, k, wanted, step)
    return read.transpose(1, 2), add_gradients(step, k, wanted)


def moved(read: Tensor, wrote: Tensor, wanted: Tensor, step: Tensors) -> Tensor:
    """How far the outputs of a layer at `read [B, H, M, D]` move, if it is trained at `wrote` by gradients `wanted`."""
    return (read @ wrote.mT).tril() @ wanted + wanted.cumsum(dim=2) + read @ step[0] + step[1]


def add_gradients(step: Tensors, wrote: Tensor, wanted: Tensor) -> Tensors:
    """`step` with the gradients of a layer's matrix and bias at `wrote`, whose outputs have gradients `wanted`."""
    return step[0] + wrote.mT @ wanted, step[1] + wanted.sum(dim=2, keepdim=True)


def after_step(model: Tensors, decay: Tensor, step: Tensors) -> Tensors:
    """The models after a mini-batch, whose sums of gradients are `step`."""
    return tuple(now - decay * change for now, change in zip(model, step, strict=True))


def _normalise(z: Tensor) -> tuple[Tensor, Tensor]:
    """The inner model's layer norm without its gain, and the deviation."""
    deviation = (z.var(dim=-1, unbiased=False, keepdim=True) + NORM_EPS).sqrt()
    return (z - z.mean(dim=-1, keepdim=True)) / deviation, deviation


def gradient(z: Tensor, target: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """The gradient of `0.5 |norm(z) - target|^2` with respect to `z`."""
    plain, deviation = _normalise(z)
    g = (gain * plain + shift - target) * gain
    return (g - g.mean(dim=-1, keepdim=True) - plain * (g * plain).mean(dim=-1, keepdim=True)) / deviation


def _triton(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from seqarch_zoo.ttt_triton import TrainLinear

    return TrainLinear.apply(*inputs, NORM_EPS)  # pyright: ignore[reportReturnType]


def _obstacle(q: Tensor, k: Tensor, target: Tensor, rates: Tensor, decays: Tensor, *models: Tensor) -> str | None:
    if q.shape[-1] not in HEADS:
        return f"it takes heads of 16, 32, 64 or 128 dims, not {q.shape[-1]}"
    return None if len(decays) in MINI_BATCHES else f"it takes mini-batches of 16, 32 or 64 tokens, not {len(decays)}"


TTT_LINEAR = Op("ttt_linear", _reference, (Backend("triton", _triton, "triton", obstacle=_obstacle),))


class TTTMixer(Mixer):
    """An inner model per head. Tokens train it to turn keys into values, and queries read it.

    A subclass defines `inner`, `train_whole` and `train_part`, and extends `reset_parameters`, which it calls last.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        mini_batch: tokens of a step. All their gradients are taken at the model before the step.
        learning_rate: the inner model's rate, before the learned gate of each token.
        rope_base: base of the rotary positions within a mini-batch.
    """

    family: ClassVar[str] = "ttt"
    source: ClassVar[str] = "arXiv 2407.04620"
    capabilities: frozenset[str] = frozenset({"decode", "packed"})
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 12}, 2048: {"n_heads": 32}}

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        mini_batch: Count = 16,
        learning_rate: Positive = 1.0,
        rope_base: Base = 10000.0,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        if d_model % (2 * n_heads):
            raise UserError(f"n_heads={n_heads} must give heads of an even size: d_model is {d_model}")
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.mini_batch, self.learning_rate, self.rope_base = mini_batch, learning_rate, rope_base
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        is_fused(self.qkv, d_model, d_model, d_model)
        self.rates = nn.Linear(d_model, n_heads)
        self.norm_weight, self.norm_bias = (undecayed(n_heads, 1, self.head_dim) for _ in range(2))
        self.places = nn.Parameter(torch.empty(mini_batch))
        self.norm = nn.LayerNorm(d_model, eps=NORM_EPS)
        self.out = nn.Linear(d_model, d_model, bias=False)

    @abstractmethod
    def inner(self) -> Tensors:
        """The parameters of the inner model, `[H, ...]` each."""

    @abstractmethod
    def train_whole(self, inputs: Tensors, decays: Tensor, model: Tensors, norm: Tensors) -> tuple[Tensor, Tensors]:
        """What queries of whole mini-batches read, and the models after them.

        Args:
            inputs: queries, keys and targets `[B, T, H, D]`, rates `[B, T, H, 1]`.
            decays: factors of the step at each place of a mini-batch.
            model: the parameters before the first token, `[B, H, ...]` each.
            norm: gain and shift of the models' normalisation, `[H, 1, D]`.
        """

    @abstractmethod
    def train_part(
        self, inputs: Tensors, decay: Tensor, model: Tensors, norm: Tensors, step: Tensors
    ) -> tuple[Tensor, Tensors]:
        """What queries in a part of one mini-batch read, and the step after it; `step` is that of the parts before."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices normal with standard deviation 0.02, as the authors do; the inner model too."""
        for layer in (self.qkv, self.rates, self.out):
            init_linear(layer)
        for parameter in self.inner():
            parameter.zero_() if parameter.shape[1] == 1 else parameter.normal_(std=0.02)
        for parameter in (self.norm_bias, self.places):
            parameter.zero_()
        self.norm_weight.fill_(1)
        self.norm.reset_parameters()

    def forward(self, x: Tensor, *, state: FastWeights | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_sequences({"x [B, T, C]": x}, cu_seqlens)
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
        """Outputs `[B, T, H, D]`; updates the state."""
        with torch.autocast(q.device.type, enabled=False):
            places = torch.arange(1, self.mini_batch + 1, device=q.device, dtype=q.dtype)
            decays = (1 / places + self.places).clamp_min(0)
            model = tuple(start + moved for start, moved in zip(self.inner(), state.moved, strict=True))
            gain, shift = norm = tuple(t.to(q.dtype) for t in (self.norm_weight, self.norm_bias))
            step, place, start, reads = state.step, state.position, 0, []
            while start < q.shape[1]:
                left = q.shape[1] - start
                whole = 0 if place else left // self.mini_batch * self.mini_batch
                here = slice(start, start + (whole or min(left, self.mini_batch - place)))
                inputs = (q[:, here], k[:, here], (v - k)[:, here], rates[:, here])
                if whole:
                    read, model = self.train_whole(inputs, decays, model, norm)
                else:
                    decay = decays[place : place + here.stop - start, None]
                    read, step = self.train_part(inputs, decay, model, norm, step)
                    place += here.stop - start
                if place == self.mini_batch:
                    model = after_step(model, decays[-1], step)
                    step, place = tuple(map(torch.zeros_like, step)), 0
                reads.append(read)
                start = here.stop
            state.moved = tuple(now - start for now, start in zip(model, self.inner(), strict=True))
            state.step, state.position = step, place
            plain, _ = _normalise(torch.cat(reads, dim=1))
            return q + gain.squeeze(1) * plain + shift.squeeze(1)

    def _start(self, x: Tensor) -> FastWeights:
        return self.init_state(x.shape[0], x.shape[1], x.device, x.dtype)

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> FastWeights:
        """The learned inner model, not yet moved; see `Mixer.init_state`."""
        shapes = tuple(tuple(parameter.shape) for parameter in self.inner())
        return FastWeights(*(empty_state(batch_size, shapes, device, dtype) for _ in range(2)))


class TTTLinear(TTTMixer):
    """A linear model per head. Tokens train it to turn keys into values, and queries read it.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        backend: "auto", "reference" or "triton".
        **options: as in `TTTMixer`.
    """

    kernels: ClassVar[Mapping[str, str]] = kernels_of([TTT_LINEAR])

    @with_options_of(TTTMixer)
    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: Count, backend: str = "auto", **options: Any
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads, **options)
        TTT_LINEAR.check(backend)
        self.backend = backend
        self.weight = undecayed(n_heads, self.head_dim, self.head_dim)
        self.bias = undecayed(n_heads, 1, self.head_dim)
        self.reset_parameters()

    def inner(self) -> Tensors:
        return self.weight, self.bias

    def train_whole(self, inputs, decays, model, norm):
        read, *model = TTT_LINEAR.run(self.backend, *inputs, decays, *model, *norm)
        return read, tuple(model)

    def train_part(self, inputs, decay, model, norm, step):
        every: Any = (*inputs, decay, *model, *norm, step)
        return _part(*every)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the projections, of four products with D x D matrices and of two in the mini-batch."""
        inner = 2.0 * self.d_model * (4 * self.head_dim + 2 * self.mini_batch)
        return (linear_flops(self.qkv, self.rates, self.out) + inner) * (3 if training else 1)
