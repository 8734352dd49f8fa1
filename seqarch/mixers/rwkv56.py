"""The time-mix of RWKV-5 (Eagle) and RWKV-6 (Finch), arXiv 2404.05892.

Formulas and initial values follow the authors' code, github.com/BlinkDL/RWKV-LM, RWKV-v5/src/model.py: the classes
RWKV_Tmix_x052 and RWKV_Tmix_x060, and RWKV.generate_init_weight.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, divide
from seqarch.kernels import rwkv6
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers.base import Scale, is_fused, leave_undecayed, undecayed
from seqarch.mixers.few_inputs import has_few_inputs
from seqarch.mixers.options import with_options_of
from seqarch.mixers.recurrent import Composes, Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.token_shift import draw_mixes, token_shift

MIXED = ("receptance", "key", "value", "gate")
"""What is projected from a token mixed with the one before it."""


class RWKVTimeMix(RecurrentMixer):
    """The common part of all versions: the sizes of heads, and how much of the token before goes into each projection.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        backend: of the recurrence.
    """

    shifts: ClassVar[bool] = True
    family: ClassVar[str] = "rwkv"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 12}}

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: Count, backend: str = "auto") -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        self.n_heads = n_heads
        self.head_dim = divide(d_model=d_model, n_heads=n_heads)
        self.receptance_mix, self.key_mix, self.value_mix, self.gate_mix = (
            nn.Parameter(torch.empty(d_model)) for _ in MIXED
        )


class RWKV56TimeMix(RWKVTimeMix):
    """The common part of RWKV-5 and RWKV-6; a subclass defines `mixed` and calls `reset_parameters` last.

    Mixes follow RWKV-6, `x + (previous - x) * mix`; `time_mix` of the original's RWKV-5 is one minus ours.

    Args:
        n_heads: heads H, a divisor of `d_model`; the originals have heads of 64 channels.
        backend: of the recurrence: "reference" is plain PyTorch, "fla" the CUDA kernels of fla-core; "auto" takes these
            on CUDA.
    """

    source: ClassVar[str] = "arXiv 2404.05892"
    composes: ClassVar[Composes] = "decays"
    ops: ClassVar[tuple[str, ...]] = ("rwkv6",)

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: Count, backend: str = "auto") -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads, backend=backend)
        self.state_shape = (n_heads, self.head_dim, self.head_dim)
        self.receptance, self.key, self.value, self.gate, self.output = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(5)
        )
        self.decay, self.bonus = (undecayed(n_heads, self.head_dim) for _ in range(2))
        # The original divides by head_size_divisor = 8 before an epsilon of 1e-5.
        self.norm = nn.GroupNorm(n_heads, d_model, eps=64e-5)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the original's training script does; the mixer starts as zero."""
        device = self.decay.device
        depth = self.layer_idx / max(self.n_layers - 1, 1)
        channel = torch.arange(self.d_model, device=device)
        last = channel / (self.d_model - 1)
        draw_mixes(self, receptance=0.5, key=1.0, value=1.0, gate=0.5)
        self.value_mix.sub_(0.3 * depth)
        self.decay.copy_((-6 + 5 * last ** (0.7 + 1.3 * depth)).view_as(self.decay))
        zigzag = 0.1 * ((channel + 1) % 3 - 1)
        self.bonus.copy_((depth * (1 - last) + zigzag).view_as(self.bonus))
        for layer, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0), (self.gate, 0.1)):
            nn.init.orthogonal_(layer.weight, gain=gain)
        nn.init.zeros_(self.output.weight)
        draw_output_norm(self.norm, self.layer_idx, self.n_layers)

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        before = token_shift(x, state=state.shift if state else None, cu_seqlens=cu_seqlens)
        r, k, v, gate, decay = self.mixed(x, before - x)
        r, k, v = (t.unflatten(-1, (self.n_heads, self.head_dim)) for t in (r, k, v))
        return Projected(v, (r, k, -decay.exp()), (gate,))

    @abstractmethod
    def mixed(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """r, k, v and gate `[B, T, d_model]`, and decay `[B, T, H, D]`; `delta` is the previous token minus `x`."""

    def recur(self, values, r, k, log_decay, **options):
        return rwkv6(r, k, values, log_decay, self.bonus, **options, backend=self.backend)

    def decays(self, r: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
        return log_decay.sum(1).exp()[..., None]

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        normed = self.norm(o.flatten(2).flatten(0, 1)).unflatten(0, o.shape[:2])
        return self.output(normed * F.silu(gate))


class RWKV5(RWKV56TimeMix):
    """The time-mix of RWKV-5 (Eagle): a matrix-valued state with a learned decay for each channel.

    Args:
        n_heads: heads H, a divisor of `d_model`; the originals have heads of 64 channels.
        backend: of the recurrence: "reference" is plain PyTorch, "fla" the CUDA kernels of fla-core; "auto" takes these
            on CUDA.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: Count, backend: str = "auto") -> None:
        super().__init__(d_model, layer_idx, n_layers, n_heads=n_heads, backend=backend)
        self.reset_parameters()

    def mixed(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        r, k, v, gate = (getattr(self, name)(torch.addcmul(x, delta, getattr(self, f"{name}_mix"))) for name in MIXED)
        return r, k, v, gate, at_least_float32(self.decay).expand(*x.shape[:2], -1, -1)


class RWKV6(RWKV56TimeMix):
    """The time-mix of RWKV-6 (Finch): RWKV-5's with token shift and decay that depend on the data.

    Args:
        n_heads: heads H, a divisor of `d_model`; the originals have heads of 64 channels.
        mix_rank: rank of the part of the token shift that depends on the data.
        decay_rank: rank of the part of the decay that depends on the data.
        backend: of the recurrence: "reference" is plain PyTorch, "fla" the CUDA kernels of fla-core; "auto" takes these
            on CUDA.
    """

    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "mix_rank": "head", "decay_rank": "head"}

    @with_options_of(RWKV56TimeMix)
    def __init__(self, *place: int, mix_rank: Count = 32, decay_rank: Count = 64, **options: Any) -> None:
        super().__init__(*place, **options)
        self.mix_rank = mix_rank
        d_model = self.d_model
        self.decay_mix = nn.Parameter(torch.empty(d_model))
        self.shift_mix = nn.Parameter(torch.empty(d_model))
        kinds = len(MIXED) + 1
        self.mix_down = nn.Linear(d_model, kinds * mix_rank, bias=False)
        is_fused(self.mix_down, *[mix_rank] * kinds)
        self.mix_up = nn.Parameter(torch.empty(kinds, mix_rank, d_model))
        self.decay_down = nn.Linear(d_model, decay_rank, bias=False)
        self.decay_up = nn.Linear(decay_rank, d_model, bias=False)
        has_few_inputs(self.decay_up)
        leave_undecayed(self.mix_down.weight, self.mix_up, self.decay_down.weight, self.decay_up.weight)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the original's training script does; the mixer starts as zero."""
        super().reset_parameters()
        self.decay_mix.copy_(self.key_mix)
        self.shift_mix.copy_(self.key_mix)
        for down, up in ((self.mix_down, self.mix_up), (self.decay_down, self.decay_up.weight)):
            nn.init.zeros_(down.weight)
            nn.init.uniform_(up, -0.01, 0.01)

    def mixed(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.mix_down(torch.addcmul(x, delta, self.shift_mix)))
        hidden = hidden.flatten(0, 1).unflatten(1, (-1, self.mix_rank)).transpose(0, 1)
        learned = (hidden @ self.mix_up.to(hidden.dtype)).unflatten(1, x.shape[:2])
        mixes = (self.receptance_mix, self.key_mix, self.value_mix, self.gate_mix, self.decay_mix)
        *inputs, decay_input = (
            torch.addcmul(x, delta, mix + part) for mix, part in zip(mixes, learned.unbind(0), strict=True)
        )
        r, k, v, gate = (getattr(self, name)(each) for name, each in zip(MIXED, inputs, strict=True))
        change = self.decay_up(torch.tanh(self.decay_down(decay_input))).unflatten(-1, self.decay.shape)
        return r, k, v, gate, at_least_float32(self.decay) + at_least_float32(change)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        learned = 2.0 * self.mix_up.numel()
        return super().flops_per_token(seq_len, training=training) + learned * (3 if training else 1)


def draw_output_norm(norm: nn.GroupNorm, layer_idx: int, n_layers: int) -> None:
    """Initial values of the group norm of outputs, in all versions: deeper layers start with larger weights."""
    nn.init.constant_(norm.weight, ((1 + layer_idx) / n_layers) ** 0.7)
    nn.init.zeros_(norm.bias)
