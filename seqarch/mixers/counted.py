"""Operations of a mixer without a formula, counted by torch on tensors without values."""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

LONGEST = 512
"""Longest sequence that is counted; the count of longer ones lies on the line through two counts."""


def counted_flops(mixer: nn.Module, seq_len: int) -> float:
    """Forward operations per token of `mixer(x [1, seq_len, d_model])`, averaged over the sequence.

    `FlopCounterMode` counts products of matrices, convolutions and attention, and nothing elementwise. Beyond `LONGEST`
    tokens the count per token grows along a line, as in attention and recurrences. If a mixer cannot run without
    values, each element of a matrix counts as one multiply-add per token.
    """
    try:
        if seq_len <= LONGEST:
            return _count(mixer, seq_len)
        half, full = _count(mixer, LONGEST // 2), _count(mixer, LONGEST)
        return full + (full - half) * (seq_len - LONGEST) / (LONGEST - LONGEST // 2)
    except Exception:  # whatever a mixer of another package raises where tensors have no values
        return 2.0 * sum(parameter.numel() for parameter in mixer.parameters() if parameter.dim() > 1)


@torch.no_grad()
def _count(mixer: Any, length: int) -> float:
    products = sdpa_kernel(SDPBackend.MATH)  # the counter has no formula for the CPU's fused attention
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(), counter, products:
        tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype)
            for name, tensor in (*mixer.named_parameters(), *mixer.named_buffers())
        }
        dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
        torch.func.functional_call(mixer, tensors, (torch.empty(1, length, mixer.d_model, dtype=dtype),))
    return counter.get_total_flops() / length
