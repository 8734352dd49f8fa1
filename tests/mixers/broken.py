"""Mixers with one bug each, and the test of `MixerSuite` that reports it."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.mixers.attention import Attend, Attention
from seqarch.mixers.base import Mixer, MixerState, linear_flops
from seqarch.mixers.based import TaylorLinearAttention
from seqarch.mixers.cores import KeyValueState, WindowState
from seqarch.mixers.recurrent import RecurrentState
from seqarch.mixers.rwkv7 import RWKV7Shell


class ToyMean(Mixer):
    """A sound mixer without any capability: a projection of the mean so far."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.out = nn.Linear(d_model, d_model)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.out.reset_parameters()

    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        if state is not None:
            self.require("decode")
        if cu_seqlens is not None:
            self.require("packed")
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.out(x.cumsum(1) / count.to(x.dtype))

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        return (linear_flops(self.out) + 2 * self.d_model) * (3 if training else 1)


class LeaksTheFuture(ToyMean):
    def forward(self, x, **options):
        return super().forward(x, **options) + 1e-3 * x.mean(dim=1, keepdim=True)


class LeaksWithoutAGradient(ToyMean):
    def forward(self, x, **options):
        return super().forward(x, **options) / x.detach().abs().amax(dim=1, keepdim=True)


class MixesTheBatch(ToyMean):
    def forward(self, x, **options):
        return super().forward(x - x.mean(dim=0), **options)


class ReturnsATuple(ToyMean):
    def forward(self, x, **options):
        return super().forward(x, **options), None


class DropsInTraining(ToyMean):
    def forward(self, x, **options):
        return F.dropout(super().forward(x, **options), 0.1, self.training)


class WritesToItsInput(ToyMean):
    def forward(self, x, **options):
        with torch.no_grad():
            x *= 2
        return super().forward(x, **options)


class ReturnsFloat32(ToyMean):
    def forward(self, x, **options):
        return super().forward(x, **options).float()


class RoundsInside(ToyMean):
    def forward(self, x, **options):
        return super().forward(x.float().to(x.dtype), **options)


class LosesPrecisionInFloat32(ToyMean):
    def forward(self, x, **options):
        return super().forward(x, **options) + 1e6 - 1e6


class LosesSmallGradients(ToyMean):
    def forward(self, x, **options):
        y = super().forward(x, **options)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * gradient.abs() / (gradient.abs() + 1e-5))
        return y


class HasAWrongGradient(ToyMean):
    def forward(self, x, **options):
        y = super().forward(x, **options)
        return y + (x - x.detach())


class GivesNaNToFewTokens(ToyMean):
    def forward(self, x, **options):
        return super().forward(x, **options) * (1 if x.shape[1] > 1 else torch.nan)


class ReadsUninitialisedMemory(ToyMean):
    def forward(self, x, **options):
        y = super().forward(x, **options)
        return torch.where(torch.empty_like(y) > 1e300, 0, y) + 0 * torch.empty_like(y)


class SwallowsPacking(ToyMean):
    def forward(self, x, **options):
        return super().forward(x)


class BreaksTheGraph(ToyMean):
    def forward(self, x, **options):
        return super().forward(x, **options) * (2 if x.sum() > 0 else 1)


class ReadsSavedTensorsTwice(ToyMean):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.save_for_backward(y)
            return y.square()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * (ctx.saved_tensors[0] + ctx.saved_tensors[0])

    def forward(self, x, **options):
        return self.Square.apply(super().forward(x, **options))


class HasAnUnusedParameter(ToyMean):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.unused = nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "unused"):
            nn.init.zeros_(self.unused)


class ForgetsToReset(ToyMean):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.out.weight)


class ReadsATensorWhenBuilt(ToyMean):
    reset_parameters = Mixer.reset_parameters

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.decays = torch.linspace(0, 1, 3).tolist()


class KeepsABufferUnset(ToyMean):
    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.factor: Tensor
        self.register_buffer("factor", torch.ones(1), persistent=False)

    def forward(self, x, **options):
        return super().forward(x, **options) * self.factor


class CountsNothing(ToyMean):
    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        return 0.0


class ForgetsProjections(ToyMean):
    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        return (3.0 if training else 1.0) * seq_len


class ForgetsTheBackwardPass(ToyMean):
    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        return super().flops_per_token(seq_len)


class ClaimsTooMuch(ToyMean):
    capabilities: frozenset[str] = frozenset({"entropy"})


class PromisesNothingButDecodes(ToyMean):
    def init_state(self, batch_size, max_length, device, dtype):
        return MixerState()


class TrainsNothingUnderAutocast(ToyMean):
    def forward(self, x, **options):
        out = super().forward(x, **options)
        return out.detach() + 0 * x if torch.is_autocast_enabled("cpu") else out


class KeepsRowsSecond(TaylorLinearAttention):
    def init_state(self, batch_size, max_length, device, dtype):
        return RecurrentState(torch.zeros(2, batch_size, self.d_model, device=device, dtype=dtype))


class AttendFromZero(Attend):
    def _transform(self, q, k, start, cu_seqlens, clock=None):
        return super()._transform(q, k, 0, cu_seqlens, clock)


class SameRopeAtEveryCall(Attention):
    """Rotates a continued sequence as if it began at position 0."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.attend.__class__ = AttendFromZero


class CrossesBorders(Attention):
    def forward(self, x, *, state=None, cu_seqlens=None):
        return super().forward(x, state=state)


class ConstantsRunOn(Attention):
    """Keeps documents apart but counts positions on across borders."""

    def _constant_heads(self, constants, x, start, cu_seqlens):
        return super()._constant_heads(constants, x, start, None)


class CountsHalfTheState(Attention):
    def state_bytes(self, seq_len, dtype=torch.bfloat16):
        return super().state_bytes(seq_len, dtype) // 2


@dataclasses.dataclass
class CutGradients(KeyValueState):
    def extend(self, k, v):
        keys, values = super().extend(k, v)
        self.keys, self.values = self.keys.detach(), self.values.detach()
        return keys, values


class ForgetsGradientsOfTheCache(Attention):
    def init_state(self, batch_size, max_length, device, dtype):
        return CutGradients.empty(batch_size, max_length, self.n_kv_heads, self.head_dim, device=device, dtype=dtype)


@dataclasses.dataclass
class Overwritten(KeyValueState):
    def extend(self, k, v):
        keys, values = super().extend(k, v)
        if not torch.is_grad_enabled() and keys.shape[1] > k.shape[1]:
            self.keys[:, 0] = 0
        return keys, values


class OverwritesItsCache(Attention):
    def init_state(self, batch_size, max_length, device, dtype):
        return Overwritten.empty(batch_size, max_length, self.n_kv_heads, self.head_dim, device=device, dtype=dtype)


class SharesOneState(Attention):
    def init_state(self, batch_size, max_length, device, dtype):
        if not hasattr(self, "kept"):
            self.kept = super().init_state(batch_size, max_length, device, dtype)
        return self.kept


@dataclasses.dataclass
class WindowOfViews(WindowState):
    def extend(self, k, v):
        filled = self.filled
        self._advance(k)
        keys, values = (torch.cat((t[:, :filled], new), dim=1) for t, new in ((self.keys, k), (self.values, v)))
        self.keys, self.values = keys[:, -self.window :], values[:, -self.window :]
        return keys, values


class KeepsMoreThanItsWindow(Attention):
    def init_state(self, batch_size, max_length, device, dtype):
        state = super().init_state(batch_size, max_length, device, dtype)
        assert isinstance(state, WindowState)
        return WindowOfViews(state.keys, state.values, 0, max_length, state.window)


@dataclasses.dataclass
class StateOfOnePiece(KeyValueState):
    def split(self, piece):
        return dataclasses.replace(self, piece=piece)


class SharesNothing(Attention):
    """Reads each piece as if it were the first."""

    def init_state(self, batch_size, max_length, device, dtype):
        state: Any = super().init_state(batch_size, max_length, device, dtype)
        return StateOfOnePiece(state.keys, state.values, 0, max_length)


class RoundsItsState(TaylorLinearAttention):
    def recur(self, values, *inputs, **options):
        o, state = super().recur(values, *inputs, **options)
        return o, state.to(values.dtype)


class KeepsTheCallersMemory(RWKV7Shell):
    def forward(self, x, *, state=None, cu_seqlens=None, carry=None):
        result = super().forward(x, state=state, cu_seqlens=cu_seqlens, carry=carry)
        if state is not None and state.shift is not None:
            state.shift.last = x[:, -1:]
        return result


class ForgetsTheTokenShift(RWKV7Shell):
    def forward(self, x, *, state=None, cu_seqlens=None, carry=None):
        if state is not None and state.shift is not None:
            state.shift.last = torch.zeros_like(state.shift.last)
        return super().forward(x, state=state, cu_seqlens=cu_seqlens, carry=carry)


class IgnoresTheCarry(RWKV7Shell):
    def forward(self, x, *, state=None, cu_seqlens=None, carry=None):
        return super().forward(x, state=state, cu_seqlens=cu_seqlens, carry=None if self.layer_idx else carry)


class WritesIntoTheCarriedTensor(RWKV7Shell):
    def forward(self, x, *, state=None, cu_seqlens=None, carry=None):
        y = super().forward(x, state=state, cu_seqlens=cu_seqlens, carry=carry)
        if carry:
            carry["v_first"].data.mul_(2)
        return y


class EntropyInBits(Attention):
    def attention_entropy(self, x, *, cu_seqlens=None):
        return super().attention_entropy(x, cu_seqlens=cu_seqlens) / 0.6931


class EntropyAveragedOverHeads(Attention):
    def attention_entropy(self, x, *, cu_seqlens=None):
        return super().attention_entropy(x, cu_seqlens=cu_seqlens).mean(-1)


class EntropyAcrossBorders(Attention):
    def attention_entropy(self, x, *, cu_seqlens=None):
        return super().attention_entropy(x)


HEADS = {"n_heads": 4}
UNIFORM = {"n_heads": 4, "position": "none", "temperature": 1e6}


class ScalesNothing(ToyMean):
    scales: ClassVar[Any] = {"n_headz": "heads"}


class ScalesByNothing(Attention):
    scales: ClassVar[Any] = {"window": "lenght"}


class PublishesNothing(ToyMean):
    published: ClassVar[Any] = {768: {"n_headz": 12}}


class KeepsADictionary(Attention):
    def init_state(self, batch_size: int, max_length: int, device: Any, dtype: torch.dtype) -> Any:
        return {"keys": torch.zeros(batch_size, max_length)}


BROKEN: list[tuple[type[Mixer], dict[str, Any], str]] = [
    (LeaksTheFuture, {}, "test_causality"),
    (LeaksWithoutAGradient, {}, "test_causality"),
    (MixesTheBatch, {}, "test_batch_permutation"),
    (DropsInTraining, {}, "test_train_and_eval_agree"),
    (WritesToItsInput, {}, "test_shape_and_dtype"),
    (ReturnsATuple, {}, "test_shape_and_dtype"),
    (ReturnsFloat32, {}, "test_shape_and_dtype"),
    (GivesNaNToFewTokens, {}, "test_shape_and_dtype"),
    (RoundsInside, {}, "test_gradients_are_derivatives"),
    (HasAWrongGradient, {}, "test_gradients_are_derivatives"),
    (LosesPrecisionInFloat32, {}, "test_float32"),
    (LosesSmallGradients, {}, "test_float32"),
    (ReadsUninitialisedMemory, {}, "test_uninitialised_memory"),
    (SwallowsPacking, {}, "test_refusals"),
    (PromisesNothingButDecodes, {}, "test_refusals"),
    (TrainsNothingUnderAutocast, {}, "test_bfloat16"),
    (KeepsRowsSecond, HEADS, "test_refusals"),
    (BreaksTheGraph, {}, "test_compile"),
    (ScalesNothing, {}, "test_refusals"),
    (ScalesByNothing, HEADS, "test_refusals"),
    (PublishesNothing, {}, "test_refusals"),
    (KeepsADictionary, HEADS, "test_refusals"),
    (ReadsSavedTensorsTwice, {}, "test_activation_checkpointing"),
    (HasAnUnusedParameter, {}, "test_every_parameter_has_a_gradient"),
    (ForgetsToReset, {}, "test_reset_parameters"),
    (ReadsATensorWhenBuilt, {}, "test_reset_parameters"),
    (KeepsABufferUnset, {}, "test_reset_parameters"),
    (CountsNothing, {}, "test_flops"),
    (ForgetsProjections, {}, "test_flops"),
    (ForgetsTheBackwardPass, {}, "test_flops"),
    (ClaimsTooMuch, {}, "test_entropy"),
    (SameRopeAtEveryCall, HEADS, "test_pieces_with_gradients"),
    (SameRopeAtEveryCall, HEADS, "test_pieces_without_gradients"),
    (CrossesBorders, HEADS, "test_packed_documents"),
    (ConstantsRunOn, {"n_heads": 4, "relation": "constant_keys", "max_length": 64}, "test_packed_documents"),
    (CountsHalfTheState, HEADS, "test_state_bytes"),
    (RoundsItsState, HEADS, "test_bfloat16_state"),
    (KeepsMoreThanItsWindow, {"n_heads": 4, "window": 5}, "test_state_bytes"),
    (ForgetsGradientsOfTheCache, HEADS, "test_pieces_with_gradients"),
    (OverwritesItsCache, HEADS, "test_pieces_without_gradients"),
    (SharesOneState, HEADS, "test_states_are_independent"),
    (SharesNothing, HEADS, "test_two_processes_share_a_sequence"),
    (KeepsTheCallersMemory, HEADS, "test_states_are_independent"),
    (ForgetsTheTokenShift, HEADS, "test_pieces_with_gradients"),
    (IgnoresTheCarry, HEADS, "test_carry"),
    (WritesIntoTheCarriedTensor, HEADS, "test_carry"),
    (EntropyInBits, UNIFORM, "test_entropy"),
    (EntropyAveragedOverHeads, HEADS, "test_entropy"),
    (EntropyAcrossBorders, HEADS, "test_entropy"),
]
