"""Mamba-2 (arXiv 2405.21060), with the ablations of arXiv 2505.18522, section 3.1.1, as options.

Formulas and initial values follow the authors' code, github.com/state-spaces/mamba, mamba_ssm/modules/mamba2.py and
mamba_ssm/models/mixer_seq_simple.py.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count, divide
from seqarch.kernels import gated_rms_norm, ssd
from seqarch.kernels.gated_norm.op import skip_and_gate
from seqarch.kernels.tensors import at_least_float32
from seqarch.mixers.base import Scale, is_fused, undecayed
from seqarch.mixers.mamba1 import Decay
from seqarch.mixers.recurrent import Composes, Projected, RecurrentMixer, RecurrentState, init_step_bias
from seqarch.mixers.short_convolution import Kernel, optional_convolution, other_backend

NORM_EPS = 1e-5
A_RANGE = (1.0, 16.0)


class Mamba2(RecurrentMixer):
    """Mamba-2: a linear recurrence with one data-dependent decay per head, a short convolution before and a gate after.

    Args:
        d_state: size N of the state of a channel.
        expand: inner width in multiples of `d_model`.
        head_dim: channels P of a head; a divisor of the inner width.
        n_groups: groups of heads that share B and C, each with a norm of its own; a divisor of the number of heads.
        conv_size: tokens that the convolution of x, B and C sees; 4 unless given, and only with `conv`.
        decay: "full": each head decays by its own step; "one": one data-dependent decay for all heads, while the input
            keeps the steps of the heads; "none": no decay.
        conv: whether there is a convolution; the activation behind it stays.
        norm: whether the gated output is normalised (RMSNorm); the gate stays.
        backend: "auto", "reference", "triton", "fla" or "mamba_ssm", see `seqarch.kernels.ssd`; with "reference"
            the convolution and the norm are in PyTorch too.
    """

    family: ClassVar[str] = "mamba"
    in_every_layer: ClassVar[bool] = True
    composes: ClassVar[Composes] = "decays"
    renamed: ClassVar[Mapping[str, str]] = {"d_conv": "conv_size"}
    scales: ClassVar[Mapping[str, Scale]] = {"d_state": "head", "head_dim": "head"}
    source: ClassVar[str] = "arXiv 2405.21060"
    ops: ClassVar[tuple[str, ...]] = ("ssd", "gated_rms_norm", "short_convolution")

    def __init__(
        self,
        d_model: int,
        layer_idx: int,
        n_layers: int,
        *,
        d_state: Count = 128,
        expand: Count = 2,
        head_dim: Count = 64,
        n_groups: Count = 1,
        conv_size: Kernel | None = None,
        decay: Decay = "full",
        conv: bool = True,
        norm: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers, backend)
        self.d_inner = expand * d_model
        self.d_state = d_state
        self.head_dim = head_dim
        self.n_heads = divide(**{"expand * d_model": self.d_inner, "head_dim": head_dim})
        divide(**{"expand * d_model / head_dim": self.n_heads, "n_groups": n_groups})
        self.n_groups = n_groups
        self.state_shape = (self.n_heads, d_state, head_dim)
        self.decay = decay
        # with one decay for all heads it has a step of its own, the last
        n_steps = self.n_heads + (decay == "one")
        self.widths = [self.d_inner, self.d_inner + 2 * n_groups * d_state, n_steps]
        self.in_proj = nn.Linear(d_model, sum(self.widths), bias=False)
        states = n_groups * d_state
        is_fused(self.in_proj, self.d_inner, self.d_inner, states, states, n_steps)
        self.convolution = optional_convolution(self.widths[1], conv_size, conv, bias=True, backend=backend)
        self.canon_channels = None if conv else self.widths[1]
        self.dt_bias = undecayed(n_steps)
        self.A_log = None if decay == "none" else undecayed(self.n_heads if decay == "full" else 1)
        self.D = undecayed(self.n_heads)
        self.norm_weight = nn.Parameter(torch.empty(self.d_inner)) if norm else None
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: steps log-uniform in 0.001..0.1, A uniform in -16..-1."""
        self.in_proj.reset_parameters()
        if self.convolution is not None:
            self.convolution.reset_parameters()
        init_step_bias(self.dt_bias)
        if self.A_log is not None:
            self.A_log.uniform_(*A_RANGE).log_()
        self.D.fill_(1)
        if self.norm_weight is not None:
            self.norm_weight.fill_(1)
        self.out_proj.reset_parameters()
        self.out_proj.weight /= math.sqrt(self.n_layers)

    def project(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Projected:
        """Inputs `[B, T, H, P]`; B and C `[B, T, G, N]` and steps `[B, T, n_steps]`; inputs and gate for the norm."""
        z, mixed, dt = self.in_proj(x).split(self.widths, dim=-1)
        mixed = self.convolved(mixed, state, cu_seqlens)
        shared = self.n_groups * self.d_state
        inputs, B, C = mixed.split([self.d_inner, shared, shared], dim=-1)
        groups = (self.n_groups, self.d_state)
        steps = F.softplus(at_least_float32(dt) + at_least_float32(self.dt_bias))
        inputs = inputs.unflatten(-1, (-1, self.head_dim))
        return Projected(inputs, (B.unflatten(-1, groups), C.unflatten(-1, groups), steps), (inputs, z, x.dtype))

    def recur(self, values, B, C, steps, **options):
        options["backend"] = self.backend
        A = None if self.A_log is None else -at_least_float32(self.A_log).exp()
        if self.decay == "one" and A is not None:
            steps, own = steps.split([self.n_heads, 1], dim=-1)
            return ssd(values, steps, None, B, C, log_decay=own * A, **options)
        return ssd(values, steps, A, B, C, **options)

    def decays(self, B: Tensor, C: Tensor, steps: Tensor) -> Tensor:
        if self.A_log is None:
            return steps.new_ones(steps.shape[0], 1, 1, 1)
        total = steps.sum(1) if self.decay == "full" else steps[..., -1:].sum(1)
        return (-at_least_float32(self.A_log).exp() * total).exp()[..., None, None]

    def reads(self, before: Tensor, B: Tensor, C: Tensor, steps: Tensor) -> Tensor:
        state = before.unflatten(1, (self.n_groups, -1)).to(C.dtype)
        found = torch.einsum("btgn,bgrnp->btgrp", C, state).flatten(2, 3)
        if self.A_log is None:
            return found
        own = steps if self.decay == "full" else steps[..., -1:]
        # over rows of tokens: along columns, PyTorch's sum on a GPU goes token by token
        passed = own.mT.contiguous().cumsum(-1).mT
        return found * (-at_least_float32(self.A_log).exp() * passed).exp()[..., None]

    def finish(self, o: Tensor, inputs: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
        if self.norm_weight is None:
            return self.out_proj(skip_and_gate(o, inputs, self.D, z).to(dtype))
        options: dict[str, Any] = {"eps": NORM_EPS, "n_groups": self.n_groups, "backend": other_backend(self.backend)}
        return self.out_proj(gated_rms_norm(o, inputs, self.D, z, self.norm_weight, **options))
