"""Native sparse attention (arXiv 2502.11089): attention to compressed chunks, to selected ones, and to a window."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqarch.arguments import Count, Interval
from seqarch.kernels import attention_entropy, flops, softmax_attention, top1_chunk_attention
from seqarch.kernels.blocks import expand_heads, over_query_blocks, positions, scores
from seqarch.kernels.packed import complete_chunks
from seqarch.kernels.tensors import at_least_float32, autocast_cast, is_tracked, longest_document
from seqarch.kernels.top1_chunk.op import heaviest_chunks, mean_keys
from seqarch.mixers.attention import CoreAttention
from seqarch.mixers.base import Clock, Scale, init_linear, linear_flops
from seqarch.mixers.cores import AttentionCore, ChunkMeansState
from seqarch.mixers.options import with_options_of

CHUNK_SIZE, SELECTED_CHUNKS, WINDOW = 64, 16, 512
"""As published, for sequences of 8,192 tokens and more."""
ALWAYS = 3
"""Chunks that every query selects: its own, the one before, and the first."""

Selected = Annotated[int, Interval(ALWAYS)]
"""Chunks that a query selects, with those that every query selects."""

Means = tuple[Tensor, ...]
"""Mean keys and mean values of complete chunks, `[B, N, H_kv, D]` each, at least float32."""


class NSACore(AttentionCore):
    """The sum of three attentions: to compressed chunks, to selected chunks, and to the last `window` keys.

    The compressed branch attends to the mean keys and values of the complete chunks until the query. Its weights,
    added up over the query heads that share a key head, select chunks for these heads; the own chunk, the one before
    and the first are always selected. Selection has no gradient.

    Source: arXiv 2502.11089, section 3.3, in the form of flash-linear-attention (fla/ops/nsa): chunks are compressed to
    means, not by an MLP over overlapping blocks, and all branches share keys and values. Selected chunks run in the
    kernels of Top-1 chunk attention, the compressed branch in PyTorch by blocks of queries. The entropy is that of the
    softmax over the selected chunks.

    Args:
        chunk_size: tokens in a chunk, C.
        selected_chunks: chunks that a query selects, at least 3; fewer if there are fewer.
        window: number of last keys that the window branch sees, the query's own included.
    """

    def __init__(
        self, chunk_size: Count = CHUNK_SIZE, *, selected_chunks: Selected = SELECTED_CHUNKS, window: Count = WINDOW
    ) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.selected_chunks = selected_chunks
        self.window = window

    def forward(self, q, k, v, *, scale, state=None, alibi_slopes=None, cu_seqlens=None, gates=None):
        """Outputs `[B, T, H, D]`; see `AttentionCore.forward`.

        Args:
            gates: `[B, T, H, 3]`, factors of the compressed, selected and window branch; 1 unless given.
        """
        means = None
        if state is not None:
            k, v = state.extend(k, v)
            if isinstance(state, ChunkMeansState) and not is_tracked(q, k, v):
                if q.shape[1] == 1:
                    return _gated(self._decode(autocast_cast(q)[0], state, scale), gates)
                means = state.complete_means()
        q, k, v = autocast_cast(q, k, v)
        compressed = self._compress(_attend, q, k, v, scale, cu_seqlens, means)
        options: Any = {"scale": scale, "cu_seqlens": cu_seqlens}
        chunks = self.select(q, k, scale, cu_seqlens, means)
        selected = top1_chunk_attention(q, k, v, chunk_size=self.chunk_size, chunks=chunks, **options)
        return _gated((compressed, selected, softmax_attention(q, k, v, window=self.window, **options)), gates)

    def _decode(self, q: Tensor, state: ChunkMeansState, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """The branches of the last token, which reads only the keys that it sees; also in static steps."""
        i = (state.clock or Clock.at(state.length - 1, q.shape[0], q.device)).position.unsqueeze(1)
        n_kv_heads, size = state.keys.shape[2], self.chunk_size
        of_means: Any = {"means": state.means, "scale": scale, "chunk_size": size}
        chunks = _select(i, q, count=self.selected_chunks - 1, n_kv_heads=n_kv_heads, **of_means)
        chunks = F.pad(chunks[:, 0, :: q.shape[2] // n_kv_heads], (1, 0))  # [B, H_kv, selected_chunks]
        chunks[..., 0] = i // size
        places = chunks.unsqueeze(-1) * size + torch.arange(size, device=q.device)
        places = torch.where(places <= i, places, -1).flatten(2)
        last = i - torch.arange(self.window, device=q.device)
        cache = state.keys, state.values
        return (
            _attend(i, q, **of_means),
            _attend_to(places, q, *cache, scale),
            _attend_to(last.expand(q.shape[0], n_kv_heads, -1), q, *cache, scale),
        )

    @torch.no_grad()
    def select(
        self, q: Tensor, k: Tensor, scale: float, cu_seqlens: Tensor | None = None, means: Means | None = None
    ) -> Tensor:
        """The chunks before its own that each query selects, `[B, T, H, selected_chunks - 1]` int32; -1 for none."""
        op = partial(_select, count=self.selected_chunks - 1, n_kv_heads=k.shape[2])
        return self._compress(op, q, k, k, scale, cu_seqlens, means)

    def _compress(
        self,
        op: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        cu_seqlens: Tensor | None,
        means: Means | None,
    ) -> Tensor:
        if cu_seqlens is not None:
            return self._compress_documents(op, q, k, v, scale, cu_seqlens)
        size = self.chunk_size
        means = (mean_keys(k, size), mean_keys(v, size)) if means is None else means

        def block(start: int, q: Tensor, k: Tensor) -> Tensor:
            seen = k.shape[1] // size
            i = positions(start, q, k)[0]
            return op(i, q, (means[0][:, :seen], means[1][:, :seen]), scale, size)

        return over_query_blocks(block, q, (k,), multiple=size)

    def _compress_documents(
        self, op: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor
    ) -> Tensor:
        """The same for packed documents, whose borders the host does not read.

        Blocks of queries are as long as the longest document, so that each sees chunks of two blocks at most.
        """
        size, length, queries = self.chunk_size, k.shape[1], q.shape[1]
        longest = min(longest_document(k, cu_seqlens) or length, length)
        first, starts = complete_chunks(cu_seqlens, size, length)
        places = starts.clamp_max(length - size).unsqueeze(1) + torch.arange(size, device=k.device)
        means = [at_least_float32(t[0, places]).mean(1) for t in (k, v)]
        blocks = -(-queries // longest)
        at = torch.arange(blocks * longest, device=k.device).clamp_max(queries - 1) + length - queries
        at = at.view(blocks, longest)
        document = torch.searchsorted(cu_seqlens, at, right=True) - 1
        begin = first[document[:, :1]]
        seen = begin + torch.arange(min(2 * longest, length) // size, device=k.device)
        seen = seen.clamp_max(starts.shape[0] - 1)
        of_block = (
            (at - cu_seqlens[document])[:, None, :, None],
            F.pad(q, (0, 0, 0, 0, 0, blocks * longest - queries)).view(blocks, longest, *q.shape[2:]),
            (means[0][seen], means[1][seen]),
        )
        own_first = (first[document] - begin)[:, None, :, None]
        if torch.is_grad_enabled():  # as `over_query_blocks`
            again: Any = {"use_reentrant": False, "preserve_rng_state": False}
            found = checkpoint(op, *of_block, scale, size, own_first, **again)
        else:
            found = op(*of_block, scale, size, own_first)
        return found.flatten(0, 1)[None, :queries]

    def init_state(self, batch_size, max_length, n_kv_heads, head_dim, **like):
        cache = super().init_state(batch_size, max_length, n_kv_heads, head_dim, **like)
        return ChunkMeansState.from_cache(cache, self.chunk_size, 2)

    def flops_per_token(self, seq_len, n_heads, head_dim, *, training=False):
        keys = flops.chunks_before(seq_len + 1, self.chunk_size)  # a query sees its own chunk's mean at its end
        keys += flops.chunk_keys(seq_len, self.chunk_size, self.selected_chunks - 1)
        keys += flops.causal_keys(seq_len, self.window)
        return (12 if training else 4) * n_heads * head_dim * keys / seq_len

    def entropy(self, q, k, *, scale, alibi_slopes=None, cu_seqlens=None):
        chunks = self.select(q, k, scale, cu_seqlens)
        return attention_entropy(q, k, scale=scale, chunk_size=self.chunk_size, chunks=chunks, cu_seqlens=cu_seqlens)

    def extra_repr(self) -> str:
        return f"chunk_size={self.chunk_size}, selected_chunks={self.selected_chunks}, window={self.window}"


First = int | Tensor
"""Which of the means is that of the first chunk of a query's document: 0, or a tensor that goes with `i`."""


def _weights(i: Tensor, q: Tensor, means: Means, scale: float, chunk_size: int, first: First) -> Tensor:
    """Weights `[B, H, Tq, N]` of the chunks that are complete for queries at `i` of their document; zeros if none is.

    Args:
        i: `[Tq, 1]`, or `[B, 1, Tq, 1]` for packed documents.
    """
    s = scores(q, means[0], scale)
    chunk = torch.arange(s.shape[-1], device=q.device) - first
    seen = (chunk >= 0) & ((chunk + 1) * chunk_size <= i + 1)
    return s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1) * seen


def _attend(i: Tensor, q: Tensor, means: Means, scale: float, chunk_size: int, first: First = 0) -> Tensor:
    weights = _weights(i, q, means, scale, chunk_size, first)
    values = expand_heads(means[1], q.shape[2]).transpose(1, 2)
    with torch.autocast(q.device.type, enabled=False):
        return (weights @ values.to(weights.dtype)).transpose(1, 2).to(q.dtype)


def _select(
    i: Tensor, q: Tensor, means: Means, scale: float, chunk_size: int, first: First = 0, *, count: int, n_kv_heads: int
) -> Tensor:
    """The heaviest chunks, counted from the first of the query's document."""
    own = i // chunk_size
    mass = _weights(i, q, means, scale, chunk_size, first).unflatten(1, (n_kv_heads, -1)).sum(2)
    chunk = torch.arange(mass.shape[-1], device=q.device)
    if isinstance(first, Tensor):
        index = (first + chunk).clamp_max(mass.shape[-1] - 1)
        mass = mass.gather(-1, index.expand(*mass.shape[:3], -1))
    mass = mass.masked_fill((chunk == 0) | (chunk == own - 1), float("inf"))
    return expand_heads(heaviest_chunks(own, mass, count), q.shape[2])


def _attend_to(places: Tensor, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of one query per head to these `places [B, H_kv, R]` of a cache; those below 0 are left out."""
    rows, heads = (torch.arange(n, device=q.device) for n in (q.shape[0], keys.shape[2]))
    at = rows[:, None, None], places.clamp_min(0), heads[:, None]
    grouped = q.squeeze(1).unflatten(1, (keys.shape[2], -1))
    k, v = (t[at].to(q.dtype) for t in (keys, values))  # [B, H_kv, R, D]
    o = F.scaled_dot_product_attention(grouped, k, v, (places >= 0).unsqueeze(2), scale=scale)
    return o.flatten(1, 2).unsqueeze(1)


def _gated(branches: tuple[Tensor, Tensor, Tensor], gates: Tensor | None) -> Tensor:
    """The sum of the branches `[B, T, H, D]`, each times its gate of `gates [B, T, H, 3]`."""
    compressed, selected, local = branches
    if gates is None:
        return compressed + selected + local
    of_compressed, of_selected, of_local = gates.to(local.dtype).unsqueeze(-1).unbind(-2)
    return of_compressed * compressed + of_selected * selected + of_local * local


class NSA(CoreAttention):
    """Native sparse attention: compressed chunks, selected chunks and a window, each with a sigmoid gate per head.

    The published model has 64 query heads with 4 key/value heads. All query heads of a key head select the same chunks.

    Args:
        n_heads: query heads H.
        chunk_size: tokens in a chunk, C.
        selected_chunks: chunks that a query selects, at least 3: its own, the one before and the first are among them.
        window: number of last keys that the window branch sees, the query's own included.
        **options: as in `CoreAttention`.
    """

    scales: ClassVar[Mapping[str, Scale]] = {**CoreAttention.scales, "chunk_size": "length", "window": "length"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 12, "n_kv_heads": 3}}  # recipes/nsa_110m
    source: ClassVar[str] = "arXiv 2502.11089"
    ops: ClassVar[tuple[str, ...]] = ("top1_chunk_attention", "softmax_attention")

    @with_options_of(CoreAttention, without=("core", "relation", "max_length"))
    def __init__(
        self,
        *place: int,
        chunk_size: Count = CHUNK_SIZE,
        selected_chunks: Selected = SELECTED_CHUNKS,
        window: Count = WINDOW,
        **options: Any,
    ) -> None:
        core = NSACore(chunk_size, selected_chunks=selected_chunks, window=window)
        super().__init__(*place, core=core, **options)
        self.gates = nn.Linear(self.d_model, 3 * self.n_heads, bias=False)
        init_linear(self.gates)

    def reset_parameters(self) -> None:
        """Draw the initial weights as in GPT-2, also of the gates."""
        super().reset_parameters()
        if hasattr(self, "gates"):  # the parent's constructor calls this before there are gates
            init_linear(self.gates)

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, state=state, cu_seqlens=cu_seqlens)
        gates = F.sigmoid(self.gates(x)).unflatten(-1, (self.n_heads, 3))
        return self.out(self.attend(q, k, v, state=state, cu_seqlens=cu_seqlens, gates=gates).flatten(2))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        return super().flops_per_token(seq_len, training=training) + linear_flops(self.gates) * (3 if training else 1)
