"""What the tests of RWKV's mixers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def stirred(kind: Any, d_model: int = 32, n_heads: int = 4, layer_idx: int = 1, **options: Any) -> Any:
    """A mixer of three layers with no parameter at a special value."""
    torch.manual_seed(0)
    mixer = kind(d_model, layer_idx, 3, n_heads=n_heads, **options)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mixer


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each source into its target. Shapes agree apart from dimensions of one element."""
    with torch.no_grad():
        for target, source in pairs:
            assert target.squeeze().shape == source.squeeze().shape
            target.copy_(source.view(target.shape))
