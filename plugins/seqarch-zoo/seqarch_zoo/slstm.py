"""sLSTM, the scalar memory of xLSTM (arXiv 2405.04517): exponential gates that see the last output.

Layer and initial values follow the authors' code, github.com/NX-AI/xlstm, xlstm/blocks/slstm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, divide
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import at_least_float32, check_sequences
from seqarch.mixers.base import Scale, undecayed
from seqarch.mixers.recurrent import Projected, RecurrentMixer, RecurrentState
from seqarch.mixers.short_convolution import Kernel, ShortConvolution

NORM_EPS = 1e-5
GATES = 4
"""The input gate, the forget gate, the input and the output gate, in this order."""


class SLSTM(RecurrentMixer):
    """The sLSTM layer: a cell per channel whose gates also see the last outputs of their head.

    A published block has a gated feed-forward layer with GELU of 4/3 `d_model` channels (`GeGLU`). The model xLSTM[7:1]
    has it in the blocks of this layer only, one of eight; the others are of `MLSTM`.

    Args:
        n_heads: heads H, a divisor of `d_model`.
        conv_size: tokens that the convolution before input gates and forget gates sees, the current one included.
    """

    family: ClassVar[str] = "xlstm"
    source: ClassVar[str] = "arXiv 2405.04517"
    capabilities: frozenset[str] = frozenset({"decode", "packed"})
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 4}}
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch", "cuda": "PyTorch"}

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, n_heads: Count = 4, conv_size: Kernel = 4
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.n_heads, self.head_dim = n_heads, divide(d_model=d_model, n_heads=n_heads)
        self.state_shape = ((n_heads, self.head_dim),) * 4
        self.convolution = ShortConvolution(d_model, conv_size, bias=True)
        self.gates = nn.Parameter(torch.empty(GATES, n_heads, self.head_dim, self.head_dim))
        self.recurrent = nn.Parameter(torch.empty(n_heads, self.head_dim, GATES * self.head_dim))
        self.bias = undecayed(n_heads, GATES, self.head_dim)
        self.norm_weight = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: no recurrence, forget gates from open to closed in each head."""
        if self.convolution is not None:
            self.convolution.reset_parameters()
        self.gates.normal_(std=math.sqrt(2 / (5 * self.d_model)))
        self.recurrent.zero_()
        self.bias.zero_()
        depth = self.layer_idx / max(1, self.n_layers - 1)
        self.bias[:, 1] = 5 - 12 * torch.linspace(0, 1, self.head_dim) ** (0.3 + 1.3 * depth)
        self.norm_weight.fill_(1)

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        convolved = self.convolved(x, state, cu_seqlens)
        inputs = torch.stack((convolved, convolved, x, x), dim=2).unflatten(-1, (self.n_heads, self.head_dim))
        # [B, T, H, 4 D], each gate of a head together
        gates = torch.einsum("btghi,ghoi->bthgo", inputs, self.gates.to(x.dtype)) + self.bias.to(x.dtype)
        return Projected(gates.flatten(3), (self.recurrent,))

    def recur(self, values, recurrent, *, initial_state=None, cu_seqlens=None):
        return slstm(values, recurrent, initial_state=initial_state, cu_seqlens=cu_seqlens)

    def finish(self, o: Tensor) -> Tensor:
        normed = F.layer_norm(at_least_float32(o), (self.head_dim,), eps=NORM_EPS).flatten(2)
        return (normed * self.norm_weight).to(o.dtype)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the gates' products with inputs and with the last outputs, and of the convolution."""
        assert self.convolution is not None
        products = 2.0 * (self.gates.numel() + self.recurrent.numel())
        return (products + self.convolution.flops_per_token()) * (3 if training else 1)


@torch.compiler.disable()  # a graph would contain every token separately
def slstm(
    gates: Tensor,
    recurrent: Tensor,
    *,
    initial_state: tuple[Tensor, ...] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The recurrence of sLSTM (arXiv 2405.04517, equations 8 to 17), one token after the other.

        i, f, z, o = gates_t + h_{t-1} R,   c_t = f' c_{t-1} + i' tanh(z),   n_t = f' n_{t-1} + i'
        h_t = sigmoid(o) c_t / n_t,   i' = exp(i - m_t),   f' = sigmoid(f) exp(m_{t-1} - m_t)

    with m_t the larger of both exponents. The outputs do not depend on m.

    Args:
        gates: what the input adds to i, f, z and o, `[B, T, H, 4 D]`.
        recurrent: R `[H, D, 4 D]`.
        initial_state: h, c, n and m, `[N, H, D]` each; n is zero before the first token.
        cu_seqlens: `[N + 1]` borders of documents packed into one row.

    Returns:
        h `[B, T, H, D]` in the dtype of `gates` and the final state.
    """
    check_sequences({"gates [B, T, H, 4 D]": gates}, cu_seqlens)
    with torch.autocast(gates.device.type, enabled=False):
        o, state = each_document(
            partial(_steps, recurrent=at_least_float32(recurrent)),
            (at_least_float32(gates),),
            initial_state,
            cu_seqlens,
        )
        return o.to(gates.dtype), state


def _steps(
    gates: Tensor, initial_state: tuple[Tensor, ...] | None, recurrent: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    zeros = gates.new_zeros(gates.shape[0], *gates.shape[2:3], recurrent.shape[1])
    h, c, n, m = (zeros,) * 4 if initial_state is None else (t.to(gates.dtype) for t in initial_state)
    m = m.masked_fill(n == 0, -math.inf)  # nothing is in the memory yet
    outputs = []
    for token in gates.unbind(1):
        into, forget, z, out = (token + torch.einsum("bhi,hio->bho", h, recurrent)).chunk(GATES, dim=-1)
        kept = F.logsigmoid(forget) + m
        m = torch.maximum(into, kept).detach()
        into, kept = (into - m).exp(), (kept - m).exp()
        c, n = kept * c + into * z.tanh(), kept * n + into
        h = out.sigmoid() * c / n
        outputs.append(h)
    return torch.stack(outputs, dim=1), (h, c, n, m)
