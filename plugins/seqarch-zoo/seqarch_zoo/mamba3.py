"""Mamba-3 (arXiv 2603.15569): trapezoidal steps, a complex state by rotations that depend on the data, several inputs.

Layer and initial values follow the authors' code, github.com/state-spaces/mamba, mamba_ssm/modules/mamba3.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, divide
from seqarch.errors import UserError
from seqarch.kernels import ssd
from seqarch.kernels.tensors import at_least_float32, check_sequences, document_positions
from seqarch.mixers.base import Scale, is_fused, undecayed
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState, init_step_bias

NORM_EPS = 1e-5
SMALLEST_A = 1e-4
ANGLE_BLOCK = 64
"""Tokens whose angles are summed in the dtype of the angles."""


class Mamba3(RecurrentMixer):
    """Mamba-3, without a short convolution: each step weighs its own input and the one before.

    seqarch's `ssd` runs the recurrence. The share of a token that the next step adds is added in the token's own step.

    Args:
        d_state: size N of the state of a channel.
        expand: inner width in multiples of `d_model`.
        head_dim: channels P of a head; a divisor of the inner width.
        n_groups: groups of heads that share B and C; a divisor of the number of heads.
        rotated: share of the state's channels that rotate, 0.5 or 1.
        rank: inputs and outputs R of each step (MIMO); 1 for one.
        backend: "auto", "reference" or another of `seqarch.kernels.ssd`.
    """

    family: ClassVar[str] = "mamba"
    source: ClassVar[str] = "arXiv 2603.15569"
    in_every_layer: ClassVar[bool] = True
    scales: ClassVar[Mapping[str, Scale]] = {"d_state": "head", "head_dim": "head"}
    ops: ClassVar[tuple[str, ...]] = ("ssd",)

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        d_state: Count = 128,
        expand: Count = 2,
        head_dim: Count = 64,
        n_groups: Count = 1,
        rotated: float = 0.5,
        rank: Count = 1,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        divide(n_heads=divide(d_inner=expand * d_model, head_dim=head_dim), n_groups=n_groups)
        width = expand * d_model
        if rotated not in (0.5, 1.0):
            raise UserError(f"rotated must be 0.5 or 1, not {rotated}")
        self.n_angles = int(d_state * rotated) // 2
        if d_state % 2:
            raise UserError(f"d_state must be even, as channels rotate in pairs, not {d_state}")
        if self.n_angles < 1:
            raise UserError(f"d_state={d_state} is too small for rotations: give at least {round(2 / rotated)}")
        if rank > 1:
            self.capabilities = frozenset({"decode", "packed"})
        heads = width // head_dim
        self.n_heads, self.head_dim, self.d_state, self.n_groups, self.rank = heads, head_dim, d_state, n_groups, rank
        self.state_shape = (
            (heads, d_state, head_dim),
            (heads, self.n_angles),
            (rank, heads, d_state),
            (heads, head_dim),
        )
        shared = n_groups * d_state * rank
        self.widths = [width, width, shared, shared, heads, heads, heads, self.n_angles]
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=False)
        is_fused(self.in_proj, *self.widths)
        self.dt_bias = undecayed(heads)
        self.B_norm, self.C_norm = (nn.Parameter(torch.empty(d_state)) for _ in range(2))
        self.B_bias, self.C_bias = (undecayed(rank, heads, d_state) for _ in range(2))
        self.D = undecayed(heads)
        self.ranks = undecayed(3, rank, heads, head_dim) if rank > 1 else None
        self.out_proj = nn.Linear(width, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: steps log-uniform in 0.001..0.1, biases of B and C one."""
        self.in_proj.reset_parameters()
        init_step_bias(self.dt_bias)
        for parameter in (self.B_norm, self.C_norm, self.B_bias, self.C_bias, self.D):
            parameter.fill_(1)
        if self.ranks is not None:
            for parameter, value in zip(self.ranks, (1 / self.rank, 1.0, 1 / self.rank), strict=True):
                parameter.fill_(value)
        self.out_proj.reset_parameters()
        self.out_proj.weight /= math.sqrt(self.n_layers)

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        z, values, B, C, dt, A, trapezoid, angles = self.in_proj(x).split(self.widths, dim=-1)
        keys, queries = self._shared(B, self.B_norm, self.B_bias), self._shared(C, self.C_norm, self.C_bias)
        steps = F.softplus(at_least_float32(dt) + at_least_float32(self.dt_bias))
        log_decay = steps * (-F.softplus(at_least_float32(A))).clamp(max=-SMALLEST_A)
        own = torch.sigmoid(at_least_float32(trapezoid))
        turns = math.pi * torch.tanh(at_least_float32(angles))[:, :, None] * steps[..., None]
        values, z = (t.unflatten(-1, (self.n_heads, self.head_dim)) for t in (values, z))
        return Projected(values, (queries, keys, steps, own, log_decay, turns), (values, z, x.dtype))

    def _shared(self, t: Tensor, norm: Tensor, bias: Tensor) -> Tensor:
        """B or C, normalised, for each head and with its bias: `[B, T, R, H, N]`."""
        t = at_least_float32(t).unflatten(-1, (self.rank, self.n_groups, self.d_state))
        t = F.rms_norm(t, (self.d_state,), norm, NORM_EPS)
        return (t.unsqueeze(4) + bias.unflatten(1, (self.n_groups, -1))).flatten(3, 4)

    def recur(self, values, queries, keys, steps, own, log_decay, turns, *, initial_state=None, cu_seqlens=None):
        """Outputs `[B, T, H, P]`, or `[B, T, R, H, P]` with several ranks, and the final state."""
        check_sequences({"values [B, T, H, P]": values}, cu_seqlens)
        # Sums of products, since einsum would make a matrix product of bf16 for each token and head. They are taken
        # before the rotations, which turn queries and keys alike and so do not change them.
        seen = (queries[:, :, :, None] * keys[:, :, None]).sum(dim=-1)
        angles = _angles(turns, None if initial_state is None else initial_state[1], cu_seqlens)
        queries, keys = _rotate(queries, angles), _rotate(keys, angles)
        several = (values * self._rank(0))[:, :, None] if self.ranks is None else values[:, :, None] * self._rank(0)
        later = _of_the_next((1 - own) * steps, cu_seqlens)
        before = None
        if initial_state is not None:
            memory, _, last_keys, last_values = initial_state
            last = last_values[:, None] * self._rank(0)
            before = torch.einsum("brhn,brhp,bh->bhnp", last_keys, last, ((1 - own) * steps)[:, 0]) + memory
        o, memory = self._ssd(several, own * steps + later, log_decay, keys, queries, before, cu_seqlens)
        # The token's own output does not yet include the share that the next step adds.
        o = o - ((seen * later[:, :, None, None])[..., None] * at_least_float32(several)[:, :, None]).sum(dim=3)
        # Copies: views would keep whole sequences in memory.
        final = (memory, *(at_least_float32(t[:, -1]).clone() for t in (angles, keys, values)))
        return (o if self.ranks is not None else o.squeeze(2)).to(values.dtype), final

    def _rank(self, kind: int) -> Any:
        """Factors of the inputs, the gates or the outputs `[R, H, P]`; 1 for rank 1."""
        return 1.0 if self.ranks is None else self.ranks[kind]

    def _ssd(self, values, steps, log_decay, keys, queries, before, cu_seqlens):
        """`ssd` for each pair of an input and an output of a step. The pairs are heads of one call."""
        R, H = self.rank, self.n_heads
        pairs = [(q, r) for q in range(R) for r in range(R)]
        x = torch.cat([values[:, :, r] for _, r in pairs], dim=2)
        B = torch.cat([keys[:, :, r] for _, r in pairs], dim=2).to(x.dtype)
        C = torch.cat([queries[:, :, q] for q, _ in pairs], dim=2).to(x.dtype)
        if before is not None:  # once for each output
            before = torch.cat([before if r == 0 else torch.zeros_like(before) for _, r in pairs], dim=1)
        steps, log_decay = (t.repeat(1, 1, R * R) for t in (steps, log_decay))
        options: dict[str, Any] = {"initial_state": before, "cu_seqlens": cu_seqlens, "backend": self.backend}
        o, state = ssd(x, steps, None, B, C, log_decay=log_decay, **options)
        o = at_least_float32(o).unflatten(2, (R, R, H)).sum(dim=3)
        return o, state.unflatten(1, (R, R, H))[:, 0].sum(dim=1)

    def finish(self, o: Tensor, values: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
        o, values, z = (at_least_float32(t) for t in (o, values, z))
        if self.ranks is not None:
            values, z = values[:, :, None] * self._rank(0), z[:, :, None] * self._rank(1)
        o = (o + self.D[:, None] * values) * F.silu(z)
        if self.ranks is not None:
            o = (o * self._rank(2)).sum(dim=2)
        return self.out_proj(o.to(dtype).flatten(2))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the projections and of each pair's products with its state; see `Mixer.flops_per_token`."""
        pairs = 4.0 * (self.rank**2 - 1) * self.n_heads * self.d_state * self.head_dim * (3 if training else 1)
        return super().flops_per_token(seq_len, training=training) + pairs


def _angles(turns: Tensor, last: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """The angles before, `last [B, H, A]`, plus the sums of `turns [B, T, H, A]` in a document, up to full turns.

    Sums over blocks of tokens are in float64, as they grow without bound; those inside a block keep the dtype.
    """
    length = turns.shape[1]
    size = min(ANGLE_BLOCK, length)
    inside = F.pad(turns, (0, 0, 0, 0, 0, -length % size)).unflatten(1, (-1, size)).cumsum(dim=2)
    blocks = inside[:, :, -1].double()
    before = blocks.cumsum(dim=1) - blocks
    if last is not None:
        before = before + last.double()[:, None]
    sums = (inside + before.remainder(2 * math.pi).to(turns.dtype)[:, :, None]).flatten(1, 2)[:, :length]
    if cu_seqlens is None:
        return sums
    first = torch.arange(length, device=turns.device) - document_positions(turns, cu_seqlens=cu_seqlens)
    return sums - (sums - turns)[:, first]


def _rotate(t: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbours among the first channels of `t [B, T, R, H, N]` by `angles [B, T, H, A]`."""
    # Products over all pairs: cat and stack would write the pieces to memory.
    pairs = t.unflatten(-1, (-1, 2))
    angles = F.pad(angles, (0, pairs.shape[-2] - angles.shape[-1]))[:, :, None, ..., None]
    signs = torch.arange(-1, 2, 2, device=t.device)
    return (pairs * angles.cos() + pairs.flip(-1) * angles.sin() * signs).flatten(-2)


def _of_the_next(t: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`t [B, T, H]` of the next token, zero for the last of a document."""
    t = F.pad(t[:, 1:], (0, 0, 0, 1))
    if cu_seqlens is None:
        return t
    starts = document_positions(t, cu_seqlens=cu_seqlens) == 0
    return t.masked_fill(F.pad(starts[1:], (0, 1), value=True)[:, None], 0)
