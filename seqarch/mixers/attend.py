"""Shared by `Attention` and `RWKV7Shell`: normalised and positioned queries and keys around an attention core."""

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.kernels.packed import document_positions
from seqarch.mixers.base import Clock, refuse_packed_state
from seqarch.mixers.cores import AttentionCore
from seqarch.mixers.positions import Position, PositionName, alibi_slopes, apply_rope, rope_tables


class Attend(nn.Module):
    """Normalise queries and keys, give them their positions, attend; only a position encoding has parameters.

    Scores are `q . k / temperature`. Without normalisation the temperature is `sqrt(D)` unless given, as in the
    Transformer. With `qk_norm`, queries and keys have unit length, so scores lie in [-1/temperature, 1/temperature],
    whatever the projections learn. The temperature is then `1 / sqrt(D)` unless given: scores have the size that
    vectors with elements of unit variance have in the Transformer. At `sqrt(D)` all keys would weigh nearly the same.

    Args:
        core: the attention core.
        n_heads: query heads H.
        head_dim: D.
        n_kv_heads: key/value heads; as many as `n_heads` unless given.
        position: "rope" (after the normalisation), "alibi" (only for cores that take it), "none", or a class of
            `PositionEncoding` (after the normalisation).
        rope_base: longest wavelength of RoPE, over 2 pi.
        qk_norm: whether queries and keys are normalised to unit length.
        temperature: divisor of the scores.
    """

    def __init__(
        self,
        core: AttentionCore,
        n_heads: int,
        head_dim: int,
        *,
        n_kv_heads: int | None = None,
        position: Position,
        rope_base: float,
        qk_norm: bool,
        temperature: float | None,
    ) -> None:
        super().__init__()
        if isinstance(position, str) and position not in get_args(PositionName):
            raise UserError(f"position must be 'rope', 'alibi', 'none' or a position encoding, not '{position}'")
        if position == "rope" and head_dim % 2:
            raise UserError(f"position='rope' needs an even head_dim, not {head_dim}")
        if position == "rope" and not 1 < rope_base < float("inf"):
            raise UserError(f"rope_base must be larger than 1 and finite, not {rope_base}")
        if position == "alibi" and not core.alibi:
            raise UserError(f"position='alibi' does not go with {type(core).__name__}: use 'rope' or 'none'")
        if temperature is not None and not temperature > 0:
            raise UserError(f"temperature must be positive, not {temperature}")
        self.core = core
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.position = position
        self.encoding = None if isinstance(position, str) else position(n_heads, n_kv_heads or n_heads, head_dim)
        self.rope_base = float(rope_base)
        self.qk_norm = qk_norm
        divisor: float = temperature or head_dim ** (-0.5 if qk_norm else 0.5)
        # Normalised vectors are kept with unit root mean square, which bf16 and RMSNorm kernels like better.
        self.scale = 1 / (divisor * head_dim) if qk_norm else 1 / divisor

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Outputs `[B, T, H, D]` for `q [B, T, H, D]` and `k, v [B, T, H_kv, D]`."""
        refuse_packed_state(state, cu_seqlens)
        start = 0 if state is None else state.start
        clock = None if state is None else state.clock
        q, k = self._transform(q, k, start, cu_seqlens, clock)
        return self.core(q, k, v, scale=self.scale, state=state, alibi_slopes=self._slopes(q), cu_seqlens=cu_seqlens)

    def entropy(self, q: Tensor, k: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Entropy `[B, T, H]` in nats of the distribution over keys."""
        q, k = self._transform(q, k, 0, cu_seqlens)
        return self.core.entropy(q, k, scale=self.scale, alibi_slopes=self._slopes(q), cu_seqlens=cu_seqlens)

    def prepare(self, clock: Clock, max_length: int, dtype: torch.dtype) -> None:
        """Give the rotations of all positions to the clock of static steps: angles cost more than a rotation."""
        key = self.head_dim, self.rope_base
        if self.position == "rope" and key not in clock.rotations:
            positions = torch.arange(max_length, device=clock.position.device)
            clock.rotations[key] = rope_tables(positions, *key, torch.promote_types(dtype, torch.float32))

    def _transform(
        self, q: Tensor, k: Tensor, start: int | Tensor, cu_seqlens: Tensor | None, clock: Clock | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.qk_norm:
            q, k = (F.rms_norm(tensor, (self.head_dim,), eps=1e-6).to(tensor.dtype) for tensor in (q, k))
        if self.position == "rope":
            if clock is not None and clock.rotations:
                cos, sin = clock.rotations[self.head_dim, self.rope_base]
                tables = cos.index_select(0, clock.position), sin.index_select(0, clock.position)
            else:
                positions = document_positions(q, start=start, cu_seqlens=cu_seqlens)
                dtype = torch.promote_types(q.dtype, torch.float32)
                tables = rope_tables(positions, self.head_dim, self.rope_base, dtype)
            q, k = apply_rope(q, tables), apply_rope(k, tables)
        if self.encoding is not None:
            q, k = self.encoding(q, k, document_positions(q, start=start, cu_seqlens=cu_seqlens))
        return q, k

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the core and of the position encoding; see `Mixer.flops_per_token`."""
        flops = self.core.flops_per_token(seq_len, self.n_heads, self.head_dim, training=training)
        return flops + (self.encoding.flops_per_token() * (3 if training else 1) if self.encoding is not None else 0.0)

    def reset_parameters(self) -> None:
        """Draw the initial weights of the position encoding, if there is one."""
        if self.encoding is not None:
            self.encoding.reset_parameters()

    def _slopes(self, q: Tensor) -> Tensor | None:
        return alibi_slopes(self.n_heads, q.device) if self.position == "alibi" else None

    def extra_repr(self) -> str:
        position = self.position if self.encoding is None else type(self.encoding).__name__
        return f"position={position}, qk_norm={self.qk_norm}, scale={self.scale:.4g}"
