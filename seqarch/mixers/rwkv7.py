"""The time-mix of RWKV-7 (arXiv 2503.14456): its recurrence is `RWKV7`, another core in its place `RWKV7Shell`.

Formulas and initial values follow the authors' code, github.com/BlinkDL/RWKV-LM, RWKV-v7/train_temp/src/model.py: the
class RWKV_Tmix_x070, and RWKV.generate_init_weight, which draws projections and group norm again before training.
Ranks of the low-rank parts are those of the paper's time; later versions suggest others at widths other than 768.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, Positive
from seqarch.errors import UserError
from seqarch.kernels import rwkv7
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers.attention import Attend
from seqarch.mixers.base import Carry, Losses, Mixer, MixerState, Scale, leave_undecayed, linear_flops, undecayed
from seqarch.mixers.cores import AttentionCore, SoftmaxCore
from seqarch.mixers.few_inputs import has_few_inputs
from seqarch.mixers.options import with_options_of
from seqarch.mixers.positions import Base, Position
from seqarch.mixers.recurrent import Composes, Projected, RecurrentState
from seqarch.mixers.rwkv56 import RWKVTimeMix, draw_output_norm
from seqarch.mixers.token_shift import draw_mixes, token_shift

LOWEST_LOG_DECAY = -math.exp(-0.5)
"""RWKV-7's decays are `exp(-exp(w))` with `w` soft-clamped below -0.5."""
ROPE_BASE = 1e6
V_FIRST = "v_first"
"""In the carry: the values `[B, T, d_model]` of the first layer, which later layers mix into their own."""


class LowRank(nn.Module):
    """`up(activation(down(x)))`; starts independent of `x`, as `down` starts at zero.

    Args:
        d_model: width of input and output.
        rank: width between, or what gives it at a `d_model`.
        activation: function between.
        bias: whether a bias is added.
    """

    def __init__(
        self,
        d_model: int,
        rank: int | Callable[[int], int],
        *,
        activation: Callable[[Tensor], Tensor] | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        width = rank(d_model) if callable(rank) else rank
        self.down = nn.Linear(d_model, width, bias=False)
        self.up = nn.Linear(width, d_model, bias=bias)
        has_few_inputs(self.up, rank if callable(rank) else None, orthogonal=True)
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


def rank_at(factor: float, power: float, d_model: int) -> int:
    """A rank as the authors' training script rounds it: to a multiple of 32, at least 32."""
    return max(32, round(factor * d_model**power / 32) * 32)


class RWKV7TimeMix(RWKVTimeMix):
    """The part around RWKV-7's sequence modelling: token shift, projections, value residual, group norm, gate.

    A subclass supplies the sequence modelling: `recur` and what belongs to it. It defines `sequence_inputs` if the
    modelling takes more than receptances and keys, and calls `reset_parameters` last.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        value_rank: width of the low-rank part of the value residual; by default that of the paper's time.
        gate_rank: the same of the gate.
        backend: of the recurrence: "reference" is plain PyTorch, "fla" the CUDA kernels of fla-core; "auto" takes these
            on CUDA.
    """

    has_values: bool = True
    """Whether the layer hands its values to later layers."""

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        value_rank: Count | None = None,
        gate_rank: Count | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads, backend=backend)
        self.receptance, self.key, self.value, self.output = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        self.gate = LowRank(d_model, gate_rank or functools.partial(rank_at, 0.6, 0.8), activation=torch.sigmoid)
        of_values = value_rank or functools.partial(rank_at, 1.3, 0.5)
        self.value_gate = LowRank(d_model, of_values, bias=True) if layer_idx > 0 else None
        # 64e-5 is the published 1e-5 times the square of the head size divisor, 8.
        self.norm = nn.GroupNorm(n_heads, d_model, eps=64e-5)

    def sequence_inputs(
        self, x: Tensor, delta: Tensor, r: Tensor, k: Tensor, v: Tensor
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The inputs of the sequence modelling in addition to the values: r and k, unless a subclass needs more.

        Args:
            x: input of the mixer `[B, T, d_model]`.
            delta: the previous token minus `x`, for further token shifts `x + delta * mix`.
            r: receptances (queries) `[B, T, H, D]`.
            k: keys `[B, T, H, D]`.
            v: values `[B, T, H, D]`, the value residual applied.

        Returns:
            The inputs, and what is to be added to the normalised outputs, if anything.
        """
        return (r, k), None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the original's training script does; the mixer starts as zero."""
        draw_mixes(self, receptance=0.2, key=0.7)
        for layer, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0)):
            nn.init.orthogonal_(layer.weight, gain=gain)
        self.reset_around()
        if self.value_gate is not None:
            self.value_gate.reset_parameters()
            slope = torch.linspace(-0.5, 0.5, self.d_model, device=self.key_mix.device)
            self.value_gate.up.bias.copy_(0.73 - 0.4 * slope)

    @torch.no_grad()
    def reset_around(self) -> None:
        """Draw what is there around any sequence modelling: its token shift, gate, norm and output."""
        draw_mixes(self, value=0.7, gate=0.2)
        nn.init.zeros_(self.output.weight)
        self.gate.reset_parameters()
        draw_output_norm(self.norm, self.layer_idx, self.n_layers)

    def connect(self, earlier: Sequence[Mixer]) -> None:
        """Drop the gate between own and first values in the first layer of this kind; see `Mixer.connect`."""
        if not any(isinstance(mixer, RWKV7TimeMix) and mixer.has_values for mixer in earlier):
            self.value_gate = None

    def forward(
        self,
        x: Tensor,
        *,
        state: RecurrentState | None = None,
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
        return self.mix(x, state, cu_seqlens, carry=carry)

    def project(self, x: Tensor, state: Any, cu_seqlens: Tensor | None, carry: Carry | None = None) -> Projected:
        delta = token_shift(x, state=state.shift if state else None, cu_seqlens=cu_seqlens) - x
        r = self._heads(self.receptance(torch.addcmul(x, delta, self.receptance_mix)))
        k = self._heads(self.key(torch.addcmul(x, delta, self.key_mix)))
        v = self._heads(self._value(torch.addcmul(x, delta, self.value_mix), {} if carry is None else carry))
        inputs, bonus = self.sequence_inputs(x, delta, r, k, v)
        return Projected(v, inputs, (bonus, self.gate(torch.addcmul(x, delta, self.gate_mix))))

    def finish(self, o: Tensor, bonus: Tensor | None, gate: Tensor) -> Tensor:
        o = self.norm(o.flatten(2).flatten(0, 1)).view_as(gate)
        if bonus is not None:
            o = o + bonus.flatten(2)
        return self.output(o * gate)

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


class RWKV7(RWKV7TimeMix):
    """The time-mix of RWKV-7 (Goose): a state that each token decays by channel and edits along one direction.

    Args:
        n_heads: heads H, a divisor of `d_model`; the originals have heads of 64 channels.
        decay_rank: width of the low-rank part of the decays; by default that of the paper's time.
        rate_rank: the same of the learning rates.
        **options: as in `RWKV7TimeMix`.
    """

    products: ClassVar[int] = 4  # look up, add what was found, write, read
    source: ClassVar[str] = "arXiv 2503.14456"
    composes: ClassVar[Composes] = "matrix"
    ops: ClassVar[tuple[str, ...]] = ("rwkv7",)

    @with_options_of(RWKV7TimeMix)
    def __init__(
        self, *place: int, decay_rank: Count | None = None, rate_rank: Count | None = None, **options: Any
    ) -> None:
        super().__init__(*place, **options)
        d_model = self.d_model
        self.state_shape = (self.n_heads, self.head_dim, self.head_dim)
        self.decay_mix, self.rate_mix = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        default = functools.partial(rank_at, 1.8, 0.5)
        self.decay = LowRank(d_model, decay_rank or default, activation=torch.tanh, bias=True)
        self.rate = LowRank(d_model, rate_rank or default, bias=True)
        self.removal_scale, self.rate_scale = (nn.Parameter(torch.empty(d_model)) for _ in range(2))
        self.bonus = undecayed(self.n_heads, self.head_dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the original's training script does; the mixer starts as zero."""
        super().reset_parameters()
        width, depth = self.d_model, self.layer_idx / max(self.n_layers - 1, 1)
        channel = torch.arange(width, device=self.bonus.device)
        draw_mixes(self, decay=0.9, rate=0.9)
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
        return (r, log_decay, k, a, b), bonus.to(v.dtype)

    def _step(self, x: Tensor, delta: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logarithms of the decays, keys, what is looked up and where it is added, `[B, T, H, D]` each."""
        # exp(-softplus(-w) - 0.5) = sigmoid(w) exp(-0.5)
        w = at_least_float32(self.decay(torch.addcmul(x, delta, self.decay_mix)))
        log_decay = LOWEST_LOG_DECAY * torch.sigmoid(self._heads(w))
        rate = self._heads(torch.sigmoid(self.rate(torch.addcmul(x, delta, self.rate_mix))))
        removal = F.normalize(k * self.removal_scale.view_as(self.bonus), dim=-1)
        replaced = k * (1 + (rate - 1) * self.rate_scale.view_as(self.bonus))
        # back to the projections' dtype, under autocast the recurrence's: the weights have made them float32
        keys, lookup, target = (t.to(k.dtype) for t in (replaced, -removal, removal * rate))
        return log_decay, keys, lookup, target

    def recur(self, values, r, log_decay, k, a, b, **options):
        return rwkv7(r, k, values, log_decay, a, b, lower_bound=LOWEST_LOG_DECAY, **options, backend=self.backend)


class RWKV7Shell(RWKV7TimeMix):
    """RWKV-7's time-mix with attention or another mixer in place of its recurrence.

    A mixer as core makes queries, keys and values of its own from the shifted input. So the shell then has no
    projections of these and no value residual; token shift, group norm, gate and output stay.

    Args:
        n_heads: heads H, a divisor of `d_model`; with a mixer as core the groups of the norm.
        core: an attention core, `SoftmaxCore` unless given, or a mixer.
        position: "rope", "alibi", "none" or a class of `PositionEncoding`.
        rope_base: base of RoPE.
        qk_norm: whether queries and keys are normalised to unit length; as published for the core unless given.
        temperature: divisor of the scores; `sqrt(D)`, or `1 / sqrt(D)` with `qk_norm`, unless given.

    Raises:
        UserError: the core is a mixer that hands tensors to later layers, or has options of attention next to it.
    """

    implied: bool = False
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "core.chunk_size": "length", "core.window": "length"}
    source: ClassVar[str] = "arXiv 2503.14456 (RWKV-7), arXiv 2505.18522 (attention inside)"
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "its core's"}

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        core: AttentionCore | Callable[[int, int, int], Mixer] | None = None,
        position: Position = "rope",
        rope_base: Base = ROPE_BASE,
        qk_norm: bool | None = None,
        temperature: Positive | None = None,
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads)
        core = SoftmaxCore() if core is None else core
        attention: dict[str, Any] = {"position": position, "rope_base": rope_base, "temperature": temperature}
        self.mixer: Mixer | None = None
        if isinstance(core, AttentionCore):
            qk_norm = core.qk_norm if qk_norm is None else qk_norm
            self.attend = Attend(core, n_heads, self.head_dim, qk_norm=qk_norm, **attention)
        else:
            self.mixer = core(d_model, layer_idx, n_layers)
            check_core(self.mixer, qk_norm=qk_norm, **attention)
            del self.receptance, self.key, self.value, self.receptance_mix, self.key_mix, self.value_gate
            self.has_values, self.value_gate = False, None
            self.capabilities, self.implied = self.mixer.capabilities, self.mixer.implied
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights, also of a position encoding or a mixer inside."""
        if self.mixer is None:
            super().reset_parameters()
            self.attend.reset_parameters()
        else:
            self.reset_around()
            self.mixer.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        state: RecurrentState | None = None,
        cu_seqlens: Tensor | None = None,
        carry: Carry | None = None,
        losses: Losses | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """As `RWKV7TimeMix.forward`; `losses` and `tokens` are for a mixer inside, see `Mixer.forward`."""
        if self.mixer is None:
            return self.mix(x, state, cu_seqlens, carry=carry)
        shifted, gate = self._shifted(x, state, cu_seqlens)
        inside = self.mixer.arguments(state and state.state, cu_seqlens, losses=losses, tokens=tokens)
        return self.finish(self.mixer(shifted, **inside), None, gate)

    def _shifted(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of a mixer inside, and the gate."""
        delta = token_shift(x, state=state and state.shift, cu_seqlens=cu_seqlens) - x
        return torch.addcmul(x, delta, self.value_mix), self.gate(torch.addcmul(x, delta, self.gate_mix))

    def recur(self, values, q, k, *, initial_state=None, cu_seqlens=None):
        return self.attend(q, k, values, state=initial_state, cu_seqlens=cu_seqlens), initial_state

    def init_sequence_state(self, batch_size: int, max_length: int, **like: Any) -> MixerState:
        """The state of the core: for attention an empty key/value cache."""
        if self.mixer is not None:
            return self.mixer.init_state(batch_size, max_length, **like)
        return self.attend.core.init_state(batch_size, max_length, self.n_heads, self.head_dim, **like)

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        if self.mixer is None:
            return super().state_bytes(seq_len, dtype)
        return self.mixer.state_bytes(seq_len, dtype) + self.d_model * dtype.itemsize

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        core = self.attend if self.mixer is None else self.mixer
        inside = {*core.modules()}  # a position encoding or a mixer counts its own
        around = (each for each in self.modules() if isinstance(each, nn.Linear) and each not in inside)
        return linear_flops(*around) * (3 if training else 1) + core.flops_per_token(seq_len, training=training)

    @property
    def flops_counted(self) -> bool:
        return self.mixer is not None and self.mixer.flops_counted

    @torch.no_grad()
    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """Entropy `[B, T, H]` in nats of the distribution that the core defines, without gradient."""
        if self.mixer is not None:
            return self.mixer.attention_entropy(self._shifted(x, None, cu_seqlens)[0], cu_seqlens=cu_seqlens)
        return self.attend.entropy(*self.project(x, None, cu_seqlens).inputs, cu_seqlens=cu_seqlens)


def check_core(mixer: Mixer, **attention: Any) -> None:
    """Refuse a mixer that cannot be a core of the shell, and `attention`'s options next to one that can."""
    name = type(mixer).__name__
    if "carry" in mixer.takes:
        raise UserError(f"core: {name} hands tensors to later layers, which RWKV7Shell does not pass on: take another")
    usual = {"position": "rope", "rope_base": ROPE_BASE, "qk_norm": None, "temperature": None}
    if wrong := [option for option, value in attention.items() if value != usual[option]]:
        raise UserError(f"{', '.join(wrong)}: for attention cores only; set the options of {name} in its init_args")
