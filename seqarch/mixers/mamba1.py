"""Mamba-1 (arXiv 2312.00752), with the ablations of arXiv 2505.18522, section 3.1.1, as options.

Formulas and initial values follow the authors' code, github.com/state-spaces/mamba, mamba_ssm/modules/mamba_simple.py
and mamba_ssm/models/mixer_seq_simple.py.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.kernels import selective_scan
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers.base import Scale, is_fused, undecayed
from seqarch.mixers.few_inputs import has_few_inputs
from seqarch.mixers.implied import implied_entropy
from seqarch.mixers.recurrent import Composes, Projected, RecurrentMixer, RecurrentState, init_step_bias
from seqarch.mixers.short_convolution import Kernel, optional_convolution

Decay = Literal["full", "one", "none"]
"""The part that decays the state; Mamba-2 has the same choices."""

PROBED_CHANNELS = 64
"""Channels, evenly spaced, whose implied weights `attention_entropy` reports; each counts as a head."""


class Mamba1(RecurrentMixer):
    """Mamba-1: a selective scan of each channel, with a short convolution before and a gate after.

    Args:
        d_state: size N of the state of a channel.
        expand: inner width in multiples of `d_model`.
        conv_size: tokens that the convolution sees; 4 unless given, and only with `conv`.
        dt_rank: rank of the projection to the step sizes; "auto" is `d_model / 16`, rounded up.
        decay: "full": each channel and state decays by its own step and rate; "one": one data-dependent decay for the
            whole layer, while the input keeps the steps of the channels; "none": no decay.
        conv: whether there is a convolution; the activation behind it stays.
        backend: "auto", "reference", "triton" or "mamba_ssm", see `seqarch.kernels.selective_scan`; with "reference"
            the convolution is in PyTorch too.
    """

    family: ClassVar[str] = "mamba"
    in_every_layer: ClassVar[bool] = True
    composes: ClassVar[Composes] = "decays"
    renamed: ClassVar[Mapping[str, str]] = {"d_conv": "conv_size"}
    scales: ClassVar[Mapping[str, Scale]] = {"d_state": "head"}
    source: ClassVar[str] = "arXiv 2312.00752"
    ops: ClassVar[tuple[str, ...]] = ("selective_scan", "short_convolution")

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        d_state: Count = 16,
        expand: Count = 2,
        conv_size: Kernel | None = None,
        dt_rank: Count | Literal["auto"] = "auto",
        decay: Decay = "full",
        conv: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        self.d_inner = expand * d_model
        self.state_shape = (self.d_inner, d_state)
        self.decay = decay
        self.widths = [rank, d_state, d_state]
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        is_fused(self.in_proj, self.d_inner, self.d_inner)
        self.convolution = optional_convolution(self.d_inner, conv_size, conv, bias=True, backend=backend)
        self.x_proj = nn.Linear(self.d_inner, sum(self.widths), bias=False)
        is_fused(self.x_proj, *self.widths)
        # with one decay for the whole layer it has a step of its own, the last
        n_steps = self.d_inner + (decay == "one")
        self.dt_proj = nn.Linear(rank, n_steps, bias=False)
        if dt_rank != "auto":
            has_few_inputs(self.dt_proj)
        self.dt_bias = undecayed(n_steps)
        self.A_log = None if decay == "none" else undecayed(*((self.d_inner, d_state) if decay == "full" else (1,)))
        self.D = undecayed(self.d_inner)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: steps log-uniform in 0.001..0.1, A = -1..-N in each channel."""
        self.in_proj.reset_parameters()
        if self.convolution is not None:
            self.convolution.reset_parameters()
        self.x_proj.reset_parameters()
        bound = self.dt_proj.in_features**-0.5
        nn.init.uniform_(self.dt_proj.weight, -bound, bound)
        init_step_bias(self.dt_bias)
        if self.A_log is not None:
            rates = torch.arange(1, self.A_log.shape[-1] + 1, dtype=torch.float32, device=self.A_log.device)
            self.A_log.copy_(rates.log().expand_as(self.A_log))
        self.D.fill_(1)
        self.out_proj.reset_parameters()
        self.out_proj.weight /= math.sqrt(self.n_layers)

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        inputs, z = self.in_proj(x).chunk(2, dim=-1)
        inputs = self.convolved(inputs, state, cu_seqlens)
        return Projected(inputs, (*self._select(inputs), self.D), (z,))

    def recur(self, values, dt, decay, B, C, D, **options):
        return selective_scan(values, dt, B=B, C=C, D=D, **decay, **options, backend=self.backend)

    def decays(self, dt: Tensor, decay: dict[str, Any], *others: Any) -> Tensor:
        if (A := decay["A"]) is not None:
            return (at_least_float32(dt).sum(1)[..., None] * A).exp()
        total = decay["log_decay"].sum(1) if "log_decay" in decay else dt.new_zeros(dt.shape[0])
        return at_least_float32(total)[:, None, None].exp()

    def finish(self, o: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(o * F.silu(z))

    def _select(self, inputs: Tensor) -> tuple[Tensor, dict[str, Any], Tensor, Tensor]:
        """Steps `[B, T, d_inner]`, the scan's arguments for decays, B and C `[B, T, N]`, from the scan's inputs."""
        low_rank, B, C = self.x_proj(inputs).split(self.widths, dim=-1)
        # the bias and what follows in float32: in half precision steps next to each other would be equal
        dt = F.softplus(at_least_float32(self.dt_proj(low_rank)) + at_least_float32(self.dt_bias))
        A = None if self.A_log is None else -at_least_float32(self.A_log).exp()
        if self.decay == "one" and A is not None:
            dt, own = dt.split([self.d_inner, 1], dim=-1)
            return dt, {"A": None, "log_decay": (own * A).squeeze(-1)}, B, C
        return dt, {"A": A}, B, C

    @torch.no_grad()
    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Entropy `[B, T, H]` in nats of the implied weights on inputs of H channels, the skip connection left out."""
        inputs, (dt, decay, B, C, _), _ = self.project(x, None, cu_seqlens)
        count = min(PROBED_CHANNELS, self.d_inner)
        channels = torch.arange(count, device=x.device) * self.d_inner // count
        dt, A = dt[..., channels], decay["A"]

        def respond(values: Tensor) -> Tensor:
            columns = values.shape[-1]
            each = {**decay, "A": None if A is None else A[channels].repeat_interleave(columns, 0)}
            steps = dt.repeat_interleave(columns, -1)
            y, _ = self.recur(values.flatten(2), steps, each, B, C, None, cu_seqlens=cu_seqlens)
            return y.view_as(values)

        return implied_entropy(respond, inputs[..., channels, None])
