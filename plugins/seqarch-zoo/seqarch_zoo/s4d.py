"""S4D (arXiv 2206.11893) and DLR (arXiv 2212.00768): linear recurrences with a diagonal complex state.

Formulas and initial values follow the authors' code: github.com/state-spaces/s4, models/s4/s4d.py, and
github.com/ag1988/dlr, DLRKernel.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.arguments import Count
from seqarch.kernels.packed import each_document
from seqarch.kernels.tensors import at_least_float32, check_sequences
from seqarch.mixers import Mixer
from seqarch.mixers.base import is_fused, linear_flops, undecayed
from seqarch.mixers.recurrent import RecurrentState, empty_state


class DiagonalMixer(Mixer):
    """A long convolution by FFT for whole sequences, and a recurrence that continues from a state.

        h_t = l h_{t-1} + x_t,   y_t = Re(sum_n c_n h_tn) + D x_t

    For each channel, with decays l and coefficients c that a subclass defines (`spectrum`); they do not depend on the
    text. GELU and a linear layer with a gate (GLU) follow. A subclass calls `reset_parameters` last.

    Args:
        d_state: complex numbers N in the state of a channel.
    """

    family: ClassVar[str] = "s4"
    capabilities: frozenset[str] = frozenset({"decode", "packed"})
    kernels: ClassVar[Mapping[str, str]] = {"cpu": "PyTorch (FFT)", "cuda": "PyTorch (FFT)"}

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, d_state: Count) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.d_state = d_state
        self.D = nn.Parameter(torch.empty(d_model))
        self.out = nn.Linear(d_model, 2 * d_model)
        is_fused(self.out, d_model, d_model)

    @abstractmethod
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Logarithms of the decays `[d_model or 1, N]` and coefficients `[d_model, N]`, complex."""

    def forward(self, x: Tensor, *, state: RecurrentState | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_sequences({"x [B, T, C]": x}, cu_seqlens)
        with torch.autocast(x.device.type, enabled=False):
            wide = at_least_float32(x)
            y, after = each_document(self._convolve, (wide,), state and state.state, cu_seqlens)
            if state is not None:
                state.state = self._carry(wide, after)
            y = F.gelu(y + at_least_float32(self.D) * wide)
        return F.glu(self.out(y.to(x.dtype)), dim=-1)

    def _convolve(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """The convolution of `x [B, T, d_model]` and the tokens before it, and the unchanged state."""
        if not x.shape[0]:  # an FFT of no rows is refused on a CPU
            return x, x.new_zeros(0, 1)
        length = x.shape[1]
        log_decays, coefficients = self.spectrum()
        powers = (log_decays[..., None] * torch.arange(length, device=x.device)).exp()
        kernel = _over_states(coefficients, powers).real
        # Padded to twice the length, so that the end does not wrap round to the beginning. Along another dimension than
        # the last, an FFT would first copy its input.
        signal, kernel = (torch.fft.rfft(F.pad(t, (0, length))) for t in (x.mT, kernel))
        y = torch.fft.irfft(signal * kernel, n=2 * length)[..., :length].mT
        if before is None:
            return y, x.new_zeros(x.shape[0], 1)
        state = torch.view_as_complex(before.to(x.dtype).contiguous())
        return y + _over_states(coefficients * log_decays.exp() * state, powers).real.mT, before

    def _carry(self, x: Tensor, before: Tensor) -> Tensor:
        """The state `[B, d_model, N, 2]` after `x`."""
        log_decays, _ = self.spectrum()
        length = x.shape[1]
        powers = (log_decays[..., None] * torch.arange(length - 1, -1, -1, device=x.device)).exp()
        earlier = torch.view_as_complex(before.to(x.dtype).contiguous())
        return torch.view_as_real((log_decays * length).exp() * earlier + _over_time(x.mT.to(powers.dtype), powers))

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> RecurrentState:
        """Zeros, with real and imaginary parts in the last dimension; see `Mixer.init_state`."""
        return RecurrentState(empty_state(batch_size, (self.d_model, self.d_state, 2), device, dtype))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations of the kernel, three FFTs of twice the length, their product and the projection.

        The kernel counts once per sequence, as for a batch of one.
        """
        transforms = 3 * 5 * math.log2(2 * seq_len) + 12
        return (linear_flops(self.out) + self.d_model * (8.0 * self.d_state + transforms)) * (3 if training else 1)


class S4D(DiagonalMixer):
    """S4D-Lin: a continuous system for each channel, sampled in steps of learned size (zero-order hold).

    Args:
        d_state: complex numbers N in the state of a channel, half of the paper's number, as conjugates are left out.
    """

    source: ClassVar[str] = "arXiv 2206.11893"

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, d_state: Count = 32) -> None:
        super().__init__(d_model, layer_idx, n_layers, d_state=d_state)
        self.log_step = undecayed(d_model)
        self.log_A_real, self.A_imag = undecayed(d_model, d_state), undecayed(d_model, d_state)
        self.C = undecayed(d_model, d_state, 2)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: A_n = -1/2 + i pi n, steps log-uniform in 0.001..0.1."""
        self.D.normal_()
        self.out.reset_parameters()
        self.log_step.uniform_(math.log(0.001), math.log(0.1))
        self.log_A_real.fill_(math.log(0.5))
        self.A_imag.copy_(math.pi * torch.arange(self.d_state, device=self.A_imag.device).expand_as(self.A_imag))
        self.C.normal_(std=0.5**0.5)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        A = torch.complex(-at_least_float32(self.log_A_real).exp(), at_least_float32(self.A_imag))
        log_decays = A * at_least_float32(self.log_step).exp()[:, None]
        C = torch.view_as_complex(at_least_float32(self.C).contiguous())
        return log_decays, 2 * C * (log_decays.exp() - 1) / A


class DLR(DiagonalMixer):
    """A diagonal linear RNN. Its decays are parameters that all channels share; there are no steps.

    Args:
        d_state: complex numbers N in the state of a channel; the authors take 4,096.
    """

    source: ClassVar[str] = "arXiv 2212.00768"

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, d_state: Count = 256) -> None:
        super().__init__(d_model, layer_idx, n_layers, d_state=d_state)
        self.roots, self.angles = undecayed(d_state), undecayed(d_state)
        self.W = undecayed(d_model, d_state, 2)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the initial weights as the authors do: angles over the circle, half-lives log-uniform."""
        self.D.normal_()
        self.out.reset_parameters()
        self.roots.uniform_(math.log(0.0001), math.log(0.1)).exp_().mul_(0.5).sqrt_()
        self.angles.copy_(2 * math.pi * torch.arange(self.d_state, device=self.angles.device) / self.d_state)
        self.W.normal_(std=1 / self.d_state)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        log_decays = torch.complex(-at_least_float32(self.roots).square(), at_least_float32(self.angles))
        return log_decays[None], torch.view_as_complex(at_least_float32(self.W).contiguous())


def _over_states(weights: Tensor, powers: Tensor) -> Tensor:
    """`sum_n weights[..., d, n] powers[d or 1, n, t]`, `[..., d, t]`."""
    if powers.shape[0] == 1:
        return weights @ powers[0]
    return (weights[..., None, :] @ powers).squeeze(-2)


def _over_time(x: Tensor, powers: Tensor) -> Tensor:
    """`sum_t x[b, d, t] powers[d or 1, n, t]`, `[b, d, n]`."""
    if powers.shape[0] == 1:
        return x @ powers[0].mT
    return (powers @ x[..., None]).squeeze(-1)
