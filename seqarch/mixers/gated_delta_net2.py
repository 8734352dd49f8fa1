"""Gated DeltaNet-2 (arXiv 2605.22791): the delta rule with an erase gate, a write gate and a decay for each channel.

Layers and initial values follow flash-linear-attention, fla/layers/gdn2.py, which is adapted from the authors' code.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from seqarch.kernels import gated_delta_rule2
from seqarch.kernels.tensors import at_least_float32, softplus
from seqarch.mixers.base import Scale, undecayed
from seqarch.mixers.delta_net import DeltaNet
from seqarch.mixers.options import with_options_of
from seqarch.mixers.recurrent import Projected, RecurrentState


class GatedDeltaNet2(DeltaNet):
    """The delta rule with a decay, an erase gate and a write gate for each channel.

    The originals have heads of 128 channels. Matrices start as those of `GatedDeltaNet`: flash-linear-attention has
    this layer, but no model of it.

    Args:
        **options: as in `DeltaNet`; `neg_eigval` is of the erase gate, and `backend` of
            `seqarch.kernels.delta_rule`.
    """

    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "head_dim": "head"}
    ops: ClassVar[tuple[str, ...]] = ("gated_delta_rule2", "qkv_convolution")
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 6}, 2048: {"n_heads": 16}}
    source: ClassVar[str] = "arXiv 2605.22791"
    rates = (1.0, 16.0)

    @with_options_of(DeltaNet, without=("gate", "norm_eps"))
    def __init__(self, *place: int, **options: Any) -> None:
        super().__init__(*place, norm_eps=1e-5, **options)

    def reset_parameters(self) -> None:
        """As `DeltaNet`, with PyTorch's convolution: after a smaller one `norm_eps` would shrink the first outputs."""
        super().reset_parameters()
        if self.convolution is not None:
            self.convolution.reset_parameters()

    def add_gates(self, keys: int, values: int, gate: bool) -> None:
        width, rank = self.d_model, self.value_dim  # of both low-rank projections
        self.erase, self.write = nn.Linear(width, keys, bias=False), nn.Linear(width, values, bias=False)
        self.step_down, self.gate_down = (nn.Linear(width, rank, bias=False) for _ in range(2))
        self.step_up, self.gate_up = nn.Linear(rank, keys, bias=False), nn.Linear(rank, values)
        self.A_log, self.dt_bias = undecayed(self.n_heads), undecayed(keys)

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        q, k, v = self.convolved_heads(self.qkv(x), self.n_heads, self.key_dim, state, cu_seqlens)
        step = softplus(at_least_float32(self.step_up(self.step_down(x))) + self.dt_bias).view(k.shape)
        log_decay = -at_least_float32(self.A_log).exp()[:, None] * step
        erase = self.erase(x).sigmoid().view(k.shape) * (2 if self.neg_eigval else 1)
        gated = v * self.write(x).sigmoid().view(v.shape)
        return Projected(gated, (q, k, log_decay, erase), (self.gate_up(self.gate_down(x)),))

    def recur(self, values, q, k, log_decay, erase, **options):
        return gated_delta_rule2(q, k, values, log_decay, erase, **options, backend=self.backend)

    def activation(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()
