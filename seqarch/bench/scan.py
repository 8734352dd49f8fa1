"""Check the selective scan against float64 on a GPU, then time it next to mamba-ssm's CUDA kernel.

In the rows, H is the number of channels (`d_inner`) and D the size of a channel's state.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.kernels_check import compare
from seqarch.bench.rows import Row, require
from seqarch.bench.timing import passes
from seqarch.kernels import OPS, selective_scan
from seqarch.kernels.packages import is_installed, mamba_ssm_function

SHAPES = ((32, 2048, 1536), (32, 2048, 4096), (1, 102400, 1536), (1, 102400, 4096))
"""B, T and channels of the timings."""

STATES = 16
TOLERANCE = {dtype: bound for dtype, bound in OPS["selective_scan"].tolerance.items() if dtype != torch.float16}


def draw(B: int, T: int, d: int, dtype: torch.dtype, decay: str = "full") -> dict[str, Tensor]:
    """Draw arguments like those of a new model, with steps around 0.01."""
    options: dict[str, Any] = {"decay": decay, "step": -4.6, "dtype": dtype, "device": "cuda", "seed": None}
    drawn = OPS["selective_scan"].inputs(B, T, d, STATES, **options)
    return {name: t for name, t in drawn.items() if t is not None}


def scan(tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return selective_scan(**{"A": None, **tensors}, **options)


def check() -> Iterator[bool]:
    """Compare outputs, final states and gradients with the float64 recurrence; print and yield whether each holds."""
    for decay in ("full", "one", "none"):
        for dtype, tolerance in TOLERANCE.items():
            for B, T, d in ((2, 1024, 256), (1, 5003, 96)):
                tensors = draw(B, T, d, dtype, decay)
                name = f"scan decay {decay} B{B} T{T} d{d} {dtype}: y, state, {', '.join(f'd{n}' for n in tensors)}"
                yield compare(name, positional(tuple(tensors)), list(tensors.values()), tolerance)


def cuda_arguments(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Convert arguments to the layout and dtypes of the CUDA kernel: time last, steps in the dtype of x, one group."""
    x, dt, B, C = (tensors[name].detach().to(tensors["x"].dtype).mT.contiguous() for name in ("x", "dt", "B", "C"))
    found = [x, dt, tensors["A"].detach(), B.unsqueeze(1), C.unsqueeze(1), tensors["D"].detach()]
    return [t.clone().requires_grad_() for t in found]


def rows() -> Iterator[Row]:
    """Check, then time our kernels and mamba-ssm's: forward, and forward and backward."""
    require(check())
    published = is_installed("mamba_ssm") and mamba_ssm_function("selective_scan_interface", "selective_scan_fn")
    if not published:
        print("mamba-ssm's CUDA kernel is left out: mamba-ssm is not installed", flush=True)
    for B, T, d in SHAPES:
        shape = {"B": B, "T": T, "H": d, "D": STATES}
        tensors = draw(B, T, d, torch.bfloat16)
        half = {**tensors, "dt": tensors["dt"].detach().bfloat16().requires_grad_()}
        for name, inputs in (("scan", tensors), ("scan, dt in bf16", half)):
            outputs = positional(tuple(inputs))
            yield from passes(name, lambda *t, op=outputs: op(*t)[0], list(inputs.values()), **shape)
        if published:
            yield from passes("mamba-ssm CUDA", published, cuda_arguments(tensors), **shape)


def positional(names: tuple[str, ...]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Our scan as a function of the tensors by position."""
    return lambda *tensors, **options: scan(dict(zip(names, tensors, strict=True)), **options)
