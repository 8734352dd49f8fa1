"""Attention cores: `(q, k, v) -> o` on `[B, T, H, D]`, the part of an attention mixer that can be exchanged.

A core has options but no parameters, so one instance may serve many layers. `Attention` and `RWKV7Shell` take any of
them; what surrounds the core (projections, positions, normalisation, the scale of the scores) is theirs.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch import kernels
from seqarch.arguments import Count, Limited
from seqarch.errors import UserError
from seqarch.kernels import flops
from seqarch.kernels.tensors import at_least_float32, is_tracked
from seqarch.kernels.top1_chunk.op import CHUNK_SIZE, Selection, mean_keys
from seqarch.mixers.base import Clock, MixerState
from seqarch.mixers.pieces import Piece
from seqarch.mixers.short_convolution import ShortConvolutionState


@dataclasses.dataclass
class KeyValueState(MixerState):
    """Keys and values of the tokens seen so far, `[B, capacity, H_kv, D]`; the first `length` are filled.

    The state of a convolution of the keys, if there is one, is part of it.
    Without gradients keys and values are written in place into buffers of `max_length`. With gradients they are
    concatenated, so that a sequence in several calls has the gradients of the whole sequence.
    """

    keys: Tensor
    values: Tensor
    length: int
    max_length: int
    clock: Clock | None = dataclasses.field(default=None, kw_only=True)
    convolution: ShortConvolutionState | None = dataclasses.field(default=None, kw_only=True)

    @property
    def start(self) -> int | Tensor:
        """Position of the next token; in static steps `[1]`, on the device."""
        return self.length if self.clock is None else self.clock.position

    def pin(self, clock: Clock) -> bool:
        """Write a token's keys and values at its position modulo the capacity in static steps; see `MixerState.pin`."""
        self.clock = clock
        return True

    @classmethod
    def empty(cls, batch_size: int, max_length: int, n_heads: int, head_dim: int, **like) -> "KeyValueState":
        shape = (batch_size, max_length, n_heads, head_dim)
        return cls(torch.empty(shape, **like), torch.empty(shape, **like), 0, max_length)

    def split(self, piece: Piece) -> "KeyValueState | None":
        known = KeyValueState, WindowState, ChunkMeansState  # another class may keep more than keys and values
        return PieceState.of(self, piece) if type(self) in known else None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append `k, v [B, T, H_kv, D]`; return keys and values of all tokens so far, in static steps the buffers."""
        if self.clock is not None:
            slot = self.clock.position % self.keys.shape[1]
            return self.keys.index_copy_(1, slot, k), self.values.index_copy_(1, slot, v)
        before, after = self.length, self._advance(k)
        if is_tracked(k, v, self.keys, self.values):
            self.keys = torch.cat((self.keys[:, :before], k), dim=1)
            self.values = torch.cat((self.values[:, :before], v), dim=1)
            return self.keys, self.values
        if self.keys.shape[1] < after:  # calls with gradients left no room
            room = (0, 0, 0, 0, 0, self.max_length - self.keys.shape[1])
            self.keys, self.values = F.pad(self.keys, room), F.pad(self.values, room)
        self.keys[:, before:after] = k
        self.values[:, before:after] = v
        return self.keys[:, :after], self.values[:, :after]

    def _advance(self, k: Tensor) -> int:
        if k.shape[0] != self.keys.shape[0] or k.dtype != self.keys.dtype:
            raise UserError(f"a state made for {len(self.keys)} rows of {self.keys.dtype} met {len(k)} of {k.dtype}")
        if self.length + k.shape[1] > self.max_length:
            raise UserError(f"init_state needs a max_length of {self.length + k.shape[1]} here, not {self.max_length}")
        self.length += k.shape[1]
        return self.length


@dataclasses.dataclass
class WindowState(KeyValueState):
    """Keys and values of only the last `window` tokens; `length` still counts every token."""

    window: int

    @property
    def filled(self) -> int:
        """Tokens whose keys and values are here."""
        return min(self.length, self.window)

    def pin(self, clock: Clock) -> bool:
        """Static steps have a ring of `window` tokens, in which the token at position p has the place p % window."""
        places = torch.arange(self.length - self.filled, self.length, device=self.keys.device) % self.window
        for name in ("keys", "values"):
            kept = getattr(self, name)[:, : self.filled]
            ring = kept.new_zeros(kept.shape[0], self.window, *kept.shape[2:])
            setattr(self, name, ring.index_copy_(1, places, kept))
        return super().pin(clock)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append `k, v [B, T, H_kv, D]`; return those that the new tokens can see."""
        if self.clock is not None:
            return super().extend(k, v)
        filled = self.filled
        self._advance(k)
        keys = torch.cat((self.keys[:, :filled], k), dim=1)
        values = torch.cat((self.values[:, :filled], v), dim=1)
        # A copy: a view would keep the tokens outside the window in memory.
        self.keys = keys[:, -self.window :].clone()
        self.values = values[:, -self.window :].clone()
        return keys, values


@dataclasses.dataclass
class ChunkMeansState(KeyValueState):
    """A key/value cache with the means of its chunks: of the keys or, with two `means`, of keys and values.

    Each is `[B, max_length / C, H_kv, D]`. Only means of complete chunks are used; the others are finite. Means are in
    float32 or more, as over a whole sequence.
    """

    means: tuple[Tensor, ...]
    chunk_size: int
    sums: tuple[Tensor, ...] = dataclasses.field(default=(), kw_only=True)
    """In static steps the sums over the own chunk so far, `[B, 1, H_kv, D]` each."""

    @classmethod
    def from_cache(cls, cache: KeyValueState, chunk_size: int, count: int) -> "ChunkMeansState":
        """An empty cache with `count` means per chunk."""
        shape = cache.keys.shape[0], -(-cache.max_length // chunk_size), *cache.keys.shape[2:]
        dtype = torch.promote_types(cache.keys.dtype, torch.float32)
        means = tuple(cache.keys.new_zeros(shape, dtype=dtype) for _ in range(count))
        return cls(cache.keys, cache.values, 0, cache.max_length, means, chunk_size)

    def pin(self, clock: Clock) -> bool:
        own = slice(self.length // self.chunk_size * self.chunk_size, self.length)
        kept = (self.keys, self.values)[: len(self.means)]
        self.sums = tuple(at_least_float32(each[:, own]).sum(dim=1, keepdim=True) for each in kept)
        return super().pin(clock)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        done = self.length // self.chunk_size
        cached = super().extend(k, v)
        if self.clock is not None:
            own, begins = self.clock.position // self.chunk_size, self.clock.position % self.chunk_size == 0
            before = (torch.where(begins, 0, total) for total in self.sums)
            self.sums = tuple(total + at_least_float32(new) for total, new in zip(before, (k, v), strict=False))
            for mean, total in zip(self.means, self.sums, strict=True):
                # written at every step, right once the chunk is complete, and not read before
                mean.index_copy_(1, own, total / self.chunk_size)
            return cached
        complete = self.length // self.chunk_size
        for mean, tokens in zip(self.means, cached, strict=False):
            mean[:, done:complete] = mean_keys(tokens[:, done * self.chunk_size :].detach(), self.chunk_size)
        return cached

    def complete_means(self) -> tuple[Tensor, ...]:
        return tuple(mean[:, : self.length // self.chunk_size] for mean in self.means)


@dataclasses.dataclass
class PieceState(KeyValueState):
    """Stands for the keys and values of earlier pieces of a sequence, of which a `window` needs only the last."""

    window: int | None = None

    @classmethod
    def of(cls, state: KeyValueState, piece: Piece) -> "PieceState":
        convolution = state.convolution and state.convolution.split(piece)
        window = state.window if isinstance(state, WindowState) else None
        cache = state.keys, state.values, piece.start, piece.total
        return cls(*cache, window, convolution=convolution, piece=piece)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert self.piece is not None
        return self.piece.seen(k, self.window), self.piece.seen(v, self.window)


class AttentionCore(Limited, nn.Module, ABC):
    """Mixes values by the relation of queries and keys, causally; has no parameters.

    In all methods `q [B, T, H, D]` and `k, v [B, T, H_kv, D]`, query head h using key/value head `h // (H / H_kv)`.
    """

    qk_norm: ClassVar[bool] = False
    """Whether the core was published with normalised queries and keys."""

    alibi: ClassVar[bool] = False
    """Whether the core takes ALiBi slopes."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: KeyValueState | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Outputs `[B, T, H, D]` of the T new tokens.

        Args:
            q: queries of the new tokens.
            k: their keys. Where processes share a sequence, keys of earlier tokens come first, without a state.
            v: their values; as the keys.
            scale: factor on the scores.
            state: earlier keys and values; the new ones are appended.
            alibi_slopes: `[H]`, only for cores with `alibi`.
            cu_seqlens: `[N + 1]` borders of packed documents (B = 1), from the first key on.
        """

    def init_state(self, batch_size: int, max_length: int, n_kv_heads: int, head_dim: int, **like) -> KeyValueState:
        """The state before the first token; `like` holds `device` and `dtype`."""
        return KeyValueState.empty(batch_size, max_length, n_kv_heads, head_dim, **like)

    @abstractmethod
    def flops_per_token(self, seq_len: int, n_heads: int, head_dim: int, *, training: bool = False) -> float:
        """Operations per token, averaged over a sequence of `seq_len`; only the causal half is counted."""

    @abstractmethod
    def entropy(
        self,
        q: Tensor,
        k: Tensor,
        *,
        scale: float,
        alibi_slopes: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Entropy `[B, T, H]` in nats of the distribution over keys."""


class SoftmaxCore(AttentionCore):
    """Causal softmax attention over all earlier keys, or over the last `window` of them, the own included."""

    alibi: ClassVar[bool] = True

    def __init__(self, window: Count | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q, k, v, *, scale, state=None, alibi_slopes=None, cu_seqlens=None):
        if state is not None:
            k, v = state.extend(k, v)
            if state.clock is not None:
                return kernels.attention_decode(q, k, v, state.clock.lengths, scale=scale, alibi_slopes=alibi_slopes)
        return kernels.softmax_attention(
            q, k, v, scale=scale, window=self.window, alibi_slopes=alibi_slopes, cu_seqlens=cu_seqlens
        )

    def init_state(self, batch_size, max_length, n_kv_heads, head_dim, **like):
        if self.window is None:
            return super().init_state(batch_size, max_length, n_kv_heads, head_dim, **like)
        cache = super().init_state(batch_size, min(max_length, self.window), n_kv_heads, head_dim, **like)
        return WindowState(cache.keys, cache.values, 0, max_length, self.window)

    def flops_per_token(self, seq_len, n_heads, head_dim, *, training=False):
        return (12 if training else 4) * n_heads * head_dim * flops.causal_keys(seq_len, self.window) / seq_len

    def entropy(self, q, k, *, scale, alibi_slopes=None, cu_seqlens=None):
        return kernels.attention_entropy(
            q, k, scale=scale, window=self.window, alibi_slopes=alibi_slopes, cu_seqlens=cu_seqlens
        )

    def extra_repr(self) -> str:
        return f"window={self.window}"


class Top1ElementCore(AttentionCore):
    """The value of the key with the highest score; gradients by the straight-through rule.

    Source: arXiv 2505.18522, section 4. The entropy is the entropy of the softmax that selects the element.
    """

    qk_norm: ClassVar[bool] = True

    def forward(self, q, k, v, *, scale, state=None, alibi_slopes=None, cu_seqlens=None):
        if state is not None:
            k, v = state.extend(k, v)
            if state.clock is not None:
                return kernels.attention_decode(q, k, v, state.clock.lengths, scale=scale, hard=True)
        return kernels.top1_element_attention(q, k, v, scale=scale, cu_seqlens=cu_seqlens)

    def flops_per_token(self, seq_len, n_heads, head_dim, *, training=False):
        # Forward: scores. Backward: gradients of the distribution, the queries and the keys; values are copied.
        return (8 if training else 2) * n_heads * head_dim * flops.causal_keys(seq_len) / seq_len

    def entropy(self, q, k, *, scale, alibi_slopes=None, cu_seqlens=None):
        return kernels.attention_entropy(q, k, scale=scale, cu_seqlens=cu_seqlens)


class Top1ChunkCore(AttentionCore):
    """Softmax attention over the own chunk, up to the query, and one complete earlier chunk that the query selects.

    Source: arXiv 2505.18522, section 5. `exact` selects the chunk with the largest attention mass, `approx` the one
    whose mean key has the largest product with the query. Selection has no gradient. The entropy is that of the softmax
    over all these chunks.

    With `remote_chunks` above 1 a query selects that number of best chunks; in the paper it selects one. MoBA (arXiv
    2502.13189) has the top k by mean keys. More than 8 cost as much as dense attention.

    Args:
        chunk_size: tokens in a chunk.
        selection: "exact" or "approx".
        remote_chunks: earlier chunks that a query selects; fewer if there are fewer.
    """

    qk_norm: ClassVar[bool] = True

    def __init__(
        self, chunk_size: Count = CHUNK_SIZE, selection: Selection = "exact", *, remote_chunks: Count = 1
    ) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.selection: Selection = selection
        self.remote_chunks = remote_chunks
        self.options: dict[str, Any] = {
            "chunk_size": chunk_size,
            "selection": selection,
            "remote_chunks": remote_chunks,
        }

    def forward(self, q, k, v, *, scale, state=None, alibi_slopes=None, cu_seqlens=None):
        if state is not None:
            k, v = state.extend(k, v)
            if q.shape[1] == 1 and not is_tracked(q, k, v):
                return self._decode(q, state, scale)
        means = state.complete_means()[0] if isinstance(state, ChunkMeansState) else None
        options: Any = {**self.options, "scale": scale, "chunk_means": means, "cu_seqlens": cu_seqlens}
        return kernels.top1_chunk_attention(q, k, v, **options)

    def _decode(self, q: Tensor, state: KeyValueState, scale: float) -> Tensor:
        """The output of the last token, from whole buffers: a slice would have a new shape at every token."""
        clock = state.clock or Clock.at(state.length - 1, q.shape[0], q.device)
        means = state.means[0] if isinstance(state, ChunkMeansState) else None
        options = {**self.options, "scale": scale, "chunk_means": means}
        return kernels.top1_chunk_decode(q, state.keys, state.values, clock.lengths, **options)

    def init_state(self, batch_size, max_length, n_kv_heads, head_dim, **like):
        cache = super().init_state(batch_size, max_length, n_kv_heads, head_dim, **like)
        return cache if self.selection == "exact" else ChunkMeansState.from_cache(cache, self.chunk_size, 1)

    def flops_per_token(self, seq_len, n_heads, head_dim, *, training=False):
        size = self.chunk_size
        candidates = flops.chunks_before(seq_len, size) * (size if self.selection == "exact" else 1)
        attention = (12 if training else 4) * flops.chunk_keys(seq_len, size, self.remote_chunks)
        return n_heads * head_dim * (attention + 2 * candidates) / seq_len

    def entropy(self, q, k, *, scale, alibi_slopes=None, cu_seqlens=None):
        chunks = kernels.select_chunks(q, k, **self.options, scale=scale, cu_seqlens=cu_seqlens)
        return kernels.attention_entropy(
            q, k, scale=scale, chunk_size=self.chunk_size, chunks=chunks, cu_seqlens=cu_seqlens
        )

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}, selection={self.selection}, remote_chunks={self.remote_chunks}"
