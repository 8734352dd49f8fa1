"""MoBA's published code (arXiv 2502.13189) next to Top-1 chunk attention: the own chunk of 128 keys and one other."""

import importlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from seqarch.bench.rows import Row
from seqarch.bench.timing import LONG, against, draw, forward_backward, measure, measure_dense
from seqarch.errors import UserError
from seqarch.kernels import top1_chunk_attention

PUBLISHED = {
    "MoBA": ("moba.moba_efficient", "moba_attn_varlen"),
    "MoBA (fla)": ("fla.ops.moba", "parallel_moba"),
}
CHUNK_SIZE, TOP_K = 128, 2
"""Keys per chunk; chunks that a query attends to, its own among them."""


def rows() -> Iterator[Row]:
    """Time dense attention, MoBA and our op at 102,400 tokens, forward and backward.

    Raises:
        UserError: no published code of MoBA can be imported.
    """
    return _timings(published())


def _timings(ops: dict[str, Callable[..., Tensor]]) -> Iterator[Row]:
    for H, D in LONG:
        shape = {"B": 1, "T": 102400, "H": H, "D": D}
        tensors = draw(1, 102400, H, D)
        dense = measure_dense(tensors, **shape)
        yield from dense
        for name, op in ops.items():
            yield against(dense, measure(f"{name} fwd+bwd", forward_backward(op, tensors), **shape))
        for selection in ("exact", "approx"):
            run = forward_backward(top1_chunk_attention, tensors, selection=selection, chunk_size=CHUNK_SIZE)
            yield against(dense, measure(f"{selection} fwd+bwd", run, **shape))


def published() -> dict[str, Callable[..., Tensor]]:
    """The published codes that are installed, as functions of q, k and v `[1, T, H, D]`."""
    ops: dict[str, Callable[..., Tensor]] = {}
    if _can_import("flash_attn"):  # both are built on its kernels
        ops = {name: op for name, where in PUBLISHED.items() if (op := _load(name, *where))}
    if not ops:
        raise UserError(
            "bench kernels moba needs MoBA's published code: pip install flash-attn --no-build-isolation, then either "
            "put a clone of https://github.com/MoonshotAI/MoBA on PYTHONPATH or pip install fla-core"
        )
    return ops


def _can_import(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _load(name: str, module: str, function: str) -> Callable[..., Tensor] | None:
    if not _can_import(module):
        print(f"{name} is not installed and left out", flush=True)
        return None
    op = getattr(importlib.import_module(module), function)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        borders = torch.tensor([0, q.shape[1]], dtype=torch.int32, device=q.device)
        tensors = (q, k, v) if name == "MoBA (fla)" else (q[0], k[0], v[0])  # MoBA's own code knows no batch
        return op(*tensors, borders, q.shape[1], CHUNK_SIZE, TOP_K).view_as(q)

    return attend
