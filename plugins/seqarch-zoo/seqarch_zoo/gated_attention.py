"""Gated attention (arXiv 2505.06708): a shell around any attention core that gates the outputs of its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqarch.mixers.attention import CoreAttention
from seqarch.mixers.base import Scale, init_linear
from seqarch.mixers.cores import AttentionCore, SoftmaxCore
from seqarch.mixers.options import with_options_of


class GatedAttention(CoreAttention):
    """Attention with gated outputs: a sigmoid of the input multiplies them, element by element, before the projection.

    Args:
        n_heads: query heads H.
        core: the attention core inside; `SoftmaxCore` unless given.
        **options: as in `CoreAttention`.
    """

    source: ClassVar[str] = "arXiv 2505.06708"
    scales: ClassVar[Mapping[str, Scale]] = {
        **CoreAttention.scales,
        "core.chunk_size": "length",
        "core.window": "length",
    }
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "its core's"}

    @with_options_of(CoreAttention)
    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: int,
        core: AttentionCore | None = None,
        **options: Any,
    ) -> None:
        core = SoftmaxCore() if core is None else core
        super().__init__(d_model, layer_idx, n_layers, core=core, n_heads=n_heads, **options)
        self.gate = nn.Linear(d_model, self.n_heads * self.head_dim, bias=False)
        init_linear(self.gate)

    def reset_parameters(self) -> None:
        """Draw the initial weights as in GPT-2, also the gate's weights."""
        super().reset_parameters()
        if hasattr(self, "gate"):  # the parent's constructor calls this before there is a gate
            init_linear(self.gate)

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, state=state, cu_seqlens=cu_seqlens)
        o = self.attend(q, k, v, state=state, cu_seqlens=cu_seqlens)
        return self.out(o.flatten(2) * torch.sigmoid(self.gate(x)))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the attention and of the gate; see `Mixer.flops_per_token`."""
        return super().flops_per_token(seq_len, training=training) + 2.0 * self.gate.weight.numel() * (1 + 2 * training)
