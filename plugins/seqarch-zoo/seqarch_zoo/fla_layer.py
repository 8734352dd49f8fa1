"""Any layer of flash-linear-attention as a mixer: one adapter, the layer by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqarch.errors import UserError, near, unknown
from seqarch.kernels.fla_tuning import fla_module
from seqarch.kernels.op import interpreting
from seqarch.mixers import Mixer, MixerState
from seqarch.mixers.base import Carry

INSTALL = "pip install flash-linear-attention transformers"
V_FIRST = "fla_v_first"
"""Key in the carry for the values of RWKV-7's first layer."""
GIVEN = ("self", "hidden_size", "d_model", "layer_idx", "num_hidden_layers", "device", "dtype", "kwargs")
"""Parameters of a layer that are not options: the model gives them, or they place the weights."""
REFUSALS = (ArithmeticError, AssertionError, TypeError, ValueError, RuntimeError, ImportError)
"""What layers raise for sizes, options and ways of running that they do not take."""
MEASURED = (64, 128)
"""Lengths at which a state is measured. Sizes at longer lengths lie on the line through both."""


@dataclasses.dataclass
class FlaState(MixerState):
    """A cache of fla for one layer, the number of tokens that it has seen, and the tensors in it."""

    cache: Any
    length: int = 0
    kept: tuple[Tensor, ...] = ()


class Cache:
    """The interface of a model's cache that a layer of fla expects. It serves only this layer, at any index."""

    def __init__(self) -> None:
        self.entry: Any = fla_module("fla.models.utils").FLALayer()

    def __len__(self) -> int:
        return 0 if self.entry.state is None else 1 << 30

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None:
        return self.entry.state

    def update(self, *, layer_idx: int = 0, **state: Any) -> dict[str, Any]:
        return self.entry.update(**state)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.entry.get_seq_length()


class FlaLayer(Mixer):
    """A layer of flash-linear-attention, with its own options, initial weights and CUDA kernels.

    Its operations are counted. It decodes if the layer has a cache, and takes packed documents if the layer does.

    Args:
        layer: class in `fla.layers`, such as "GatedLinearAttention".
        options: options of that class, such as `{num_heads: 4}`; the others keep their defaults.
    """

    source: ClassVar[str] = "github.com/fla-org/flash-linear-attention"
    capabilities: frozenset[str] = frozenset({"decode", "packed"})
    kernels: ClassVar[Mapping[str, str]] = {"cuda": "fla"}

    def __init__(
        self, d_model: int, layer_idx: int, n_layers: int, *, layer: str, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        kind = layer_class(layer)
        known = layer_options(kind)
        for name in options or {}:
            if name not in known:
                raise UserError(f"fla's {layer} has no option '{name}'{near(name, known)}")
        parameters = inspect.signature(kind).parameters
        if missing := [
            name for name in known if known[name] is inspect.Parameter.empty and name not in (options or {})
        ]:
            raise UserError(f"fla's {layer} needs the option {', '.join(missing)}: give it in options")
        model = {"hidden_size": d_model, "layer_idx": layer_idx, "num_hidden_layers": n_layers}
        given = {name: value for name, value in model.items() if name in parameters}
        try:
            self.layer: Any = kind(**given, **(options or {}))
        except REFUSALS as error:
            raise UserError(f"fla's {layer} refuses hidden_size={d_model} with {options or {}}: {error}") from error
        _refuse_overruled(layer, self.layer, options or {})
        self.name = layer
        takes = inspect.signature(kind.forward).parameters
        abilities = {"decode": "past_key_values" in takes, "packed": "cu_seqlens" in inspect.getsource(kind.forward)}
        self.capabilities = frozenset(name for name, has in abilities.items() if has)
        self.passes_values = "v_first" in takes

    def connect(self, earlier: Sequence[Mixer]) -> None:
        """Drop the gate between own and first values in the first layer that passes values; see `Mixer.connect`."""
        if not any(isinstance(mixer, FlaLayer) and mixer.passes_values for mixer in earlier):
            self.layer._modules.pop("v_lora", None)

    @torch.compiler.disable()
    def forward(
        self, x: Tensor, *, state: FlaState | None = None, cu_seqlens: Tensor | None = None, carry: Carry | None = None
    ) -> Tensor:
        """Mix `x [B, T, d_model]` on a CUDA device; see `Mixer.forward`."""
        if not (x.is_cuda or interpreting()):
            raise UserError(f"FlaLayer runs {self.name} by fla's kernels, which need a CUDA GPU, not {x.device.type}")
        if state is None:
            packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.long()}
            return self._run(x, carry, packed)
        # Several layers continue from a cache only by one token.
        pieces = [x] if state.length == 0 else x.split(1, dim=1)
        sizes = [piece.shape[1] for piece in pieces]
        carries: list[Carry] = [{} for _ in pieces]
        for name, values in (carry or {}).items():
            for part, piece in zip(carries, values.split(sizes, dim=1), strict=True):
                part[name] = piece
        outputs = [self._continue(piece, state, part) for piece, part in zip(pieces, carries, strict=True)]
        if carry is not None and V_FIRST in carries[0]:
            carry.setdefault(V_FIRST, torch.cat([part[V_FIRST] for part in carries], dim=1))
        return torch.cat(outputs, dim=1)

    def _continue(self, x: Tensor, state: FlaState, carry: Carry) -> Tensor:
        state.length += x.shape[1]
        mask = torch.ones(x.shape[0], state.length, dtype=torch.bool, device=x.device)
        o = self._run(x, carry, {"past_key_values": state.cache, "use_cache": True, "attention_mask": mask})
        state.kept = tuple(_tensors(state.cache.entry.state))
        return o

    def _run(self, x: Tensor, carry: Carry | None, options: dict[str, Any]) -> Tensor:
        if self.passes_values:
            first = None if carry is None else carry.get(V_FIRST)
            options = {**options, "v_first": first}
            self.layer.layer_idx = self.layer_idx if first is not None else 0  # the first layer takes its own values
        try:
            found = self.layer(x, **options)
        except (AssertionError, NotImplementedError) as error:
            raise UserError(f"fla's {self.name} refuses this call: {error}") from error
        if not isinstance(found, tuple):
            return found
        if self.passes_values and carry is not None:
            carry.setdefault(V_FIRST, found[3])
        return found[0].to(x.dtype)

    def init_state(self, batch_size: int, max_length: int, device: torch.device | str, dtype: torch.dtype) -> FlaState:
        """An empty cache; see `Mixer.init_state`."""
        self.require("decode")
        return FlaState(Cache())

    @torch.no_grad()
    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of the cache, measured on the GPU; see `Mixer.state_bytes`."""
        self.require("decode")
        training = self.training
        self.eval()  # in training some layers refuse a cache
        first, last = MEASURED
        try:
            if seq_len <= last:
                return self._measured(seq_len, dtype)
            size = self._measured(last, dtype)
            return size + (size - self._measured(first, dtype)) * (seq_len - last) // (last - first)
        except REFUSALS as error:
            raise UserError(f"the cache of fla's {self.name} could not be measured: {error}") from error
        finally:
            self.train(training)

    def _measured(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of the cache after `length` tokens. Weights of another dtype run under autocast, as in generation."""
        weights = next(self.parameters())
        state = self.init_state(1, length, weights.device, dtype)
        x = torch.zeros(1, length, self.d_model, device=weights.device, dtype=weights.dtype)
        with torch.autocast(weights.device.type, dtype, enabled=dtype.itemsize < weights.dtype.itemsize):
            self(x, state=state)
        return sum(tensor.numel() * max(tensor.itemsize, dtype.itemsize) for tensor in state.tensors())


@functools.cache
def layer_class(name: str) -> type[nn.Module]:
    """The layer of fla with that name.

    Raises:
        UserError: fla is not installed, or has no layer of that name that mixes a sequence.
    """
    try:
        layers = fla_module("fla.layers")
    except ImportError as error:
        raise UserError(f"FlaLayer needs flash-linear-attention ({error}): {INSTALL}") from error
    kinds = {each: getattr(layers, each) for each in layers.__all__}
    usable = {each: kind for each, kind in kinds.items() if _mixes(kind)}
    if name not in usable:
        raise unknown("layer of fla", name, usable)
    return usable[name]


def layer_options(kind: type[nn.Module]) -> dict[str, Any]:
    """The options of a layer of fla with their defaults, `Parameter.empty` where one is required."""
    parameters = inspect.signature(kind).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name not in GIVEN}


def _refuse_overruled(name: str, layer: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise UserError for a number that another option overrules, as HGRN2's expand_ratio does with num_heads."""
    for option, value in options.items():
        taken = getattr(layer, option, value)
        if isinstance(value, int) and isinstance(taken, int) and taken != value:
            raise UserError(
                f"fla's {name} takes {option}={taken}, not {value}: another option decides it; leave {option} out"
            )


def _mixes(kind: Any) -> bool:
    """Whether a class needs only hidden states: some layers read what others computed."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)) or "Builder" in kind.__name__:
        return False
    takes = inspect.signature(kind.forward).parameters.values()
    needed = [each.name for each in takes if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return needed == ["self", "hidden_states"]


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a cache of fla."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []
