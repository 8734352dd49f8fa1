"""Inputs of the selective scan that its tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.selective_scan.reference import scan_recurrent

DECAYS = ("full", "one", "none")


def draw(B: int, T: int, d: int, N: int, decay: str, *, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of `selective_scan` that ask for gradients; steps and rates are those of a new model."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    steps = torch.nn.functional.softplus(normal(B, T, d) - 2)
    rates = -torch.arange(1, N + 1, dtype=torch.float64) * (1 + 0.1 * normal(d, N))
    tensors = {
        "x": normal(B, T, d),
        "dt": steps,
        "A": rates if decay == "full" else None,
        "B": normal(B, T, N),
        "C": normal(B, T, N),
        "D": normal(d),
        "log_decay": -0.3 * torch.rand(B, T, generator=generator, dtype=torch.float64) if decay == "one" else None,
    }
    return {k: None if t is None else t.to(dtype).requires_grad_() for k, t in tensors.items()}


def leaves(inputs: dict[str, Any]) -> list[Tensor]:
    return [tensor for tensor in inputs.values() if tensor is not None]


def recurrent(inputs: dict[str, Any], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The truth: one step a token."""
    order = ("x", "dt", "A", "B", "C", "D", "log_decay")
    tensors: list[Any] = [inputs.get(name) for name in order]
    return scan_recurrent(*tensors, initial_state=state)
