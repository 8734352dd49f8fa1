"""Gated Associative Memory (arXiv 2509.00605): a short convolution and a bank of learned memories, both gated.

Formulas and initial values follow the author's code, github.com/rishiraj/gam, gam_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.kernels.tensors import check_sequences
from seqarch.mixers import Mixer
from seqarch.mixers.base import is_fused
from seqarch.mixers.short_convolution import Kernel, ShortConvolution, ShortConvolutionState


class GatedAssociative(Mixer):
    """A gated sum of a causal depthwise convolution and a softmax over a bank of learned vectors.

    Args:
        n_slots: vectors in the memory bank, M.
        conv_size: tokens that the convolution sees, the current one included.
    """

    source: ClassVar[str] = "arXiv 2509.00605"
    capabilities: frozenset[str] = frozenset({"decode", "packed"})
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "PyTorch, own Triton"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {512: {"n_slots": 512}}

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, n_slots: Count = 512, conv_size: Kernel = 3
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.convolution = ShortConvolution(d_model, conv_size, bias=True, activation=None)
        self.memory = nn.Parameter(torch.empty(n_slots, d_model))
        self.gate = nn.Linear(d_model, 2 * d_model)
        is_fused(self.gate, d_model, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights as the author does."""
        self.convolution.reset_parameters()
        nn.init.xavier_uniform_(self.memory)
        self.gate.reset_parameters()

    def forward(
        self, x: Tensor, *, state: ShortConvolutionState | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        check_sequences({"x [B, T, C]": x}, None)
        local = self.convolution(x, state=state, cu_seqlens=cu_seqlens)
        found = torch.softmax(x @ self.memory.mT, dim=-1).to(x.dtype) @ self.memory
        local_gate, found_gate = self.gate(x).sigmoid().chunk(2, dim=-1)
        return local_gate * local + found_gate * found

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> ShortConvolutionState:
        """The last inputs of the convolution; see `Mixer.init_state`."""
        return self.convolution.init_state(batch_size, device, dtype)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """The gates, two products with the memory, and the convolution; see `Mixer.flops_per_token`."""
        products = 2.0 * (self.gate.weight.numel() + 2 * self.memory.numel())
        return (products + self.convolution.flops_per_token()) * (3 if training else 1)
