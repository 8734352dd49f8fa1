"""The mixer of docs/plugins.md whose tests fail by two common mistakes: minGRU in logarithms."""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers import Mixer, MixerState


@dataclasses.dataclass
class LogState(MixerState):
    """The logarithm of h, `[B, d_model]`."""

    log_h: Tensor
    static: ClassVar[bool] = True


class MinGRU(Mixer):
    """minGRU, a gated mean whose gates do not depend on its state.

    h_t = (1 - z_t) h_(t-1) + z_t v_t, with z_t = sigmoid(W_z x_t), v_t = g(W_v x_t), and g(a) = a + 0.5 if a > 0, else
    sigmoid(a).
    """

    source = "arXiv 2410.01201"
    capabilities = frozenset({"decode", "packed"})

    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.gate, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x: Tensor, *, state: LogState | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        gate, value = at_least_float32(self.gate(x)), at_least_float32(self.value(x))
        log_value = torch.where(value > 0, (value.relu() + 0.5).log(), F.logsigmoid(value))
        before = None if state is None else state.log_h
        terms = F.logsigmoid(-gate), F.logsigmoid(gate) + log_value
        log_h, after = each_document(scan, terms, before, cu_seqlens)
        if state is not None:
            state.log_h = after
        return self.out(log_h.exp().to(x.dtype))

    def init_state(self, batch_size, max_length, device, dtype) -> LogState:
        dtype = torch.promote_types(dtype, torch.float32)
        return LogState(torch.full((batch_size, self.d_model), -torch.inf, dtype=dtype, device=device))


def scan(log_decay: Tensor, log_new: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """log h `[B, T, D]` of the recurrence, and the last one."""
    decay = log_decay.cumsum(dim=1)
    log_h = decay + (log_new - decay).logcumsumexp(dim=1)
    if before is not None:
        log_h = torch.logaddexp(log_h, decay + before[:, None])
    return log_h, log_h[:, -1].clone()
