"""Inputs of the selective scan that its tests share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqarch.kernels.selective_scan.op import scan_recurrent
from seqarch.kernels.tensors import state_or_zeros
from tests.kernels import inputs

DECAYS = ("full", "one", "none")


def draw(B: int, T: int, d: int, N: int, decay: str, **options: Any) -> dict[str, Any]:
    return inputs.selective_scan(B, T, d, N, decay=decay, **options)


def leaves(inputs: dict[str, Any]) -> list[Tensor]:
    return [tensor for tensor in inputs.values() if tensor is not None]


def recurrent(inputs: dict[str, Any], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition: one step per token."""
    tensors: list[Any] = [inputs.get(name) for name in ("x", "dt", "A", "B", "C", "D", "log_decay")]
    x, dt, A, B, C, D, log_decay = tensors
    h = state_or_zeros(state, x, x.shape[0], x.shape[2], B.shape[2])
    y, final = scan_recurrent(x, dt, A, B, C, log_decay, h)
    return (y if D is None else y + D * x).to(x.dtype), final
