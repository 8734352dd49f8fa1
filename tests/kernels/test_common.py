"""What all ops share."""

from __future__ import annotations

import torch

from seqarch.kernels.common import document_positions


def test_positions_restart_at_borders_and_continue_from_a_state() -> None:
    x = torch.empty(1, 6, 1)
    assert document_positions(x).tolist() == [0, 1, 2, 3, 4, 5]
    assert document_positions(x, start=4).tolist() == [4, 5, 6, 7, 8, 9]
    borders = torch.tensor([0, 2, 2, 3, 6], dtype=torch.int32)
    assert document_positions(x, cu_seqlens=borders).tolist() == [0, 1, 0, 0, 1, 2]
