"""Gated linear attention (arXiv 2312.06635).

The layer and its initial values follow the authors' code in flash-linear-attention, fla/layers/gla.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import check_counts
from seqarch.kernels import gla
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers.base import Scale, divide_heads, init_linear
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState

NORMALIZER = 16
"""Divisor of the logarithms of the decays: channels remember longer."""


class GLA(RecurrentMixer):
    """Linear attention whose state each token decays by channel.

    Keys are `d_model / 2` wide, values `d_model`, as in the paper.

    Args:
        n_heads: heads H, a divisor of `d_model / 2`.
        gate_rank: rank of the projection to the decays.
        backend: "auto", "reference" or "fla", see `seqarch.kernels.gla`.
    """

    family: ClassVar[str] = "gla"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "gate_rank": "head"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 4}}
    source: ClassVar[str] = "arXiv 2312.06635"
    ops: ClassVar[tuple[str, ...]] = ("gla",)

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: int, gate_rank: int = 16, backend: str = "auto"
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        check_counts(gate_rank=gate_rank)
        self.n_heads, keys = n_heads, d_model // 2
        self.state_shape = (n_heads, divide_heads(keys, n_heads), divide_heads(d_model, n_heads))
        self.widths = [keys, keys, d_model, d_model]
        self.qkvg = nn.Linear(d_model, sum(self.widths), bias=False)
        self.decay = nn.Sequential(nn.Linear(d_model, gate_rank, bias=False), nn.Linear(gate_rank, keys))
        self.norm = nn.RMSNorm(self.state_shape[2], eps=1e-5)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """All matrices normal with standard deviation 0.02."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                init_linear(layer)
        self.norm.reset_parameters()

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        *projected, gate = self.qkvg(x).split(self.widths, dim=-1)
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)) for t in projected)
        log_decay = F.logsigmoid(at_least_float32(self.decay(x))).unflatten(-1, (self.n_heads, -1)) / NORMALIZER
        return Projected(v, (q, k, log_decay), (gate,))

    def recur(self, values, q, k, log_decay, **options):
        return gla(q, k, values, log_decay, **options)

    def finish(self, o: Tensor, gate: Tensor) -> Tensor:
        wide = at_least_float32(o)
        wide = F.rms_norm(wide, wide.shape[-1:], self.norm.weight.to(wide.dtype), self.norm.eps)
        return self.out(wide.to(o.dtype).flatten(2) * F.silu(gate))
