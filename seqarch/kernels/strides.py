"""How Triton kernels see tensors whose tokens lie further apart than they are long, as slices of a projection do."""

from __future__ import annotations

import torch
from torch import Tensor

ANY_LAYOUT = (torch.Tag.flexible_layout,)
"""Compiled graphs pad the rows of projections; without this they would copy slices of them back to rows as before."""


def token_rows(t: Tensor) -> Tensor:
    """`t [B, T, ...]`, copied unless each token is in one piece and the tokens of all rows lie one stride apart."""
    inner = torch.empty(t.shape[2:], device="meta").stride()
    in_rows = t.stride()[2:] == inner and (t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1))
    # not contiguous(), which leaves the strides of a dimension of one element as they are
    return t if in_rows else t.clone(memory_format=torch.contiguous_format)


def common_factor(*strides: int) -> int:
    """The largest power of two up to 16 that divides all strides: where the compiler knows one, loads are wide."""
    return next(n for n in (16, 8, 4, 2, 1) if all(stride % n == 0 for stride in strides))
