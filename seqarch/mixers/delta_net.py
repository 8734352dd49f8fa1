"""DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464): linear attention whose writes correct the state.

Layers and initial values follow the authors' code in flash-linear-attention: fla/layers/delta_net.py,
fla/layers/gated_deltanet.py and `_init_weights` of their models.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, Positive
from seqarch.errors import UserError
from seqarch.kernels import delta_rule
from seqarch.kernels.tensors import at_least_float32, softplus
from seqarch.mixers.base import Scale, init_linear, is_fused, size_heads, undecayed
from seqarch.mixers.options import with_options_of
from seqarch.mixers.recurrent import Composes, Projected, RecurrentMixer, RecurrentState, init_step_bias
from seqarch.mixers.short_convolution import Kernel, optional_convolution


class DeltaNet(RecurrentMixer):
    """Linear attention with the delta rule: each token replaces what the state holds under its key.

    Args:
        n_heads: heads H.
        head_dim: K, the size of each head's queries and keys; `d_model / n_heads` unless given.
        expand_v: size of each head's values, as a multiple of `head_dim`.
        gate: whether a projection of the input gates the outputs (SiLU).
        conv: whether queries, keys and values go through a short convolution.
        conv_size: tokens that the convolution sees, its own included; 4 unless given, and only with `conv`.
        neg_eigval: whether beta reaches 2 instead of 1, so that the state can change sign along a key
            (arXiv 2411.12537).
        norm_eps: epsilon of the outputs' RMSNorm; outputs are small at the start, so it matters.
        backend: "auto", "reference" or "fla", see `seqarch.kernels.delta_rule`; with "reference"
            the convolution is in PyTorch too.
    """

    products: ClassVar[int] = 3  # read at k, write, read at q
    family: ClassVar[str] = "delta"
    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "state", "head_dim": "head"}
    ops: ClassVar[tuple[str, ...]] = ("delta_rule", "qkv_convolution")
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 8}}
    source: ClassVar[str] = "arXiv 2406.06484"
    composes: ClassVar[Composes] = "matrix"
    decays: ClassVar[bool] = False
    """Whether the state decays."""

    key_share: ClassVar[float] = 1.0
    """Width of all keys together over `d_model`, unless `head_dim` is given."""

    rates: ClassVar[tuple[float, float]] = (0.0, 16.0)
    """The interval from which rates of decay are drawn."""

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        n_heads: Count,
        head_dim: Count | None = None,
        expand_v: float = 1.0,
        gate: bool = False,
        conv: bool = True,
        conv_size: Kernel | None = None,
        neg_eigval: bool = False,
        norm_eps: Positive = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        share = "" if self.key_share == 1 else f"{self.key_share:g} * "
        key_dim = size_heads(self.key_share * d_model, n_heads, head_dim, called=f"{share}d_model")
        value_dim = value_dim_of(key_dim, expand_v)
        self.n_heads, self.key_dim, self.value_dim = n_heads, key_dim, value_dim
        self.state_shape = (n_heads, key_dim, value_dim)
        self.neg_eigval = neg_eigval
        keys, values = n_heads * key_dim, n_heads * value_dim
        self.qkv = nn.Linear(d_model, 2 * keys + values, bias=False)
        is_fused(self.qkv, keys, keys, values)
        self.convolution = optional_convolution(2 * keys + values, conv_size, conv, backend=backend)
        self.canon_channels = None if conv else 2 * keys + values
        self.add_gates(keys, values, gate)
        self.norm = nn.RMSNorm(value_dim, eps=norm_eps)
        self.out = nn.Linear(values, d_model, bias=False)
        self.reset_parameters()

    def add_gates(self, keys: int, values: int, gate: bool) -> None:
        """Add what decides how the state changes, and the gate on the outputs, for these widths of keys and values."""
        self.beta = nn.Linear(self.d_model, self.n_heads, bias=False)
        self.step_size = nn.Linear(self.d_model, self.n_heads, bias=False) if self.decays else None
        self.A_log = undecayed(self.n_heads) if self.decays else None
        self.dt_bias = undecayed(self.n_heads) if self.decays else None
        self.gate = nn.Linear(self.d_model, values, bias=False) if gate else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices and convolutions normal with standard deviation 0.02; decay rates uniform in `rates`."""
        for layer in self.children():
            if isinstance(layer, nn.Linear):
                init_linear(layer)
        if self.convolution is not None:
            nn.init.normal_(self.convolution.weight, std=0.02)
        if self.A_log is not None and self.dt_bias is not None:
            self.A_log.uniform_(*self.rates).log_()
            init_step_bias(self.dt_bias)
        self.norm.reset_parameters()

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        q, k, v = self.convolved_heads(self.qkv(x), self.n_heads, self.key_dim, state, cu_seqlens)
        steps = self._steps(x)
        return Projected(v, (q, k, *steps), (None if self.gate is None else self.gate(x),))

    def _steps(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The step of the state and, if it decays, the logarithm of its decay, `[B, T, H]` each."""
        beta = at_least_float32(self.beta(x)).sigmoid()
        log_decay = None
        if self.step_size is not None and self.A_log is not None and self.dt_bias is not None:
            step = at_least_float32(self.step_size(x)) + self.dt_bias
            log_decay = -at_least_float32(self.A_log).exp() * softplus(step)
        return 2 * beta if self.neg_eigval else beta, log_decay

    def recur(self, values, q, k, beta, log_decay, **options):
        return delta_rule(q, k, values, beta, log_decay=log_decay, **options, backend=self.backend)

    def activation(self, gate: Tensor) -> Tensor:
        """The nonlinearity of the gate on the outputs."""
        return F.silu(gate)

    def finish(self, o: Tensor, gate: Tensor | None) -> Tensor:
        wide = at_least_float32(o)
        wide = F.rms_norm(wide, (self.value_dim,), self.norm.weight.to(wide.dtype), self.norm.eps)
        if gate is not None:
            wide = wide * self.activation(at_least_float32(gate)).view_as(wide)
        return self.out(wide.to(o.dtype).flatten(2))


class GatedDeltaNet(DeltaNet):
    """The delta rule with a data-dependent decay of the state, one scalar per head as in Mamba-2.

    Keys are `0.75 * d_model` wide unless `head_dim` is given. With the other defaults a layer has `6 * d_model ** 2`
    parameters, as the authors' has.

    Args:
        expand_v: size of each head's values, as a multiple of `head_dim`.
        gate: whether a projection of the input gates the outputs (SiLU).
        **options: as in `DeltaNet`.
    """

    scales: ClassVar[Mapping[str, Scale]] = {"n_heads": "heads", "head_dim": "head"}
    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {768: {"n_heads": 6}}
    source: ClassVar[str] = "arXiv 2412.06464"
    decays: ClassVar[bool] = True
    key_share: ClassVar[float] = 0.75

    @with_options_of(DeltaNet)
    def __init__(self, *place: int, expand_v: float = 2.0, gate: bool = True, **options: Any) -> None:
        super().__init__(*place, expand_v=expand_v, gate=gate, **options)


def value_dim_of(key_dim: int, expand_v: float) -> int:
    """Channels of a head's values; refuses what is not a whole number."""
    value_dim = round(key_dim * expand_v)
    if value_dim < 1 or not math.isclose(value_dim, key_dim * expand_v, rel_tol=1e-5):
        raise UserError(f"expand_v={expand_v:g} times head_dim={key_dim} must be a whole number of at least 1")
    return value_dim
