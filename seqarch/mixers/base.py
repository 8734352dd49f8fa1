"""The contract that every sequence mixer keeps; `seqarch.testing.MixerSuite` is its test."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.kernels.common import Backend

CAPABILITIES = ("decode", "packed", "entropy")


@dataclasses.dataclass
class MixerState:
    """What a mixer remembers between calls of `forward`: a key/value cache, a recurrent state.

    A subclass is a dataclass whose fields are tensors, other states or plain numbers. `forward` updates it in place:
    its fields are new after the call. Only the mixer that made a state looks inside it.
    """

    def tensors(self) -> list[Tensor]:
        """All tensors of the state, nested states included."""
        found: list[Tensor] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, MixerState):
                found.extend(value.tensors())
        return found


class Mixer(nn.Module):
    """Mixes information along the sequence: `[B, T, d_model]` to the same shape, causally.

    A mixer is built as `YourMixer(d_model, layer_idx, n_layers, **options)`; the model gives the first three, the
    recipe the options. All ways of running it agree, forward and gradients: the whole sequence at once, in pieces
    through a state, token by token, and packed documents through `cu_seqlens`.

    Args:
        d_model: width of the residual stream.
        layer_idx: index of the layer, from 0.
        n_layers: number of layers of the model, for initialisation that depends on depth.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Which of "decode" (`init_state`), "packed" (`cu_seqlens`) and "entropy" (`attention_entropy`) it can do."""

    value_residual: ClassVar[bool] = False
    """Whether layers mix their values with those of the first such layer (RWKV-7): `forward` then takes `v_first` and
    returns `(y, v_first)`."""

    implied: ClassVar[bool] = False
    """Whether `attention_entropy` is of implied weights (`seqarch.mixers.implied`) rather than of a softmax."""

    source: ClassVar[str] = ""
    """Where the mixer was published, for instance "arXiv 2405.21060"."""

    kernels: ClassVar[Mapping[str, str]] = {}
    """For each kind of device that it is made for ("cpu", "cuda"), what computes it there with default options, for
    instance `{"cpu": "PyTorch", "cuda": "own Triton"}`."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__()
        if not 0 <= layer_idx < n_layers:
            raise UserError(f"layer_idx must lie in 0..{n_layers - 1}, not {layer_idx}")
        self.d_model = d_model
        self.layer_idx = layer_idx
        self.n_layers = n_layers

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mix `x [B, T, d_model]`.

        Args:
            x: the normalised residual stream.
            state: made by `init_state`; the call continues from it and updates it.
            cu_seqlens: `[N + 1]` int32, borders of N documents packed into one row (B = 1); nothing crosses a border.
        """
        raise NotImplementedError

    def init_state(
        self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> MixerState:
        """The state before the first token, for `batch_size` sequences of at most `max_length` tokens."""
        raise UserError(f"{type(self).__name__} has no decoding state: it cannot generate text")

    def reset_parameters(self) -> None:
        """Draw the initial weights; the constructor calls it last."""
        raise NotImplementedError

    def begin_value_residual(self) -> None:
        """Be the first layer with a value residual; the model calls this once, for the layer that gets no `v_first`.

        What only later layers use is dropped here: distributed training refuses parameters without a gradient.
        """

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Floating-point operations a token, averaged over a sequence of `seq_len`; a multiply-add counts as two.

        Forward alone, or with `training` forward and backward, without what activation checkpointing repeats.
        """
        raise NotImplementedError

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of decoding state for one sequence after `seq_len` tokens with activations of `dtype`."""
        raise UserError(f"{type(self).__name__} has no decoding state")

    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """Entropy in nats of each head's attention, `[B, T, H]`, for the `x` that `forward` would take.

        Of the implied weights where `implied` is set. `None` for mixers without either.
        """
        return None

    def require(self, capability: str) -> None:
        """Raise `UserError` unless the mixer has the capability ("decode", "packed" or "entropy")."""
        if capability not in self.capabilities:
            what = {"decode": "a decoding state", "packed": "packed documents (cu_seqlens)", "entropy": "an entropy"}
            raise UserError(f"{type(self).__name__} does not support {what[capability]}")


def linear_flops(*layers: nn.Linear) -> float:
    """Forward operations a token of linear layers."""
    return float(sum(2 * layer.in_features * layer.out_features for layer in layers))


def init_linear(layer: nn.Linear, std: float = 0.02) -> None:
    """Normal weights and zero bias, as in GPT-2."""
    nn.init.normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def init_step_bias(bias: Tensor) -> None:
    """The bias whose softplus, a step of the recurrence, is log-uniform in 0.001..0.1 (Mamba, arXiv 2312.00752)."""
    with torch.no_grad():
        step = bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
        step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus


def beside(backend: str) -> Backend:
    """The backend of ops beside a mixer's recurrence: the reference if the mixer's is, otherwise their own choice."""
    return "reference" if backend == "reference" else "auto"


def leave_undecayed(*parameters: Tensor) -> None:
    """Mark matrices that weight decay leaves alone."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]


def undecayed(*shape: int) -> nn.Parameter:
    """A new parameter that weight decay leaves alone."""
    parameter = nn.Parameter(torch.empty(*shape))
    leave_undecayed(parameter)
    return parameter


def refuse_packed_state(state: Any, cu_seqlens: Tensor | None) -> None:
    """Refuse a state together with packed documents."""
    if state is not None and cu_seqlens is not None:
        raise UserError("a state continues one sequence: it does not go with packed documents (cu_seqlens)")


def residual_std(n_layers: int, std: float = 0.02) -> float:
    """Standard deviation for projections that write to the residual stream: two a layer (GPT-2, section 2.3)."""
    return std / (2 * n_layers) ** 0.5
