"""Times the recurrences of Mamba-1 and Mamba-2 by each backend, and compares them with float64.

In the rows of Mamba-1, H is the number of channels (`d_inner`) and D the size of a channel's state. In those of Mamba-2
H is the number of heads and D their size; the state has 128 rows.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.jobs import Row
from seqarch.bench.timing import passes
from seqarch.kernels import selective_scan, ssd
from seqarch.kernels.op import Op
from seqarch.kernels.packages import is_installed, mamba_ssm_function
from seqarch.kernels.selective_scan.op import SELECTIVE_SCAN
from seqarch.kernels.ssd.op import MAMBA_CHUNK, SSD
from seqarch.testing.compare import relative_error
from tests.kernels import inputs

LENGTHS = ((32, 2048), (1, 102400))
"""B and T of the timings."""
STATES, MAMBA2_STATES, HEAD = 16, 128, 64
CHANNELS = (1536, 4096)
"""At 110M and 1.3B."""
CHECKED = (2, 2048)
"""B and T of the comparison with float64."""
DEVICE = "cuda"


def draw(B: int, T: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw arguments of Mamba-1 like those of a new model, with steps around 0.01."""
    drawn = inputs.selective_scan(B, T, d, STATES, step=-4.6, dtype=dtype, device=DEVICE, seed=None)
    return {name: t for name, t in drawn.items() if t is not None}


def draw_heads(B: int, T: int, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw arguments of Mamba-2 like those of a new model with d channels."""
    drawn = inputs.ssd(B, T, d // HEAD, HEAD, N=MAMBA2_STATES, dtype=dtype, device=DEVICE, seed=None)
    return {name: t for name, t in drawn.items() if t is not None}


def cuda_arguments(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Convert arguments to the layout and dtypes of the CUDA kernel: time last, steps in the dtype of x, one group."""
    x, dt, B, C = (tensors[name].detach().to(tensors["x"].dtype).mT.contiguous() for name in ("x", "dt", "B", "C"))
    found = [x, dt, tensors["A"].detach(), B.unsqueeze(1), C.unsqueeze(1), tensors["D"].detach()]
    return [t.clone().requires_grad_() for t in found]


def outputs_by(op: Callable[..., Any], tensors: dict[str, Tensor], backend: str) -> Callable[..., Tensor]:
    """A function of the values of `tensors` that returns the outputs of the op."""
    return lambda *values: op(**dict(zip(tensors, values, strict=True)), backend=backend)[0]


def backends(op: Op) -> list[str]:
    """Those whose packages are here."""
    missing = {each.name: each.absence() for each in op.backends}
    for name, reason in missing.items():
        if reason:
            print(f"{op.name}: backend '{name}' is left out: {reason}", flush=True)
    return [name for name, reason in missing.items() if not reason]


def rows() -> Iterator[Row]:
    """Time Mamba-1 by our kernels and mamba-ssm's, whose rows "CUDA" leave out what fits its arguments to a model."""
    published = is_installed("mamba_ssm") and mamba_ssm_function("selective_scan_interface", "selective_scan_fn")
    for B, T in LENGTHS:
        for d in CHANNELS:
            shape = {"B": B, "T": T, "H": d, "D": STATES}
            tensors = draw(B, T, d, torch.bfloat16)
            half = {**tensors, "dt": tensors["dt"].detach().bfloat16().requires_grad_()}
            for name, drawn in (("scan", tensors), ("scan, dt in bf16", half)):
                yield from passes(name, outputs_by(selective_scan, drawn, "auto"), list(drawn.values()), **shape)
            if published:
                yield from passes("mamba-ssm CUDA", published, cuda_arguments(tensors), **shape)
                run = outputs_by(selective_scan, tensors, "mamba_ssm")
                yield from passes("scan by mamba_ssm", run, list(tensors.values()), **shape)


def of_heads() -> Iterator[Row]:
    """Time Mamba-2 by mamba-ssm's kernels as they come, then by each backend, of which one makes them deterministic."""
    ways = {f"ssd by {name}": functools.partial(outputs_by, ssd, backend=name) for name in backends(SSD)}
    if is_installed("mamba_ssm"):
        published = mamba_ssm_function("triton.ssd_combined", "mamba_chunk_scan_combined")
        ways = {"mamba-ssm Triton": lambda _: lambda *values: published(*values, MAMBA_CHUNK), **ways}
    for name, way in ways.items():
        for B, T in LENGTHS:
            for d in CHANNELS:
                tensors = draw_heads(B, T, d, torch.bfloat16)
                shape = {"B": B, "T": T, "H": d // HEAD, "D": HEAD}
                yield from passes(name, way(tensors), list(tensors.values()), **shape)


def errors() -> Iterator[Row]:
    """Relative errors of outputs and gradients of both, at 110M's sizes, against the reference in float64."""
    B, T = CHECKED
    for op, function, maker in ((SELECTIVE_SCAN, selective_scan, draw), (SSD, ssd, draw_heads)):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = maker(B, T, CHANNELS[0], dtype)
            wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
            weights = torch.randn_like(tensors["x"])
            exact = _results(outputs_by(function, wide, "reference"), wide, weights.double())
            for backend in backends(op):
                found = _results(outputs_by(function, tensors, backend), tensors, weights)
                for name, each in found.items():
                    off = relative_error(each.double(), exact[name])
                    named = f"{op.name} by {backend}, {str(dtype).removeprefix('torch.')}: {name}"
                    yield {"name": named, "B": B, "T": T, "p50": off, "unit": "relative error"}


def _results(run: Callable[..., Tensor], tensors: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """The outputs, and gradients by name."""
    y = run(*tensors.values())
    gradients = torch.autograd.grad(y, list(tensors.values()), weights)
    return {"y": y.detach(), **{f"d{name}": each for name, each in zip(tensors, gradients, strict=True)}}
