"""Outputs and gradients of a layer, to compare it with the published one or with wider numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def outputs_and_gradients(module: Any, x: Tensor, run: Any = None) -> dict[str, Tensor]:
    """`y`, and the gradients of a fixed random sum of `y`: for `x`, and for the parameters by name.

    Args:
        module: has the parameters.
        x: its input.
        run: `(module, x) -> y` where that is not `module(x)`.
    """
    x = x.detach().requires_grad_()
    y = module(x) if run is None else run(module, x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    named = dict(module.named_parameters())
    gradients = torch.autograd.grad((y * weights).sum(), [x, *named.values()], allow_unused=True)
    found = {name: g for name, g in zip(["x", *named], gradients, strict=True) if g is not None}
    return {"y": y, **found}
