"""How far arithmetic in less than float32 may be from float64: TF32, its simulation on a CPU, and bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqarch.testing.compare import relative_error

TF32_TOLERANCE = 3e-3
"""Largest relative error against float64 of fla's chunked kernels in float32, outputs and gradients.

They multiply in TF32, and Hopper's tensor cores drop the lower 13 of an operand's 23 bits of mantissa (PTX ISA,
`wgmma.mma_async`) rather than round them, so that errors of one sign add up. `test_precision.py` does the same to the
products of our chunked references: errors are then 1.1e-3 to 2.6e-3, in plain float32 below 1e-5, and with 7 bits
instead of 10, as in bf16, above this bound. An H200 gave 1.0e-3 to 3.0e-3, and where decays get their gradients as
differences that cancel, 1.1e-2: such tests compare with what plain PyTorch gives the same way.
"""

SLACK = 1.2
"""Two ways to compute in less than float32 differ a little in their errors, even where both round the same numbers."""


class DroppedBits(TorchDispatchMode):
    """Matrix products of float32 tensors, those of a backward pass too, read `bits` of each operand's mantissa."""

    def __init__(self, bits: int = 10) -> None:
        super().__init__()
        self.mask = -1 << (23 - bits)

    def _drop(self, t: Any) -> Any:
        if not isinstance(t, Tensor) or t.dtype != torch.float32:
            return t
        return (t.contiguous().view(torch.int32) & self.mask).view(torch.float32)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            args = [self._drop(t) for t in args]
        elif func in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default):
            args = [args[0], *(self._drop(t) for t in args[1:])]
        return func(*args, **(kwargs or {}))


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Errors by name; every name in `exact` must be there."""
    return {name: relative_error(found[name].to(value.device), value) for name, value in exact.items()}


def assert_near_float64(
    found: dict[str, Tensor],
    exact: dict[str, Tensor],
    bound: float,
    plain: Callable[[], dict[str, Tensor]] | None = None,
) -> None:
    """Every relative error is at most `bound`, or at most the error of plain PyTorch in this precision if larger.

    A sum that cancels loses its digits in any arithmetic: some gradients of RWKV-5's bonus are off by 10 % in bf16.

    Args:
        found: outputs and gradients by name.
        exact: the same in float64.
        bound: what is enough in any case; five times as much never is.
        plain: computes the same with the plain PyTorch reference in the precision of `found`; called if `bound` does
            not hold.
    """
    above = {name: error for name, error in relative_errors(found, exact).items() if not error <= bound}
    if above and plain is not None:
        allowed = relative_errors(plain(), exact)
        above = {name: e for name, e in above.items() if not e <= min(SLACK * allowed[name], 5 * bound)}
    assert not above, f"above {bound:.3g}: " + ", ".join(f"{name} off by {error:.3g}" for name, error in above.items())
