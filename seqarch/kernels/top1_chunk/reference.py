"""Top-1 chunk selection and attention in plain PyTorch, on any device and in any precision."""

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels.blocks import over_query_blocks, positions, scores
from seqarch.kernels.packed import per_document
from seqarch.kernels.softmax_attention.reference import sdpa
from seqarch.kernels.tensors import at_least_float32


def select_chunks_reference(
    q: Tensor,
    k: Tensor,
    chunk_size: int,
    selection: str,
    scale: float,
    chunk_means: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    remote_chunks: int = 1,
) -> Tensor:
    if cu_seqlens is not None:
        return per_document(
            lambda q, k: select_chunks_reference(q, k, chunk_size, selection, scale, remote_chunks=remote_chunks),
            (q, k),
            cu_seqlens,
        )
    with torch.no_grad():
        means = mean_keys(k, chunk_size) if selection == "approx" and chunk_means is None else chunk_means
        options = {"means": means, "scale": scale, "chunk_size": chunk_size, "remote_chunks": remote_chunks}
        return over_query_blocks(_select, q, (k,), multiple=chunk_size, **options)


def mean_keys(k: Tensor, chunk_size: int) -> Tensor:
    """The mean key of each complete chunk, `[B, Tk // chunk_size, HK, D]`, at least in float32."""
    B, Tk, HK, D = k.shape
    n = Tk // chunk_size
    return at_least_float32(k[:, : n * chunk_size]).reshape(B, n, chunk_size, HK, D).mean(2)


def _select(
    start: int, q: Tensor, k: Tensor, means: Tensor | None, scale: float, chunk_size: int, remote_chunks: int
) -> Tensor:
    mass = chunk_masses(q, k, means, (k.shape[1] - 1) // chunk_size, chunk_size, scale)
    return heaviest_chunks(positions(start, q, k)[0] // chunk_size, mass, remote_chunks)


def chunk_masses(q: Tensor, k: Tensor, means: Tensor | None, n: int, chunk_size: int, scale: float) -> Tensor:
    """What decides among the first n chunks, `[B, H, Tq, n]`: the logarithms of their masses, or scores of `means`."""
    if means is not None:
        return scores(q, means[:, :n].to(q.device), 1.0)
    return scores(q, k[:, : n * chunk_size], scale).unflatten(-1, (n, chunk_size)).logsumexp(-1)


def heaviest_chunks(own: Tensor, mass: Tensor, remote_chunks: int) -> Tensor:
    """The chunks of largest `mass [B, H, Tq, n]` before a query's own; the lowest index among equals, -1 for none.

    Args:
        own: chunk of each query, `[Tq, 1]` or any shape that goes with `mass`.
        mass: of the chunks.
        remote_chunks: K, chunks of a query.

    Returns:
        `[B, Tq, H]` int32, with K above 1 `[B, Tq, H, K]`.
    """
    if not mass.shape[-1]:
        mass = F.pad(mass, (0, 1))
    index = torch.arange(mass.shape[-1], device=mass.device)
    mass = mass.masked_fill(index >= own, float("-inf"))
    found = []
    for earlier in range(min(remote_chunks, mass.shape[-1])):  # topk promises no order among equals, argmax the lowest
        best = mass.argmax(-1)
        found.append(torch.where(own.squeeze(-1) > earlier, best, -1).to(torch.int32).transpose(1, 2))
        mass = mass.masked_fill(index == best.unsqueeze(-1), float("-inf"))
    if remote_chunks == 1:
        return found[0]
    return F.pad(torch.stack(found, dim=-1), (0, remote_chunks - len(found)), value=-1)


def top1_chunk_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, scale: float, cu_seqlens: Tensor | None = None
) -> Tensor:
    """As `top1_chunk_attention`, with the selection given."""
    options = {"chunk_size": chunk_size, "scale": scale}
    return over_query_blocks(_attend, q, (k, v), chunks, cu_seqlens, multiple=chunk_size, **options)


def _attend(start: int, q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, scale: float) -> Tensor:
    return sdpa(q, k, v, scale, top1_chunk_mask(*positions(start, q, k), chunks, chunk_size))


def top1_chunk_mask(i: Tensor, j: Tensor, chunks: Tensor, chunk_size: int) -> Tensor:
    """Which keys a query sees, `[B, H, Tq, Tk]`: its own chunk up to itself, and the selected earlier chunks.

    Args:
        i: positions of the queries, `[Tq, 1]` or any shape that goes with the result.
        j: positions of the keys, `[1, Tk]`.
        chunks: `[B, Tq, H]`, or `[B, Tq, H, K]` for several per query.
        chunk_size: keys per chunk.
    """
    chunk_of_i, chunk_of_j = i // chunk_size, j // chunk_size
    mask = (chunk_of_j == chunk_of_i) & (j <= i)
    for selected in (chunks if chunks.dim() == 4 else chunks.unsqueeze(-1)).unbind(-1):
        remote = selected.transpose(1, 2).unsqueeze(-1)
        remote = torch.where(remote < chunk_of_i, remote, -1)
        mask = mask | (chunk_of_j == remote)
    return mask
