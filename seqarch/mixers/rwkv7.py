"""The time-mix of RWKV-7 (arXiv 2503.14456): its recurrence is `RWKV7`, attention in place of it `RWKV7Shell`.

Formulas and initial values follow the authors' code, github.com/BlinkDL/RWKV-LM, RWKV-v7/train_temp/src/model.py: the
class RWKV_Tmix_x070, and RWKV.generate_init_weight, which draws projections and group norm again before training.
Ranks of the low-rank parts are those of the paper's time; later versions suggest larger ones at widths other than 768.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.kernels import OPS, rwkv7
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers.attend import Attend
from seqarch.mixers.base import Carry, Mixer, MixerState, Scale, leave_undecayed, linear_flops
from seqarch.mixers.cores import AttentionCore, KeyValueState, SoftmaxCore
from seqarch.mixers.implied import implied_entropy
from seqarch.mixers.positions import Position
from seqarch.mixers.recurrent import RecurrentState, empty_state
from seqarch.mixers.rwkv56 import draw_output_norm
from seqarch.mixers.token_shift import TokenShiftState, token_shift

LOWEST_LOG_DECAY = -math.exp(-0.5)
"""RWKV-7's decays are `exp(-exp(w))` with `w` soft-clamped below -0.5."""
V_FIRST = "v_first"
"""In the carry: the values `[B, T, d_model]` of the first layer, which later layers mix into their own."""


@dataclasses.dataclass
class TimeMixState(MixerState):
    """The last token, for the token shift, and the state of the sequence modelling."""

    shift: TokenShiftState
    sequence: MixerState
    static: ClassVar[bool] = True


class LowRank(nn.Module):
    """`up(activation(down(x)))`; starts independent of `x`, as `down` starts at zero.

    Args:
        d_model: width of input and output.
        rank: width between, rounded to a multiple of 32, at least 32.
        activation: function between.
        bias: whether a bias is added.
    """

    def __init__(
        self, d_model: int, rank: float, *, activation: Callable[[Tensor], Tensor] | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        width = max(32, round(rank / 32) * 32)
        self.down = nn.Linear(d_model, width, bias=False)
        self.up = nn.Linear(width, d_model, bias=bias)
        leave_undecayed(self.down.weight, self.up.weight)
        self.activation = activation

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.down.weight)
        nn.init.orthogonal_(self.up.weight, gain=0.1)
        if self.up.bias is not None:
            nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(x)
        return self.up(hidden if self.activation is None else self.activation(hidden))


class RWKV7TimeMix(Mixer):
    """What surrounds the sequence modelling of RWKV-7: token shift, projections, value residual, group norm, gate.

    A subclass defines `mix_sequence`, `sequence_inputs` where that takes more than r, k and v, and, to decode,
    `init_sequence_state`; it calls `reset_parameters` last.

    Args:
        d_model: width of the residual stream.
        layer_idx: index of the layer, from 0.
        n_layers: number of layers of the model.
        n_heads: heads H, a divisor of `d_model`.
    """

    family: ClassVar[str] = "rwkv"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 12}}

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: int) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        if n_heads < 1 or d_model % n_heads:
            raise UserError(f"n_heads={n_heads} does not divide d_model={d_model}")
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.receptance_mix, self.key_mix, self.value_mix, self.gate_mix = (
            nn.Parameter(torch.empty(d_model)) for _ in range(4)
        )
        self.receptance, self.key, self.value, self.output = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.gate = LowRank(d_model, 0.6 * d_model**0.8, activation=torch.sigmoid)
        self.value_gate = LowRank(d_model, 1.3 * d_model**0.5, bias=True) if layer_idx > 0 else None
        # 64e-5 is the published 1e-5 times the square of the head size divisor, 8.
        self.norm = nn.GroupNorm(n_heads, d_model, eps=64e-5)

    def sequence_inputs(
        self, x: Tensor, delta: Tensor, r: Tensor, k: Tensor, v: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What `mix_sequence` takes: r, k and v, unless a subclass needs more.

        Args:
            x: input of the mixer `[B, T, d_model]`.
            delta: the previous token minus `x`, for further token shifts `x + delta * mix`.
            r: receptances (queries) `[B, T, H, D]`.
            k: keys `[B, T, H, D]`.
            v: values `[B, T, H, D]`, the value residual applied.

        Returns:
            The inputs of `mix_sequence`, and what is to be added to its normalised outputs, if anything.
        """
        return (r, k, v), None

    def mix_sequence(
        self, inputs: tuple[Tensor, ...], *, state: MixerState | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """Model the sequence.

        Args:
            inputs: the first result of `sequence_inputs`.
            state: made by `init_sequence_state`.
            cu_seqlens: `[N + 1]` borders of packed documents.

        Returns:
            The outputs `[B, T, H, D]`, which are then normalised.
        """
        raise NotImplementedError

    def init_sequence_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> MixerState:
        """The state of the sequence modelling before the first token."""
        raise UserError(f"{type(self).__name__} has no decoding state: it cannot generate text")

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> TimeMixState:
        """The state before the first token; see `Mixer.init_state`."""
        shift = TokenShiftState.empty(batch_size, self.d_model, device, dtype)
        return TimeMixState(shift, self.init_sequence_state(batch_size, max_length, device, dtype))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the original's training script does; the mixer starts as zero."""
        width = self.d_model
        channel = torch.arange(width, device=self.key_mix.device) / width
        depth = 1 - self.layer_idx / self.n_layers
        for mix, power in (
            (self.receptance_mix, 0.2),
            (self.key_mix, 0.7),
            (self.value_mix, 0.7),
            (self.gate_mix, 0.2),
        ):
            mix.copy_(1 - channel ** (power * depth))
        for layer, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0)):
            nn.init.orthogonal_(layer.weight, gain=gain)
        nn.init.zeros_(self.output.weight)
        self.gate.reset_parameters()
        if self.value_gate is not None:
            self.value_gate.reset_parameters()
            slope = torch.linspace(-0.5, 0.5, width, device=self.key_mix.device)
            self.value_gate.up.bias.copy_(0.73 - 0.4 * slope)
        draw_output_norm(self.norm, self.layer_idx, self.n_layers)

    def connect(self, earlier: Sequence[Mixer]) -> None:
        """Drop the gate between own and first values in the first layer of this kind; see `Mixer.connect`."""
        if not any(isinstance(mixer, RWKV7TimeMix) for mixer in earlier):
            self.value_gate = None

    def forward(
        self,
        x: Tensor,
        *,
        state: TimeMixState | None = None,
        cu_seqlens: Tensor | None = None,
        carry: Carry | None = None,
    ) -> Tensor:
        """Mix `x [B, T, d_model]`; see `Mixer.forward`.

        Args:
            x: the normalised residual stream.
            state: made by `init_state`.
            cu_seqlens: `[N + 1]` borders of packed documents.
            carry: holds `V_FIRST` after the first layer of this kind. Without a carry there is no value residual.
        """
        delta = token_shift(x, state=state.shift if state else None, cu_seqlens=cu_seqlens) - x
        r, k = self._receptance_and_key(x, delta)
        v = self._value(torch.addcmul(x, delta, self.value_mix), {} if carry is None else carry)
        # All that needs x and delta comes before the sequence modelling, where compiled graphs may break.
        inputs, bonus = self.sequence_inputs(x, delta, r, k, self._heads(v))
        gate = self.gate(torch.addcmul(x, delta, self.gate_mix))
        o = self.mix_sequence(inputs, state=state.sequence if state else None, cu_seqlens=cu_seqlens)
        o = self.norm(o.flatten(2).flatten(0, 1)).view_as(x)
        if bonus is not None:
            o = o + bonus.flatten(2)
        return self.output(o * gate)

    def _receptance_and_key(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        r = self.receptance(torch.addcmul(x, delta, self.receptance_mix))
        k = self.key(torch.addcmul(x, delta, self.key_mix))
        return self._heads(r), self._heads(k)

    def _value(self, mixed: Tensor, carry: Carry) -> Tensor:
        v = self.value(mixed)
        if V_FIRST not in carry:
            # A copy, since PyTorch 2.11's cache of compiled graphs breaks outputs that share memory: it crashes when it
            # stores them, or takes random numbers for their shapes when it loads them.
            carry[V_FIRST] = v.clone()
            return v
        if self.value_gate is None:
            raise UserError(f"the first layer with a value residual takes no {V_FIRST}")
        return torch.lerp(v, carry[V_FIRST], torch.sigmoid(self.value_gate(mixed)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, self.head_dim))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Projections alone; subclasses add the sequence modelling."""
        layers = (layer for layer in self.modules() if isinstance(layer, nn.Linear))
        return linear_flops(*layers) * (3 if training else 1)


class RWKV7(RWKV7TimeMix):
    """The time-mix of RWKV-7 (Goose): a state that each token decays by channel and edits along one direction.

    Args:
        d_model: width of the residual stream.
        layer_idx: index of the layer, from 0.
        n_layers: number of layers of the model.
        n_heads: heads H, a divisor of `d_model`; the originals have heads of 64 channels.
        backend: of the recurrence: "reference" is plain PyTorch, "fla" the CUDA kernels of fla-core; "auto" takes these
            on CUDA.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"decode", "packed", "entropy"})
    implied: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv 2503.14456"
    ops: ClassVar[tuple[str, ...]] = ("rwkv7",)

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: int, backend: str = "auto") -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads)
        OPS["rwkv7"].check(backend)
        self.backend: str = backend
        self.decay_mix, self.rate_mix = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        self.decay = LowRank(d_model, 1.8 * d_model**0.5, activation=torch.tanh, bias=True)
        self.rate = LowRank(d_model, 1.8 * d_model**0.5, bias=True)
        self.removal_scale, self.rate_scale = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        self.bonus = nn.Parameter(torch.empty(n_heads, self.head_dim))
        leave_undecayed(self.bonus)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the original's training script does; the mixer starts as zero."""
        super().reset_parameters()
        width, depth = self.d_model, self.layer_idx / max(self.n_layers - 1, 1)
        channel = torch.arange(width, device=self.bonus.device)
        for mix in (self.decay_mix, self.rate_mix):
            mix.copy_(1 - (channel / width) ** (0.9 * (1 - self.layer_idx / self.n_layers)))
        slope = channel / (width - 1) - 0.5
        middle = (self.head_dim - 1) / 2
        zigzag = (channel % self.head_dim - middle) / max(middle, 1)
        zigzag = zigzag * zigzag.abs()
        self.decay.reset_parameters()
        self.decay.up.bias.copy_(-5.5 + 6 * (slope + 0.5) ** (1 + depth**0.3) + 2.5 * zigzag)
        self.rate.reset_parameters()
        self.rate.up.bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * slope)
        self.removal_scale.copy_(0.71 - 0.1 * slope)
        self.rate_scale.fill_(1.02)
        self.bonus.fill_(-0.04)

    def sequence_inputs(self, x, delta, r, k, v):
        log_decay, k, a, b = self._step(x, delta, k)
        bonus = (r * k * self.bonus).sum(dim=-1, keepdim=True) * v
        return (r, log_decay, k, v, a, b), bonus.to(v.dtype)

    def mix_sequence(self, inputs, *, state, cu_seqlens):
        r, log_decay, k, v, a, b = inputs
        before = state.state if isinstance(state, RecurrentState) else None
        o, after = self._recur(r, log_decay, k, v, a, b, before, cu_seqlens)
        if isinstance(state, RecurrentState):
            state.state = after
        return o

    def _step(self, x: Tensor, delta: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logarithms of the decays, keys, what is looked up and where it is added, `[B, T, H, D]` each."""
        # exp(-softplus(-w) - 0.5) = sigmoid(w) exp(-0.5)
        w = at_least_float32(self.decay(torch.addcmul(x, delta, self.decay_mix)))
        log_decay = LOWEST_LOG_DECAY * torch.sigmoid(self._heads(w))
        rate = self._heads(torch.sigmoid(self.rate(torch.addcmul(x, delta, self.rate_mix))))
        removal = F.normalize(k * self.removal_scale.view_as(self.bonus), dim=-1)
        replaced = k * (1 + (rate - 1) * self.rate_scale.view_as(self.bonus))
        # in the dtype of the projections, under autocast that of the recurrence: the weights have made them float32
        keys, lookup, target = (t.to(k.dtype) for t in (replaced, -removal, removal * rate))
        return log_decay, keys, lookup, target

    def _recur(self, r, log_decay, k, v, a, b, before: Tensor | None, cu_seqlens: Tensor | None):
        return rwkv7(
            r,
            k,
            v,
            log_decay,
            a,
            b,
            lower_bound=LOWEST_LOG_DECAY,
            initial_state=before,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )

    def init_sequence_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> RecurrentState:
        return RecurrentState(empty_state(batch_size, (self.n_heads, self.head_dim, self.head_dim), device, dtype))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Projections and recurrence; see `Mixer.flops_per_token`."""
        # Four products with the state: look up, add what was found, write, read.
        recurrence = 8.0 * self.d_model * self.head_dim * (3 if training else 1)
        return super().flops_per_token(seq_len, training=training) + recurrence

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the last token and the matrices; see `Mixer.state_bytes`."""
        return sum(tensor.nbytes for tensor in self.init_state(1, seq_len, "meta", dtype).tensors())

    @torch.no_grad()
    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Entropy `[B, T, H]` in nats of the recurrence's implied weights, without gradient and without the bonus."""
        delta = token_shift(x, cu_seqlens=cu_seqlens) - x
        r, k = self._receptance_and_key(x, delta)
        log_decay, k, a, b = self._step(x, delta, k)
        return implied_entropy(lambda values: self._recur(r, log_decay, k, values, a, b, None, cu_seqlens)[0], r)


class RWKV7Shell(RWKV7TimeMix):
    """RWKV-7's time-mix with attention in place of its recurrence.

    Args:
        d_model: width of the residual stream.
        layer_idx: index of the layer, from 0.
        n_layers: number of layers of the model.
        n_heads: heads H, a divisor of `d_model`.
        core: the attention core; `SoftmaxCore` unless given.
        position: "rope", "alibi", "none" or a class of `PositionEncoding`.
        rope_base: base of RoPE.
        qk_norm: whether queries and keys are normalised to unit length; as published for the core unless given.
        temperature: divisor of the scores; `sqrt(D)`, or `1 / sqrt(D)` with `qk_norm`, unless given.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"decode", "packed", "entropy"})
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "core.chunk_size": "length", "core.window": "length"}
    source: ClassVar[str] = "arXiv 2503.14456 (RWKV-7), arXiv 2505.18522 (attention inside)"
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "its core's"}

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: int,
        core: AttentionCore | None = None,
        position: Position = "rope",
        rope_base: float = 1e6,
        qk_norm: bool | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads)
        core = SoftmaxCore() if core is None else core
        self.attend = Attend(
            core,
            n_heads,
            self.head_dim,
            position=position,
            rope_base=rope_base,
            qk_norm=core.qk_norm if qk_norm is None else qk_norm,
            temperature=temperature,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights, those of a position encoding too."""
        super().reset_parameters()
        self.attend.reset_parameters()

    def mix_sequence(self, inputs, *, state, cu_seqlens):
        return self.attend(*inputs, state=state, cu_seqlens=cu_seqlens)

    def init_sequence_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> KeyValueState:
        return self.attend.core.init_state(
            batch_size, max_length, self.n_heads, self.head_dim, device=device, dtype=dtype
        )

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Projections and attention; see `Mixer.flops_per_token`."""
        projections = super().flops_per_token(seq_len, training=training)
        return projections + self.attend.flops_per_token(seq_len, training=training)

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the last token and the key/value cache; see `Mixer.state_bytes`."""
        cache = self.attend.core.state_bytes(seq_len, self.n_heads, self.head_dim, dtype)
        return cache + self.d_model * dtype.itemsize

    @torch.no_grad()
    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Entropy `[B, T, H]` in nats of the distribution that the core defines, without gradient."""
        r, k = self._receptance_and_key(x, token_shift(x, cu_seqlens=cu_seqlens) - x)
        return self.attend.entropy(r, k, cu_seqlens=cu_seqlens)
