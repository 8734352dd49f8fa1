"""Top-1 chunk selection and attention in plain PyTorch, on any device and in any precision."""

from __future__ import annotations

import torch
from torch import Tensor

from seqarch.kernels.common import at_least_float32, over_query_blocks, per_document, positions, scores
from seqarch.kernels.softmax_attention.reference import sdpa


def select_chunks_reference(
    q: Tensor,
    k: Tensor,
    chunk_size: int,
    selection: str,
    scale: float,
    chunk_means: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """As `select_chunks`."""
    if cu_seqlens is not None:
        return per_document(
            lambda q, k: select_chunks_reference(q, k, chunk_size, selection, scale), (q, k), cu_seqlens
        )
    with torch.no_grad():
        if selection == "exact":
            return over_query_blocks(_select_exact, q, (k,), multiple=chunk_size, scale=scale, chunk_size=chunk_size)
        means = mean_keys(k, chunk_size) if chunk_means is None else chunk_means
        return over_query_blocks(_select_approx, q, (k,), multiple=chunk_size, means=means, chunk_size=chunk_size)


def mean_keys(k: Tensor, chunk_size: int) -> Tensor:
    """The mean key of each complete chunk, `[B, Tk // chunk_size, HK, D]`, at least in float32."""
    B, Tk, HK, D = k.shape
    n = Tk // chunk_size
    return at_least_float32(k[:, : n * chunk_size]).reshape(B, n, chunk_size, HK, D).mean(2)


def _select_exact(start: int, q: Tensor, k: Tensor, scale: float, chunk_size: int) -> Tensor:
    n = (k.shape[1] - 1) // chunk_size
    if n == 0:
        return _none_selected(q)
    s = scores(q, k[:, : n * chunk_size], scale)
    mass = s.unflatten(-1, (n, chunk_size)).logsumexp(-1)
    return _heaviest(start, q, mass, chunk_size)


def _select_approx(start: int, q: Tensor, k: Tensor, means: Tensor, chunk_size: int) -> Tensor:
    n = (k.shape[1] - 1) // chunk_size
    if n == 0:
        return _none_selected(q)
    return _heaviest(start, q, scores(q, means[:, :n].to(q.device), 1.0), chunk_size)


def _none_selected(q: Tensor) -> Tensor:
    return torch.full(q.shape[:3], -1, dtype=torch.int32, device=q.device)


def _heaviest(start: int, q: Tensor, mass: Tensor, chunk_size: int) -> Tensor:
    """The chunk of largest `mass [B, H, Tq, n]` before each query's own chunk; the lowest index among equals."""
    own = torch.arange(start, start + q.shape[1], device=q.device).unsqueeze(1) // chunk_size
    later = torch.arange(mass.shape[-1], device=q.device) >= own
    best = mass.masked_fill(later, float("-inf")).argmax(-1)
    return torch.where(own.squeeze(1) > 0, best, -1).to(torch.int32).transpose(1, 2)


def top1_chunk_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Tensor,
    chunk_size: int,
    scale: float,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """As `top1_chunk_attention`, with the selection given."""
    if cu_seqlens is not None:
        return per_document(
            lambda q, k, v, chunks: top1_chunk_attention_reference(q, k, v, chunks, chunk_size, scale),
            (q, k, v, chunks),
            cu_seqlens,
        )
    return over_query_blocks(_attend, q, (k, v), chunks, multiple=chunk_size, chunk_size=chunk_size, scale=scale)


def _attend(start: int, q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, top1_chunk_mask(start, q, k, chunks, chunk_size))


def top1_chunk_mask(start: int, q: Tensor, k: Tensor, chunks: Tensor, chunk_size: int) -> Tensor:
    """Which keys a query sees, `[B, H, Tq, Tk]`: its own chunk up to itself, and the selected earlier chunk."""
    i, j = positions(start, q, k)
    chunk_of_i, chunk_of_j = i // chunk_size, j // chunk_size
    local = (chunk_of_j == chunk_of_i) & (j <= i)
    selected = chunks.transpose(1, 2).unsqueeze(-1)
    selected = torch.where(selected < chunk_of_i, selected, -1)
    return local | (chunk_of_j == selected)
