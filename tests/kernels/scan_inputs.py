"""Inputs of the selective scan that its tests share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqarch.kernels import inputs
from seqarch.kernels.selective_scan.reference import scan_recurrent

DECAYS = ("full", "one", "none")


def draw(B: int, T: int, d: int, N: int, decay: str, **options: Any) -> dict[str, Any]:
    return inputs.selective_scan(B, T, d, N, decay=decay, **options)


def leaves(inputs: dict[str, Any]) -> list[Tensor]:
    return [tensor for tensor in inputs.values() if tensor is not None]


def recurrent(inputs: dict[str, Any], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition: one step per token."""
    order = ("x", "dt", "A", "B", "C", "D", "log_decay")
    tensors: list[Any] = [inputs.get(name) for name in order]
    return scan_recurrent(*tensors, initial_state=state)
