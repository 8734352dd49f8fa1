"""Times an op on a GPU, on drawn tensors, next to dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqarch.bench.rows import Row
from seqarch.kernels import inputs

LONG = ((12, 64), (16, 128))
"""Heads and head dims of the timings at 102,400 tokens."""


def draw(B: int, T: int, H: int, D: int, *, HK: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Random q, k and v on the GPU, q and k of unit length."""
    return list(inputs.attention(B, T, H, D, HK=HK, normalised=True, dtype=dtype, device="cuda", seed=None).values())


def measure(name: str, fn: Callable[[], Any], **shape: Any) -> Row:
    """The row of `fn`: median, 20th and 80th percentile of its time in ms, and the memory it takes at its peak."""
    fn()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    times: Any = triton.testing.do_bench(fn, warmup=20, rep=150, quantiles=[0.5, 0.2, 0.8])
    p50, p20, p80 = times
    return {"name": name, **shape, "p20": p20, "p50": p50, "p80": p80, "unit": "ms", "peak_mib": round(memory, 1)}


def forward_backward(op: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> Callable[[], Any]:
    """A call that runs `op` forward and backward."""
    do = torch.randn_like(tensors[0])
    return lambda: torch.autograd.grad(op(*tensors, **options), tensors, do)


def dense(backend: SDPBackend) -> Callable[..., Tensor]:
    """Dense causal attention through one backend of SDPA."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


DENSE = {"dense cuDNN": dense(SDPBackend.CUDNN_ATTENTION), "dense FlashAttention-2": dense(SDPBackend.FLASH_ATTENTION)}


def measure_dense(tensors: list[Tensor], **shape: Any) -> list[Row]:
    """Dense attention forward and backward, the fastest backend first: the baseline for what is timed next to it."""
    rows = [measure(f"{name} fwd+bwd", forward_backward(op, tensors), **shape) for name, op in DENSE.items()]
    return sorted(rows, key=lambda row: row["p50"])


def against(baseline: Row | None, row: Row) -> Row:
    """The row with how many times faster it is than the dense baseline."""
    return {**row, "times_dense": baseline["p50"] / row["p50"]} if baseline else row
