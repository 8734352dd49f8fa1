"""MoBA's published codes (arXiv 2502.13189, 2511.11571) next to Top-1 chunk attention to as many chunks of 128 keys."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.kernels.top1 import remote
from seqarch.bench.jobs import Row
from seqarch.bench.timing import Ops
from seqarch.errors import UserError

PUBLISHED = {
    "MoBA": ("moba.moba_efficient", "moba_attn_varlen", ("flash_attn", "moba")),
    "MoBA (fla)": ("fla.ops.moba", "parallel_moba", ("flash_attn", "fla")),
    "FlashMoBA": ("flash_moba", "flash_moba_varlen_func", ("flash_moba",)),
}
"""By name, a module, its function and the packages that it needs."""
CHUNK_SIZE = 128


def rows() -> Iterator[Row]:
    """Time the published codes, dense attention and our op at 102,400 tokens.

    Raises:
        UserError: no published code of MoBA can be imported.
    """
    return remote(published())


def published() -> Ops:
    """The published codes that are installed, as functions of q, k and v `[1, T, H, D]` and `remote_chunks`."""
    ops = {
        name: partial(_attend, name, getattr(importlib.import_module(module), function))
        for name, (module, function, packages) in PUBLISHED.items()
        if all(map(find_spec, packages))
    }
    if not ops:
        raise UserError(
            "the step moba needs a published code of MoBA: build https://github.com/mit-han-lab/flash-moba, or "
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
