"""Times one new token against cached keys on a GPU: Top-1 chunk decoding next to dense attention.

Every op is timed twice: called from Python, and replayed from a CUDA graph, as serving does. Between two runs the L2
cache is cleared. Dense attention is timed on both layouts of the cache, `[B, T, H, D]` and `[B, H, T, D]`.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqarch.bench.jobs import Row
from seqarch.bench.timing import captured, measure
from seqarch.errors import say
from seqarch.kernels import top1_chunk_decode
from seqarch.kernels.top1_chunk.op import Selection

SHAPES = ((64, 50_000, 12, 64), (1, 102_400, 12, 64), (64, 50_000, 16, 128), (1, 102_400, 16, 128))
"""B, T, H and D of the timings."""

SELECTIONS: tuple[Selection, ...] = ("exact", "approx")
SEVERAL = (2, 8)
"""Remote chunks of the timings, next to one."""
CHUNK = 128
BACKENDS = {
    "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""SDPA's backends. Plain matrix products are left out, because they would widen the cache to float32."""
Call = Callable[[], Any]


def rows() -> Iterator[Row]:
    """Yield a row for each shape and op: name, shape, percentiles in ms, times the fastest dense."""
    for B, T, H, D in SHAPES:
        torch.cuda.empty_cache()
        yield from _shape_rows(B, T, H, D)


def draw(B: int, capacity: int, H: int, HK: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """Draw random queries and caches in their dtype: in float32 the largest would not fit."""
    shapes = (B, 1, H, D), (B, capacity, HK, D), (B, capacity, HK, D)
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def chunk_means(k: Tensor) -> Tensor:
    """Return the mean keys of the complete chunks in float32, computed one sequence at a time."""
    n = k.shape[1] // CHUNK
    return torch.stack([each[: n * CHUNK].float().unflatten(0, (n, CHUNK)).mean(1) for each in k])


def _shape_rows(B: int, T: int, H: int, D: int) -> Iterator[Row]:
    q, k, v = draw(B, T, H, H, D, torch.bfloat16)
    lengths = torch.full((B,), T, dtype=torch.int32, device=q.device)
    means = chunk_means(k)
    shape = {"B": B, "T": T, "H": H, "D": D}
    dense = [row for name, call in _dense_calls(q, k, v) for row in _measure(name, call, shape)]
    fastest = {mode: min((r for r in dense if r["mode"] == mode), key=lambda r: r["p50"]) for mode in ("call", "graph")}
    exact = partial(top1_chunk_decode, q, k, v, lengths)
    approx = partial(exact, selection="approx", chunk_means=means)
    ours: dict[str, Callable[..., Any]] = {"exact": exact, "approx": approx}
    ours["approx, means in bf16"] = partial(approx, chunk_means=means.bfloat16())
    for name, K in itertools.product(SELECTIONS, SEVERAL):
        ours[f"{name}, remote chunks: {K}"] = partial(ours[name], remote_chunks=K)
    for row in dense + [row for name, call in ours.items() for row in _measure(name, call, shape)]:
        times_dense = fastest[row["mode"]]["p50"] / row["p50"]
        mode = {"call": "", "graph": ", CUDA graph"}[row.pop("mode")]
        yield {**row, "name": f"decode {row['name']}{mode}", "times_dense": times_dense}


def _dense_calls(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Call]]:
    """Yield dense attention of one query through each backend; each layout is dropped before the next is made."""
    from torch.nn.attention.flex_attention import flex_attention

    flex = torch.compile(flex_attention, dynamic=False)
    b_q = q.transpose(1, 2)
    for layout in ("", ", by head"):
        b_k, b_v = k.transpose(1, 2), v.transpose(1, 2)
        if layout:
            b_k, b_v = b_k.contiguous(), b_v.contiguous()
        for name, backend in BACKENDS.items():
            yield f"dense {name}{layout}", lambda k=b_k, v=b_v, backend=backend: _sdpa(b_q, k, v, backend)
        yield f"dense FlexAttention{layout}", lambda k=b_k, v=b_v: flex(b_q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)


def _measure(name: str, call: Call, shape: Row) -> Iterator[Row]:
    """Yield the rows of a call and of its graph. If dense attention does not run, print a line and yield nothing."""
    try:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        replay = captured(call)
    except Exception as error:  # a backend of PyTorch may raise anything for a shape that it does not take
        if not name.startswith("dense"):
            raise
        say(f"{name} {shape}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return
    for mode, run in (("call", call), ("graph", replay)):
        yield {**measure(name, run, **shape), "mode": mode}
