"""Times the selective scan of Mamba-1 next to mamba-ssm's CUDA kernel.

In the rows, H is the number of channels (`d_inner`) and D the size of a channel's state.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.rows import Row
from seqarch.bench.timing import passes
from seqarch.kernels import selective_scan
from seqarch.kernels.packages import is_installed, mamba_ssm_function
from tests.kernels import inputs

SHAPES = ((32, 2048, 1536), (32, 2048, 4096), (1, 102400, 1536), (1, 102400, 4096))
"""B, T and channels of the timings."""

STATES = 16


def draw(B: int, T: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw arguments like those of a new model, with steps around 0.01."""
    options: dict[str, Any] = {"step": -4.6, "dtype": dtype, "device": "cuda", "seed": None}
    drawn = inputs.selective_scan(B, T, d, STATES, **options)
    return {name: t for name, t in drawn.items() if t is not None}


def cuda_arguments(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Convert arguments to the layout and dtypes of the CUDA kernel: time last, steps in the dtype of x, one group."""
    x, dt, B, C = (tensors[name].detach().to(tensors["x"].dtype).mT.contiguous() for name in ("x", "dt", "B", "C"))
    found = [x, dt, tensors["A"].detach(), B.unsqueeze(1), C.unsqueeze(1), tensors["D"].detach()]
    return [t.clone().requires_grad_() for t in found]


def scan(names: tuple[str, ...], *tensors: Tensor) -> Tensor:
    """The outputs of our scan for the arguments of these names."""
    arguments: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return selective_scan(**arguments)[0]


def rows() -> Iterator[Row]:
    """Time our kernels and mamba-ssm's: forward, and forward and backward."""
    published = is_installed("mamba_ssm") and mamba_ssm_function("selective_scan_interface", "selective_scan_fn")
    if not published:
        print("mamba-ssm's CUDA kernel is left out: mamba-ssm is not installed", flush=True)
    for B, T, d in SHAPES:
        shape = {"B": B, "T": T, "H": d, "D": STATES}
        tensors = draw(B, T, d, torch.bfloat16)
        half = {**tensors, "dt": tensors["dt"].detach().bfloat16().requires_grad_()}
        for name, drawn in (("scan", tensors), ("scan, dt in bf16", half)):
            yield from passes(name, functools.partial(scan, tuple(drawn)), list(drawn.values()), **shape)
        if published:
            yield from passes("mamba-ssm CUDA", published, cuda_arguments(tensors), **shape)
