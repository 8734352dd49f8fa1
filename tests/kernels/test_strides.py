"""How kernels read tensors whose tokens are not contiguous."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seqarch.kernels.launch import common_factor, token_rows

WIDE = torch.arange(2 * 3 * 4 * 8.0).view(2, 3, 4, 8)


@pytest.mark.parametrize("t", [WIDE, WIDE[:, :, 1:3], WIDE.flatten(2)[..., 8:20], WIDE[:1, 1:]], ids=str)
def test_tokens_one_stride_apart_stay(t: Tensor) -> None:
    assert token_rows(t) is t


@pytest.mark.parametrize(
    "t",
    [
        WIDE.transpose(2, 3),
        WIDE[..., ::2],
        WIDE[:, 1:],
        WIDE.expand(2, 3, 4, 8)[:, :, :1].expand(2, 3, 4, 8),
        torch.randn(1, 3, 8).transpose(0, 1),
    ],
    ids=["heads last", "every other channel", "rows apart", "expanded", "one token a row"],
)
def test_others_are_copied(t: Tensor) -> None:
    rows = token_rows(t)
    assert torch.equal(rows, t)
    assert rows.is_contiguous()
    assert rows.stride(0) == rows.shape[1] * rows.stride(1)
    assert rows.stride(1) == t.shape[2:].numel()


@pytest.mark.parametrize(("strides", "factor"), [((32, 64), 16), ((24,), 8), ((48, 20), 4), ((6, 16), 2), ((7,), 1)])
def test_common_factor(strides: tuple[int, ...], factor: int) -> None:
    assert common_factor(*strides) == factor
