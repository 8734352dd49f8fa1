"""Top-1 chunk selection and attention: checks and the references in plain PyTorch."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import UserError, unknown
from seqarch.kernels.blocks import over_query_blocks, positions, scores, sdpa
from seqarch.kernels.op import Backend, Op
from seqarch.kernels.packed import per_document
from seqarch.kernels.tensors import at_least_float32, autocast_cast, check_attention, check_shapes, default_scale

Selection = Literal["exact", "approx"]
CHUNK_SIZE = 128
"""Keys per chunk unless given."""

TRITON_CHUNK_SIZES = (16, 32, 64, 128, 256)
TRITON_REMOTE_CHUNKS = 8
TRITON_CHUNK_BYTES = 2**16
"""Largest chunk of keys that the kernels hold at once: 128 keys of 256 dims in half precision, of 128 in float32."""


def select_chunks(
    q: Tensor,
    k: Tensor,
    *,
    chunk_size: int = CHUNK_SIZE,
    selection: Selection = "exact",
    remote_chunks: int = 1,
    scale: float | None = None,
    chunk_means: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The earlier chunk of keys that each query attends to in Top-1 chunk attention (arXiv 2505.18522, section 5).

    Keys are cut into chunks of `chunk_size`; a query of chunk c chooses among the chunks before c,

    * "exact": the chunk of largest attention mass, `argmax_c sum_{j in c} exp(scale * q_i . k_j)`;
    * "approx": the first-order expansion of it, `argmax_c q_i . mean_{j in c} k_j`.

    Equal masses go to the lowest index. The queries are the last Tq of the Tk positions. No gradient.

    With `remote_chunks` above 1, a query chooses more chunks, as in MoBA (arXiv 2502.13189). The paper has one.

    Args:
        q: `[B, Tq, H, D]`; each query head selects for itself.
        k: `[B, Tk, HK, D]`, `HK` a divisor of `H`.
        chunk_size: keys per chunk.
        selection: "exact" or "approx".
        remote_chunks: K, chunks that a query chooses.
        scale: factor on the scores; None is `D ** -0.5`.
        chunk_means: `[B, N, HK, D]`, mean keys of at least the first `(Tk - 1) // chunk_size` chunks, for "approx"
            with cached keys; computed from `k` when None.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row of Tk keys (B = 1); chunks restart at each.
        backend: "auto", "reference" or "triton", our CUDA kernels (chunks of 16 to 256 keys, a power of two, of at most
            64 KiB; at most 8 chunks per query).

    Returns:
        `[B, Tq, H]` int32: index of the chunk, from 0 at the start of the query's document; -1 for the queries of
        chunk 0, which have no earlier chunk. With K > 1 `[B, Tq, H, K]`, in falling order of mass, -1 after the last
        where a query has fewer earlier chunks.

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k = autocast_cast(q.detach(), k.detach())
    check_attention(q, k, None, cu_seqlens)
    check_selection(chunk_size, selection, remote_chunks)
    check_chunk_means(chunk_means, k, chunk_size, selection, cu_seqlens)
    scale = default_scale(scale, q)
    return SELECT_CHUNKS.run(backend, q, k, chunk_size, selection, scale, chunk_means, cu_seqlens, remote_chunks)


def top1_chunk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int = CHUNK_SIZE,
    selection: Selection = "exact",
    remote_chunks: int = 1,
    scale: float | None = None,
    chunks: Tensor | None = None,
    chunk_means: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention to the query's own chunk and one selected earlier chunk (arXiv 2505.18522, section 5).

    One softmax covers the keys `j <= i` of the query's own chunk and all keys of the `remote_chunks` chunks that
    `select_chunks` gives. The paper has one. With more, queries attend to the top k as in MoBA (arXiv 2502.13189).
    The selection has no gradient; q, k and v get theirs through the softmax. The paper normalises q and k beforehand.

    Args:
        q: `[B, Tq, H, D]`, the last Tq of the Tk positions.
        k: `[B, Tk, HK, D]`, `HK` a divisor of `H`: query head h uses key head `h // (H / HK)`.
        v: as `k`.
        chunk_size: keys per chunk.
        selection: "exact" or "approx", see `select_chunks`; not used when `chunks` is given.
        remote_chunks: K, selected chunks of a query; fewer if there are fewer. Not used when `chunks` is given.
        scale: factor on the scores; None is `D ** -0.5`.
        chunks: `[B, Tq, H]` or `[B, Tq, H, K]` int32, an earlier selection by `select_chunks`; with it, activation
            checkpointing does not select twice.
        chunk_means: see `select_chunks`.
        cu_seqlens: `[N + 1]` int32 borders of documents packed into one row of Tk keys (B = 1); chunks restart at each.
        backend: as for `select_chunks`, or "flex", FlexAttention, which takes several chunks per query and costs as
            much as dense attention.

    Returns:
        `[B, Tq, H, D]` in the dtype of `q`, or of autocast if it is on.

    Raises:
        UserError: shapes, dtypes or options that do not fit together.
    """
    q, k, v = autocast_cast(q, k, v)
    check_attention(q, k, v, cu_seqlens)
    check_selection(chunk_size, selection, remote_chunks)
    check_chunk_means(chunk_means, k, chunk_size, selection, cu_seqlens)
    scale = default_scale(scale, q)
    select = "auto" if backend == "flex" else backend
    options = chunk_size, selection, scale, chunk_means, cu_seqlens, remote_chunks
    chunks = SELECT_CHUNKS.run(select, q.detach(), k.detach(), *options) if chunks is None else per_query(chunks, q)
    return TOP1_CHUNK_ATTENTION.run(backend, q, k, v, chunks, chunk_size, scale, cu_seqlens)


def check_selection(chunk_size: int, selection: str, remote_chunks: int) -> None:
    """Refuse anything but counts from 1 and a known selection."""
    if selection not in ("exact", "approx"):
        raise unknown("selection", selection, ("exact", "approx"))
    for name, count in (("chunk_size", chunk_size), ("remote_chunks", remote_chunks)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {count!r}")


def check_chunk_means(
    chunk_means: Tensor | None, k: Tensor, chunk_size: int, selection: str, cu_seqlens: Tensor | None = None
) -> None:
    """Refuse mean keys that the selection does not use, or that lack a chunk before the last key's."""
    if chunk_means is not None and (selection != "approx" or cu_seqlens is not None):
        raise UserError("chunk_means serves only selection='approx' without cu_seqlens: leave it out here")
    keys = {"k [B, Tk, HK, D]": k, "chunk_means [B, N, HK, D] float": chunk_means}
    check_shapes(keys, {"B": 0, "N": (k.shape[1] - 1) // chunk_size})


def per_query(chunks: Tensor, q: Tensor) -> Tensor:
    """A given selection `[B, Tq, H, K]`, or `[B, Tq, H]` where K is 1; anything else is refused."""
    every = chunks.unsqueeze(3) if chunks.dim() == 3 else chunks
    check_shapes({"q [B, Tq, H, D]": q, "chunks [B, Tq, H, K] int32": every}, {"B": 0})
    return every.squeeze(3) if every.shape[3] == 1 else every


def chunk_obstacle(q: Tensor, chunk_size: int | None, remote_chunks: int) -> str | None:
    """The reason why the Triton kernels cannot attend to chunks of this size and number, or None."""
    if remote_chunks > TRITON_REMOTE_CHUNKS:
        return f"it takes at most {TRITON_REMOTE_CHUNKS} remote chunks per query, not {remote_chunks}"
    if chunk_size not in TRITON_CHUNK_SIZES:
        return f"chunk_size {chunk_size} is not among {', '.join(map(str, TRITON_CHUNK_SIZES))}"
    D = q.shape[-1]
    columns = next((n for n in (16, 32, 64, 128, 256) if n >= D), D)
    if chunk_size * columns * q.element_size() > TRITON_CHUNK_BYTES:
        return f"a chunk of {chunk_size} keys of {D} dims in {q.dtype} is more than it holds"
    return None


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


def chunks_per_query(chunks: Tensor) -> int:
    """K of a selection `[B, Tq, H]` (1) or `[B, Tq, H, K]`."""
    return 1 if chunks.dim() == 3 else chunks.shape[3]


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


def _select_obstacle(q: Tensor, k: Tensor, chunk_size: int, *options: Any) -> str | None:
    return chunk_obstacle(q, chunk_size, options[-1])


def _attend_obstacle(q: Tensor, k: Tensor, v: Tensor, chunks: Tensor, chunk_size: int, *_: Any) -> str | None:
    return chunk_obstacle(q, chunk_size, chunks_per_query(chunks))


def _flex_obstacle(q: Tensor, *_: Any) -> str | None:
    if q.shape[1] == 1:
        return "it would be compiled for each length of a cache"
    return None if 16 <= q.shape[3] <= 256 else f"it takes heads of 16 to 256 dims, not {q.shape[3]}"


SELECT_CHUNKS = Op(
    "select_chunks",
    select_chunks_reference,
    (Backend("triton", "seqarch.kernels.top1_chunk.triton:select", "triton", obstacle=_select_obstacle),),
)
TOP1_CHUNK_ATTENTION = Op(
    "top1_chunk_attention",
    top1_chunk_attention_reference,
    (
        Backend("triton", "seqarch.kernels.top1_chunk.triton:attend", "triton", obstacle=_attend_obstacle),
        Backend("flex", "seqarch.kernels.top1_chunk.flex:flex_top1_chunk_attention", obstacle=_flex_obstacle),
    ),
)
