"""What the attention ops share: argument checks, autocast, and query blocks that keep memory linear in the sequence."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seqarch.errors import UserError, unknown

Backend = Literal["auto", "reference", "triton"]

SCORE_BYTES = 32 * 2**20
"""Size of one block of scores in the references: large enough for few Python iterations, small enough to stay cheap.
On other devices than the CPU, where a launch costs more and memory is plenty, it is 16 times that."""

HAS_TRITON = importlib.util.find_spec("triton") is not None


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None = None, *, names: str = "q, k and v") -> None:
    """Refuse anything but `q [B, Tq, H, D]`, `k` and `v` `[B, Tk, HK, D]` with `Tq <= Tk` and `HK` dividing `H`."""
    tensors = (q, k) if v is None else (q, k, v)
    names = names if v is not None else "q and k"
    if any(t.dim() != 4 for t in tensors):
        raise UserError(f"{names} must have four dimensions [B, T, H, D], not {[tuple(t.shape) for t in tensors]}")
    if v is not None and k.shape != v.shape:
        raise UserError(f"k and v must have the same shape, not {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UserError(f"q and k must agree in batch and head dim, not {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly: give a divisor")
    if not 1 <= q.shape[1] <= k.shape[1]:
        raise UserError(
            f"queries are the last of the keys' positions: 1 <= Tq <= Tk, not Tq = {q.shape[1]} and Tk = {k.shape[1]}"
        )
    if any(t.dtype != q.dtype or t.device != q.device for t in tensors) or not q.is_floating_point():
        raise UserError(
            f"{names} must share one floating-point dtype and device, not {[(t.dtype, str(t.device)) for t in tensors]}"
        )


def check_cu_seqlens(cu_seqlens: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Refuse `cu_seqlens` that is not `[N + 1]` int32 for one packed row with as many queries as keys."""
    check_packed(cu_seqlens, q)
    if cu_seqlens is not None and q.shape[1] != k.shape[1]:
        raise UserError(f"cu_seqlens needs Tq = Tk, not Tq = {q.shape[1]} and Tk = {k.shape[1]}")


def check_packed(cu_seqlens: Tensor | None, x: Tensor) -> None:
    """Refuse `cu_seqlens` that is not `[N + 1]` int32 for the one packed row of `x [1, T, ...]`.

    Whether it rises from 0 to T is asked only where the answer is at hand, on a CPU outside compiled graphs.
    """
    if cu_seqlens is None:
        return
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] < 2:
        raise UserError(
            f"cu_seqlens must be int32 of shape [N + 1], not {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if x.shape[0] != 1:
        raise UserError(f"cu_seqlens needs B = 1, not B = {x.shape[0]}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        all_documents(cu_seqlens, x.shape[1])


def check_window(window: int | None) -> None:
    """Refuse a window below one key: a query always sees itself."""
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1 (the query's own position), not {window}")


def check_alibi(alibi_slopes: Tensor | None, q: Tensor) -> None:
    """Refuse slopes that are not one number a query head."""
    if alibi_slopes is not None and alibi_slopes.shape != (q.shape[2],):
        raise UserError(f"alibi_slopes must have shape [H] = [{q.shape[2]}], not {list(alibi_slopes.shape)}")


def check_choice(kind: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a `value` that is not among the `known` ones."""
    if value not in known:
        raise unknown(kind, value, known)


def interpreting() -> bool:
    """Whether Triton's interpreter runs, which takes tensors on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_obstacle(q: Tensor) -> str | None:
    """Why Triton kernels cannot run on `q` at all, or None."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if not q.is_cuda and not interpreting():
        return f"the tensors are on {q.device.type}, not on a CUDA device"
    return None


def runs_triton(backend: str, t: Tensor, obstacle: Callable[[], str | None] = lambda: None) -> bool:
    """Whether an op's Triton kernels take the call; "triton" where they cannot is an error.

    Args:
        backend: "auto", "reference" or "triton".
        t: a tensor of the call.
        obstacle: says why the kernels cannot take it, beside its device and float64, or None.
    """
    if backend == "reference":
        return False
    found = triton_obstacle(t) or obstacle() or ("it does not take float64" if t.dtype == torch.float64 else None)
    if backend == "triton" and found:
        raise UserError(f"backend 'triton' cannot run this: {found}")
    return found is None and (t.is_cuda or backend == "triton")


def triton_operator(name: str, tags: tuple[torch.Tag, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` for a function that launches Triton kernels and whose first argument is a tensor.

    Triton launches on the current device. Here that is the device of the tensor, so a model may lie on any GPU.
    """

    def register(launch: Callable[..., Any]) -> Any:
        @functools.wraps(launch)
        def on_its_device(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first):
                return launch(first, *others)

        return torch.library.custom_op(name, on_its_device, mutates_args=(), tags=tags)

    return register


def default_scale(scale: float | None, q: Tensor) -> float:
    """The factor on the scores: `scale`, or D ** -0.5."""
    if scale is None:
        return q.shape[-1] ** -0.5
    if scale <= 0:
        raise UserError(f"scale must be positive, not {scale}")
    return scale


def is_tracked(*tensors: Tensor | None) -> bool:
    """Whether gradients will flow to one of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast_cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of the surrounding autocast, if any; ops of ours do not see autocast otherwise."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def documents(cu_seqlens: Tensor, length: int) -> list[tuple[int, int]]:
    """(start, stop) of each document that is not empty; reads `cu_seqlens` on the host."""
    return [(start, stop) for start, stop in all_documents(cu_seqlens, length) if start < stop]


def all_documents(cu_seqlens: Tensor, length: int) -> list[tuple[int, int]]:
    """(start, stop) of each document, empty ones included; reads `cu_seqlens` on the host."""
    borders = cu_seqlens.tolist()
    if borders[0] != 0 or borders[-1] != length or any(a > b for a, b in itertools.pairwise(borders)):
        raise UserError(f"cu_seqlens must rise from 0 to T = {length}, not {borders}")
    return list(itertools.pairwise(borders))


def document_positions(x: Tensor, *, start: int = 0, cu_seqlens: Tensor | None = None) -> Tensor:
    """Positions `[T]` (int64) of the tokens of `x [B, T, ...]`.

    Args:
        x: any tensor with the sequence in its second dimension.
        start: position of the first token, for a call that continues from a state.
        cu_seqlens: `[N + 1]` borders of packed documents; positions restart at each.
    """
    positions = torch.arange(start, start + x.shape[1], device=x.device)
    if cu_seqlens is None:
        return positions
    document = torch.searchsorted(cu_seqlens, positions, right=True) - 1
    return positions - cu_seqlens[document]


def per_document(op: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], cu_seqlens: Tensor) -> Tensor:
    """Apply `op` to each document of `tensors [1, T, ...]` and join the results: nothing crosses a border."""
    length = next(t.shape[1] for t in tensors if t is not None)
    pieces = [
        op(*(None if t is None else t[:, start:stop] for t in tensors)) for start, stop in documents(cu_seqlens, length)
    ]
    return torch.cat(pieces, dim=1)


def query_blocks(q: Tensor, k: Tensor, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """(start, stop) of blocks of queries whose scores against all keys take at most SCORE_BYTES in float32.

    Blocks hold a multiple of `multiple` queries, so that a chunk is not cut needlessly.
    """
    row_bytes = 4 * q.shape[0] * q.shape[2] * k.shape[1]
    budget = SCORE_BYTES if q.device.type == "cpu" else 16 * SCORE_BYTES
    size = max(budget // row_bytes, 16)
    size = max(size // multiple, 1) * multiple
    for start in range(0, q.shape[1], size):
        yield start, min(start + size, q.shape[1])


def over_query_blocks(
    op: Callable[..., Tensor],
    q: Tensor,
    kv: tuple[Tensor, ...],
    per_query: Tensor | None = None,
    *,
    multiple: int = 1,
    **options: Any,
) -> Tensor:
    """Run `op(start, q, *kv[, per_query], **options)` over query blocks and join the results along T.

    A block gets the keys up to its last query; `start` is the position of its first query. With more than one block,
    the backward pass computes each block again instead of keeping its scores: memory is linear in T.
    """
    blocks = list(query_blocks(q, kv[0], multiple))
    offset = kv[0].shape[1] - q.shape[1]
    results = []
    for start, stop in blocks:
        seen = offset + stop
        args = [offset + start, q[:, start:stop], *(t[:, :seen] for t in kv)]
        if per_query is not None:
            args.append(per_query[:, start:stop])
        if len(blocks) > 1 and torch.is_grad_enabled():
            results.append(checkpoint(op, *args, use_reentrant=False, preserve_rng_state=False, **options))
        else:
            results.append(op(*args, **options))
    return results[0] if len(results) == 1 else torch.cat(results, dim=1)


def expand_heads(t: Tensor, heads: int) -> Tensor:
    """`[B, T, HK, D]` to `[B, T, H, D]`: query head h uses key/value head h // (H / HK)."""
    return t if t.shape[2] == heads else t.repeat_interleave(heads // t.shape[2], dim=2)


def at_least_float32(t: Tensor) -> Tensor:
    """Half precision widened to float32; float32 and float64 as they are."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """`scale * q k^T` as `[B, H, Tq, Tk]`, at least in float32 whatever autocast says."""
    with torch.autocast(q.device.type, enabled=False):
        q, k = at_least_float32(q), at_least_float32(expand_heads(k, q.shape[2]))
        # scaled after the product: half-precision operands stay exact where the product runs in TF32
        return q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale


def positions(start: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the queries `[Tq, 1]`, the first at `start`, and of the keys `[1, Tk]`."""
    i = torch.arange(start, start + q.shape[1], device=q.device).unsqueeze(1)
    j = torch.arange(k.shape[1], device=q.device).unsqueeze(0)
    return i, j


def causal_mask(i: Tensor, j: Tensor, window: int | None = None) -> Tensor:
    """Which keys `j` a query `i` sees: the past and itself, of these the last `window`."""
    mask = j <= i
    return mask if window is None else mask & (i - j < window)


def alibi_bias(i: Tensor, j: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi (arXiv 2108.12409): `-slope * distance`, `[H, Tq, Tk]`."""
    return slopes.view(-1, 1, 1) * (j - i)
