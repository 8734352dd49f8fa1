"""How Triton kernels are launched: as operators of PyTorch, on the GPU of their tensors, on slices of projections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqarch.kernels.flops import count

ANY_LAYOUT = (torch.Tag.flexible_layout,)
"""Compiled graphs pad the rows of projections; without this they would copy slices of them back to rows as before."""


def triton_operator(name: str, tags: tuple[torch.Tag, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` for a function that launches Triton kernels and whose first argument is a tensor.

    `flops.py` has to have the formula that counts it. Triton launches on the current device. Here that is the device of
    the tensor, so a model may lie on any GPU.
    """

    def register(launch: Callable[..., Any]) -> Any:
        @functools.wraps(launch)
        def on_its_device(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first):
                return launch(first, *others)

        operator = torch.library.custom_op(name, on_its_device, mutates_args=(), tags=tags)
        count(name)
        return operator

    return register


def token_rows(t: Tensor) -> Tensor:
    """`t [B, T, ...]`, copied unless each token is in one piece and the tokens of all rows lie one stride apart."""
    inner = torch.empty(t.shape[2:], device="meta").stride()
    in_rows = t.stride()[2:] == inner and (t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1))
    # not contiguous(), which leaves the strides of a dimension of one element as they are
    return t if in_rows else t.clone(memory_format=torch.contiguous_format)


def common_factor(*strides: int) -> int:
    """The largest power of two up to 16 that divides all strides: where the compiler knows one, loads are wide."""
    return next(n for n in (16, 8, 4, 2, 1) if all(stride % n == 0 for stride in strides))
