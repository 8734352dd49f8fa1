"""Check the selective scan against float64 on a GPU, then time it beside mamba-ssm's CUDA kernel.

`python -m seqarch.bench.scan`
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.bench.rows import Row
from seqarch.errors import UserError
from seqarch.kernels import selective_scan

SHAPES = ((32, 2048, 1536), (32, 2048, 4096), (1, 102400, 1536), (1, 102400, 4096))
"""B, T and channels of the timings."""

STATES = 16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest relative error by norm."""


def draw(B: int, T: int, d: int, dtype: torch.dtype, decay: str = "full") -> dict[str, Tensor]:
    """Arguments as a new model has them: steps around 0.01, A from -1 to -N."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    tensors = {
        "x": normal(B, T, d).to(dtype),
        "dt": F.softplus(normal(B, T, d) - 4.6),
        "B": normal(B, T, STATES).to(dtype),
        "C": normal(B, T, STATES).to(dtype),
        "D": torch.ones(d, device="cuda"),
    }
    if decay == "full":
        tensors["A"] = -torch.arange(1, STATES + 1, device="cuda", dtype=torch.float32).repeat(d, 1)
    elif decay == "one":
        tensors["log_decay"] = -F.softplus(normal(B, T) - 4.6)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def scan(tensors: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    return selective_scan(**{"A": None, **tensors}, **options)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def check() -> Iterator[Row]:
    """Outputs, final states and gradients beside the recurrence in float64; fails where one is off by more."""
    for decay in ("full", "one", "none"):
        for dtype, tolerance in TOLERANCE.items():
            for B, T, d in ((2, 1024, 256), (1, 5003, 96)):
                tensors = draw(B, T, d, dtype, decay)
                wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
                errors = _errors(tensors, wide)
                worst = max(errors, key=lambda name: errors[name])
                row = {"step": "check", "name": f"{decay}, {str(dtype)[6:]}, worst: {worst}", "B": B, "T": T}
                yield {**row, "H": d, "D": STATES, "error": errors[worst], "tolerance": tolerance}
                if not errors[worst] <= tolerance:
                    raise SystemExit(f"{decay}, {dtype}, B={B}, T={T}, d={d}: {worst} is off by {errors[worst]:.2e}")


def _errors(tensors: dict[str, Tensor], wide: dict[str, Tensor]) -> dict[str, float]:
    actual, expected = scan(tensors), scan(wide, backend="reference")
    weights = [torch.randn_like(t) for t in expected]
    cast = [weight.to(t.dtype) for weight, t in zip(weights, actual, strict=True)]
    got = torch.autograd.grad(actual, list(tensors.values()), cast)
    wanted = torch.autograd.grad(expected, list(wide.values()), weights)
    names = ["y", "state", *(f"d{name}" for name in tensors)]
    pairs = zip(names, (*actual, *got), (*expected, *wanted), strict=True)
    return {name: relative_error(a, b) for name, a, b in pairs}


class _CudaScan(torch.autograd.Function):
    """mamba-ssm's kernel by itself, where its package cannot be imported: `[B, d, T]`, forward and backward."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
        kernel = importlib.import_module("selective_scan_cuda")
        y, states, *_ = kernel.fwd(u, dt, A, B, C, D, None, None, False)
        ctx.save_for_backward(u, dt, A, B, C, D, states)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        kernel = importlib.import_module("selective_scan_cuda")
        u, dt, A, B, C, D, states = ctx.saved_tensors
        dy = grads[0].contiguous()
        du, ddt, dA, dB, dC, dD, *_ = kernel.bwd(
            u, dt, A, B, C, D, None, None, dy, states, None, None, False, False
        )  # fmt: skip
        return du, ddt, dA, dB, dC, dD


def cuda_arguments(tensors: dict[str, Tensor]) -> list[Tensor]:
    """The same in the layout and dtypes of the CUDA kernel: time last, steps in the dtype of x, one group."""
    x, dt, B, C = (tensors[name].detach().to(tensors["x"].dtype).mT.contiguous() for name in ("x", "dt", "B", "C"))
    found = [x, dt, tensors["A"].detach(), B.unsqueeze(1), C.unsqueeze(1), tensors["D"].detach()]
    return [t.clone().requires_grad_() for t in found]


def time() -> Iterator[Row]:
    """Forward, and forward and backward, of our kernels and of mamba-ssm's."""
    have_cuda = importlib.util.find_spec("selective_scan_cuda") is not None
    if not have_cuda:
        yield {"step": "time", "name": "mamba-ssm CUDA: selective_scan_cuda is not installed"}
    for B, T, d in SHAPES:
        shape = {"B": B, "T": T, "H": d, "D": STATES}
        tensors = draw(B, T, d, torch.bfloat16)
        half = {**tensors, "dt": tensors["dt"].detach().bfloat16().requires_grad_()}
        for name, inputs in (("ours", tensors), ("ours, dt in bf16", half)):
            yield from _time(name, _positional(tuple(inputs)), list(inputs.values()), shape)
        if have_cuda:
            yield from _time("mamba-ssm CUDA", _CudaScan.apply, cuda_arguments(tensors), shape)


def _positional(names: tuple[str, ...]) -> Callable[..., Tensor]:
    """Our scan's outputs as a function of the tensors alone."""
    return lambda *tensors: scan(dict(zip(names, tensors, strict=True)))[0]


def _time(name: str, op: Callable[..., Any], arguments: list[Tensor], shape: Row) -> Iterator[Row]:
    from seqarch.bench.timing import measure

    with torch.no_grad():
        dy = torch.randn_like(op(*arguments))
        yield {"step": "time", **measure(f"{name} fwd", lambda: op(*arguments), **shape)}

    def both() -> Any:
        return torch.autograd.grad(op(*arguments), arguments, dy)

    yield {"step": "time", **measure(f"{name} fwd+bwd", both, **shape)}


def rows() -> Iterator[Row]:
    """All rows, checks first.

    Raises:
        UserError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("the scan is timed on an NVIDIA GPU, and there is none here")
    yield from check()
    yield from time()


if __name__ == "__main__":
    for row in rows():
        print("  ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
