"""MoBA's published codes (arXiv 2502.13189, 2511.11571) next to Top-1 chunk attention to as many chunks of 128 keys."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.kernels_check import compare, say
from seqarch.bench.kernels_time import remote
from seqarch.bench.rows import Row, require
from seqarch.bench.timing import LONG, Ops, draw
from seqarch.errors import UserError
from seqarch.kernels import top1_chunk_attention

PUBLISHED = {
    "MoBA": ("moba.moba_efficient", "moba_attn_varlen", ("flash_attn", "moba")),
    "MoBA (fla)": ("fla.ops.moba", "parallel_moba", ("flash_attn", "fla")),
    "FlashMoBA": ("flash_moba", "flash_moba_varlen_func", ("flash_moba",)),
}
"""By name, a module, its function and the packages that it needs."""
CHUNK_SIZE = 128
FLIPS = 0.03
"""Largest share of queries that may choose another chunk than in float64: the published gates round mean keys."""


def rows() -> Iterator[Row]:
    """Check the published codes, then time them, dense attention and our op at 102,400 tokens.

    Raises:
        UserError: no published code of MoBA can be imported.
    """
    return _rows(published())


def _rows(ops: Ops) -> Iterator[Row]:
    require(held for name, op in ops.items() for _, D in LONG for held in check(f"{name} D{D}", op, D))
    yield from remote(ops)


def check(name: str, op: Callable[..., Tensor], D: int) -> Iterator[bool]:
    """Compare with float64: outputs and gradients where queries see all earlier chunks, outputs where they choose."""

    def attend(*tensors: Tensor, backend: str = "", **options: Any) -> Tensor:
        run = partial(top1_chunk_attention, selection="approx", backend=backend) if backend else op
        return run(*tensors, **options)

    yield compare(f"{name}, all chunks", attend, draw(1, 9 * CHUNK_SIZE, 2, D), 1e-2, remote_chunks=8)
    tensors = [t.detach() for t in draw(1, 2048, 2, D)]
    for count in (1, 8):
        wanted = attend(*(t.double() for t in tensors), backend="reference", remote_chunks=count)
        off = (op(*tensors, remote_chunks=count) - wanted).norm(dim=-1) > 0.05 * wanted.norm(dim=-1)
        share = off.double().mean().item()
        yield say(share < FLIPS, f"{name}, remote chunks: {count}: {share:.1e} of the queries differ")


def published() -> Ops:
    """The published codes that are installed, as functions of q, k and v `[1, T, H, D]` and `remote_chunks`."""
    ops = {
        name: partial(_attend, name, getattr(importlib.import_module(module), function))
        for name, (module, function, packages) in PUBLISHED.items()
        if all(map(find_spec, packages))
    }
    if not ops:
        raise UserError(
            "bench kernels moba needs a published code of MoBA: build https://github.com/mit-han-lab/flash-moba, or "
            "pip install flash-attn --no-build-isolation, then put a clone of https://github.com/MoonshotAI/MoBA on "
            "PYTHONPATH or pip install fla-core"
        )
    print("not installed and left out:", ", ".join(sorted(PUBLISHED.keys() - ops.keys())) or "none", flush=True)
    return ops


def _attend(name: str, op: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, remote_chunks: int) -> Tensor:
    T = q.shape[1]
    borders = torch.tensor([0, T], dtype=torch.int32, device=q.device)
    lengths = (borders, borders, T, T) if name == "FlashMoBA" else (borders, T)
    tensors = (q, k, v) if name == "MoBA (fla)" else (t.squeeze(0) for t in (q, k, v))  # the others know no batch
    return op(*tensors, *lengths, CHUNK_SIZE, 1 + remote_chunks).view_as(q)  # 1 for the own chunk
