"""InfLLM-v2 (arXiv 2509.24663): attention to chunks that a query group selects, without parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.arguments import Count, Interval
from seqarch.errors import UserError
from seqarch.kernels import attention_entropy, flops, top1_chunk_attention
from seqarch.kernels.blocks import expand_heads, over_query_blocks, positions, scores
from seqarch.kernels.packed import per_document
from seqarch.kernels.tensors import autocast_cast, check_sequences
from seqarch.kernels.top1_chunk.op import heaviest_chunks
from seqarch.mixers.attention import CoreAttention
from seqarch.mixers.base import Scale
from seqarch.mixers.cores import AttentionCore, KeyValueState
from seqarch.mixers.options import with_options_of

PARTS = 4
"""Windows of mean keys per chunk: each covers half a chunk, and the next begins a quarter later."""
Chunk = Annotated[int, Interval(PARTS)]
Selected = Annotated[int, Interval(2)]


class KeptKeys(KeyValueState):
    """Keys and values, without static steps: a step pools all keys anew."""

    def pin(self, clock: Any) -> bool:
        return False


class InfLLM2Core(AttentionCore):
    """One softmax over the own chunk, up to the query, and earlier chunks: the first, the last ones, and selected ones.

    A chunk weighs as much as its best window of keys. Windows are half a chunk long and begin every quarter of one.
    Their weights are a softmax over all windows that end before or at the query, added up over the query heads of a key
    head. Selection has no gradient.

    Args:
        chunk_size: tokens in a chunk, C, a multiple of 4.
        selected_chunks: chunks before its own that a query sees, with the first and the last ones.
        local_chunks: last chunks before the own one, which every query sees.
    """

    def __init__(self, chunk_size: Chunk = 64, *, selected_chunks: Selected = 16, local_chunks: Count = 2) -> None:
        super().__init__()
        if chunk_size % PARTS:
            raise UserError(f"chunk_size must be a multiple of {PARTS}, not {chunk_size}")
        if local_chunks >= selected_chunks:
            raise UserError(f"selected_chunks={selected_chunks} must hold the first and {local_chunks} local chunks")
        self.chunk_size, self.selected_chunks, self.local_chunks = chunk_size, selected_chunks, local_chunks

    def forward(self, q, k, v, *, scale, state=None, alibi_slopes=None, cu_seqlens=None):
        check_sequences({"q [B, T, H, D]": q}, cu_seqlens)
        if state is not None:
            k, v = state.extend(k, v)
        q, k, v = autocast_cast(q, k, v)
        chunks = self.select(q, k, scale, cu_seqlens)
        options: Any = {"chunk_size": self.chunk_size, "scale": scale, "cu_seqlens": cu_seqlens}
        return top1_chunk_attention(q, k, v, chunks=chunks, **options)

    @torch.no_grad()
    def select(self, q: Tensor, k: Tensor, scale: float, cu_seqlens: Tensor | None = None) -> Tensor:
        """The chunks before its own that each query sees, `[B, T, H, selected_chunks]` int32; -1 for none."""
        if cu_seqlens is not None:
            return per_document(lambda q, k: self.select(q, k, scale), (q, k), cu_seqlens)
        stride = self.chunk_size // PARTS
        length = k.shape[1] // stride * stride
        quarters = k[:, :length].unflatten(1, (length // stride, stride)).mean(2)
        windows = (quarters[:, :-1] + quarters[:, 1:]) / 2  # [B, N, H_kv, D]

        def block(start: int, q: Tensor, k: Tensor) -> Tensor:
            i = positions(start, q, k)[0]
            own, (groups, heads) = i // self.chunk_size, (k.shape[2], q.shape[2])
            s = scores(q, windows, scale)  # [B, H, Tq, N]
            seen = (torch.arange(s.shape[-1], device=q.device) + 2) * stride <= i + 1
            weights = s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1) * seen
            mass = weights.unflatten(1, (groups, -1)).sum(2)
            room = PARTS * (windows.shape[1] // PARTS + 2) - mass.shape[-1]
            mass = F.max_pool1d(F.pad(mass, (1, room)).flatten(0, 1), PARTS + 1, PARTS).unflatten(0, mass.shape[:2])
            chunk = torch.arange(mass.shape[-1], device=q.device)
            always = (chunk == 0) | ((chunk >= own - self.local_chunks) & (chunk < own))
            found = heaviest_chunks(own, mass.masked_fill(always, torch.inf), self.selected_chunks)
            return expand_heads(found, heads)

        return over_query_blocks(block, q, (k,))

    def init_state(self, batch_size, max_length, n_kv_heads, head_dim, **like):
        return KeptKeys.empty(batch_size, max_length, n_kv_heads, head_dim, **like)

    def flops_per_token(self, seq_len, n_heads, head_dim, *, training=False):
        windows = flops.chunks_before(seq_len, self.chunk_size) * PARTS
        keys = flops.chunk_keys(seq_len, self.chunk_size, self.selected_chunks)
        return n_heads * head_dim * ((12 if training else 4) * keys + 2 * windows) / seq_len

    def entropy(self, q, k, *, scale, alibi_slopes=None, cu_seqlens=None):
        chunks = self.select(q, k, scale, cu_seqlens)
        return attention_entropy(q, k, scale=scale, chunk_size=self.chunk_size, chunks=chunks, cu_seqlens=cu_seqlens)


class InfLLM2(CoreAttention):
    """Attention to the first, the last and selected chunks, with the projections of full attention.

    The published model trains with full attention first, then with 64 selected chunks of 64 tokens, 32 of them local.

    Args:
        n_heads: query heads H.
        chunk_size: tokens in a chunk, a multiple of 4.
        selected_chunks: chunks before its own that a query sees: the first, the local ones and selected ones.
        local_chunks: last chunks before the own one, which every query sees.
        **options: as in `CoreAttention`.
    """

    scales: ClassVar[Mapping[str, Scale]] = {**CoreAttention.scales, "chunk_size": "length"}
    source: ClassVar[str] = "arXiv 2509.24663"
    ops: ClassVar[tuple[str, ...]] = ("top1_chunk_attention",)

    @with_options_of(CoreAttention, without=("core", "relation", "max_length"))
    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        chunk_size: Chunk = 64,
        selected_chunks: Selected = 16,
        local_chunks: Count = 2,
        **options: Any,
    ) -> None:
        core = InfLLM2Core(chunk_size, selected_chunks=selected_chunks, local_chunks=local_chunks)
        super().__init__(d_model, layer_idx, n_layers, core=core, n_heads=n_heads, **options)
