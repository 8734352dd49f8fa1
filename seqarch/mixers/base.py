"""The contract that every sequence mixer keeps; `seqarch.testing.MixerSuite` is its test."""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from seqarch.arguments import Limited, divide
from seqarch.errors import UserError
from seqarch.kernels import OPS, kernels_of
from seqarch.mixers.counted import counted_flops
from seqarch.mixers.pieces import Piece

GIVEN_BY_THE_MODEL = ("d_model", "layer_idx", "n_layers")
"""Arguments of every mixer that the model gives; all others are options."""
CAPABILITIES = ("decode", "packed", "entropy")
Scale = Literal["length", "heads", "head", "state"]
Device = torch.device | str
Carry = dict[str, Tensor]
"""What layers hand to later layers in one pass of a model, by name; `[B, T, ...]` each."""
Losses = dict[str, Tensor]
"""What a mixer adds to the training loss, by name: 0-d each, with its weight, for the mean token of the call."""


@dataclasses.dataclass
class Clock:
    """The position of a static step, kept on the device: one clock for all layers of a model.

    Args:
        position: `[1]` int64, position of the step's token.
        lengths: `[B]` int32, tokens of each sequence, the step's included.
        rotations: tables of RoPE for all positions, by what they depend on; layers share them.
    """

    position: Tensor
    lengths: Tensor
    rotations: dict[tuple[int, float], tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)

    @classmethod
    def at(cls, position: int, batch_size: int, device: Device) -> "Clock":
        """The clock of the step that reads the token at `position`."""
        lengths = torch.full((batch_size,), position + 1, dtype=torch.int32, device=device)
        return cls(torch.full((1,), position, device=device), lengths)

    def tick(self) -> None:
        """Go to the next token."""
        self.position += 1
        self.lengths += 1


@dataclasses.dataclass
class MixerState:
    """The memory of a mixer between calls of `forward`: a key/value cache, a recurrent state.

    A subclass is a dataclass whose fields are tensors `[B, ...]`, tuples of them, other states or plain numbers.
    `forward` updates it in place: its fields are new after the call. Only the mixer that made a state looks inside it.
    """

    static: ClassVar[bool] = False
    """Whether the state holds only tensors that keep their shapes, so that one token can be read by a static step."""

    piece: Piece | None = dataclasses.field(default=None, kw_only=True)
    """The piece of a sequence of several processes that `forward` reads next, once the state is split."""

    def split(self, piece: Piece) -> "MixerState | None":
        """The state before a piece of a sequence that several processes share; this state is before the first token.

        The state that it returns has the `piece`. With it `forward` reads the piece at the same time as other processes
        read theirs. It takes what it needs of earlier pieces through the piece. By default there is no such state:
        each process waits until the one before has sent its state.
        """
        return None

    def pin(self, clock: Clock) -> bool:
        """Prepare the state for static steps: single tokens whose positions only the device knows.

        A static step can be replayed from a CUDA graph. From now on `forward` uses no Python number of the state and
        keeps the shapes of its tensors. A state with numbers overrides this method and takes positions from `clock`.

        Returns:
            Whether the state serves static steps.
        """
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]
        nested = [value.pin(clock) for value in values if isinstance(value, MixerState)]
        return self.static and all(nested) and not any(isinstance(value, int | float) for value in values)

    def owned(self) -> "list[tuple[MixerState, str]]":
        """Each field that holds a tensor or a tuple of tensors: its state (this one or a nested one) and its name."""
        found: list[tuple[MixerState, str]] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor | tuple):
                found.append((self, field.name))
            elif isinstance(value, MixerState):
                found.extend(value.owned())
        return found

    def tensors(self) -> list[Tensor]:
        """All tensors of the state, nested states included."""
        return [tensor for owner, name in self.owned() for tensor in each_tensor(getattr(owner, name))]


def each_tensor(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of a field of a state."""
    return value if isinstance(value, tuple) else (value,)


class Layer(Limited, nn.Module, ABC):
    """A layer of a model, `[B, T, d_model]` to the same shape, that knows its place.

    Args:
        d_model: width of the residual stream.
        layer_idx: index of the layer, from 0.
        n_layers: number of layers of the model.
    """

    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__()
        if not 0 <= layer_idx < n_layers:
            raise UserError(f"layer_idx must lie in 0..{n_layers - 1}, not {layer_idx}")
        self.d_model = d_model
        self.layer_idx = layer_idx
        self.n_layers = n_layers
        self.canon_channels: int | None = None
        """Channels inside that a Canon layer convolves (`seqarch.mixers.canon`), if there is such a place."""
        self.canon: Any = None
        """This layer, which a block puts here."""

    def after_canon(self, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> Tensor:
        """`x` after the Canon layer inside, if there is one; `state` is that layer's."""
        return through_canon(x, self.canon, state, cu_seqlens)


def through_canon(x: Tensor, canon: Any, state: Any, cu_seqlens: Tensor | None) -> Tensor:
    """`x` after a Canon layer, if there is one."""
    return x if canon is None else canon(x, state=state, cu_seqlens=cu_seqlens)


class Mixer(Layer):
    """Mixes information along the sequence: `[B, T, d_model]` to the same shape, causally.

    A mixer is built as `YourMixer(d_model, layer_idx, n_layers, **options)`. The model gives the first three, the
    recipe gives the options, and a subclass documents those. It must define `forward`; everything else has a default.
    All ways of running a mixer agree, forward and gradients: the whole sequence at once, in pieces through a state,
    token by token, and packed documents through `cu_seqlens`.

    Args:
        d_model: width of the residual stream.
        layer_idx: index of the layer, from 0.
        n_layers: number of layers of the model, for initialisation that depends on depth.
    """

    capabilities: frozenset[str] = frozenset()
    """Which of "decode" (`init_state`), "packed" (`cu_seqlens`) and "entropy" (`attention_entropy`) it can do.

    A constructor may set it where options decide."""

    implied: bool = False
    """Whether `attention_entropy` is of implied weights (`seqarch.mixers.implied`) rather than of a softmax."""

    family: ClassVar[str] = ""
    """Kind of mixer, for instance "mamba": figures draw a family in shades of one colour. Empty: only itself."""

    scales: ClassVar[Mapping[str, Scale]] = {}
    """Options that change with the size of a model, as the exam needs it to shrink a published one: "length" in
    proportion to the sequence length, "heads" to the number of heads, "head" to the channels of a head where these are
    fewer than 64. "state" is the number of heads that share `d_model` channels, chosen so that a state of the square of
    a head's channels keeps its share of a key/value cache. An option of a part of the mixer has a dot, for instance
    "core.chunk_size"."""

    published: ClassVar[Mapping[int, Mapping[str, Any]]] = {}
    """Options at the widths at which it was published, for instance `{768: {"n_heads": 12}}`."""

    source: ClassVar[str] = ""
    """Where the mixer was published, for instance "arXiv 2405.21060"."""

    in_every_layer: ClassVar[bool] = False
    """Whether its source uses the mixer in every layer of a recall exam. Other mixers come in the last layer, after
    gated convolutions (Zoology, arXiv 2312.04927)."""

    ops: ClassVar[tuple[str, ...]] = ()
    """The ops of `seqarch.kernels` that it computes with, the main one first."""

    kernels: ClassVar[Mapping[str, str]] = {}
    """For each kind of device that it is made for ("cpu", "cuda"), what computes it there with default options, for
    instance `{"cpu": "PyTorch", "cuda": "own Triton"}`; taken from `ops` where these are named."""

    takes: ClassVar[frozenset[str]] = frozenset()
    """What `forward` has parameters for; read from its signature."""

    def __init_subclass__(cls, **options: Any) -> None:
        if init := vars(cls).get("__init__"):
            _name_the_place(init)
        super().__init_subclass__(**options)
        if "ops" in cls.__dict__:
            cls.kernels = kernels_of(OPS[name] for name in cls.ops)
        parameters = inspect.signature(cls.forward).parameters
        anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        cls.takes = frozenset({*parameters, *(("state", "cu_seqlens") if anything else ())})

    @abstractmethod
    def forward(self, x: Tensor, *, state: Any = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mix `x [B, T, d_model]`.

        A subclass may leave out the parameters that it does not use. It may add `carry`: a `Carry` that belongs to this
        call, with what earlier layers wrote into it in the same pass. The mixer adds tensors for later layers. It may
        add `tokens`, the ids `[B, T]` int64 that `x` is of. And it may add `losses`: in training an empty `Losses` to
        write into, else `None`.

        Args:
            x: the normalised residual stream.
            state: made by `init_state`; the call continues from it and updates it.
            cu_seqlens: `[N + 1]` int32, borders of N documents packed into one row (B = 1); nothing crosses a border.
                With a state that has a `piece`, the borders are those of the whole row (`Piece.borders`).
        """

    def arguments(
        self,
        state: Any = None,
        cu_seqlens: Tensor | None = None,
        carry: Carry | None = None,
        losses: Losses | None = None,
        tokens: Tensor | None = None,
    ) -> dict[str, Any]:
        """The arguments of one pass that this mixer's `forward` takes.

        Raises:
            UserError: the pass has a state or packed documents, and the mixer does not support them; or it has both,
                and the state is not before a piece.
        """
        if state is not None:
            self.require("decode")
        if cu_seqlens is not None:
            self.require("packed")
        if state is not None and cu_seqlens is not None and state.piece is None:
            raise UserError("a state continues one sequence: it does not go with packed documents (cu_seqlens)")
        inputs = {"state": state, "cu_seqlens": cu_seqlens, "carry": carry, "losses": losses, "tokens": tokens}
        return {name: value for name, value in inputs.items() if name in self.takes}

    def connect(self, earlier: "Sequence[Mixer]") -> None:
        """Get to know the mixers of earlier layers; a model calls this once, after it built all layers.

        For mixers with a carry. Parameters that this layer cannot use are dropped here: distributed training refuses
        parameters without a gradient.
        """

    def init_state(self, batch_size: int, max_length: int, device: Device, dtype: torch.dtype) -> MixerState:
        """The state before the first token, for `batch_size` sequences of at most `max_length` tokens."""
        raise UserError(f"{type(self).__name__} has no decoding state: it cannot generate text")

    def reset_parameters(self) -> None:
        """Draw the initial weights again.

        By default each submodule draws its own, as its constructor did. Parameters outside of such submodules keep
        their values: a mixer that has them overrides this method, and calls it last in its constructor.
        """
        reset_children(self)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Floating-point operations per token, averaged over a sequence of `seq_len`; a multiply-add counts as two.

        Forward only, or with `training` forward and backward, without what activation checkpointing repeats. By default
        the products of matrices are counted (`seqarch.mixers.counted`).
        """
        return counted_flops(self, seq_len) * (3 if training else 1)

    @property
    def flops_counted(self) -> bool:
        """Whether `flops_per_token` is the default count, not the mixer's own formula."""
        return type(self).flops_per_token is Mixer.flops_per_token

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of decoding state for one sequence after `seq_len` tokens with activations of `dtype`.

        By default the bytes that `init_state` takes for `seq_len` tokens.
        """
        self.require("decode")
        return sum(tensor.nbytes for tensor in self.init_state(1, seq_len, "meta", dtype).tensors())

    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """Entropy in nats of each head's attention, `[B, T, H]`, for the `x` that `forward` would take.

        Where `implied` is set, it is the entropy of the implied weights. `None` for mixers that have neither.
        """
        return None

    def require(self, capability: str) -> None:
        """Raise `UserError` unless the mixer has the capability ("decode", "packed" or "entropy") and what it takes."""
        if capability not in self.capabilities:
            what = {"decode": "text generation", "packed": "packed documents (cu_seqlens)", "entropy": "an entropy"}
            raise UserError(f"{type(self).__name__} does not support {what[capability]}")
        if (needed := {"decode": "state", "packed": "cu_seqlens"}.get(capability)) and needed not in self.takes:
            raise UserError(f"{type(self).__name__} says that it can do '{capability}', but forward takes no {needed}")


def _name_the_place(init: Any) -> None:
    """Have the signature of a constructor name what the model gives, in place of `*args`: options come after it."""
    parameters = [*inspect.signature(init).parameters.values()]
    first = next((i for i, each in enumerate(parameters) if each.kind is each.VAR_POSITIONAL), None)
    if first is not None and all(each.default is each.empty for each in parameters[:first]):
        place = [name for name in GIVEN_BY_THE_MODEL if name not in {each.name for each in parameters}]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters[first : first + 1] = [inspect.Parameter(name, kind, annotation=int) for name in place]
        init.__signature__ = inspect.Signature(parameters)


def reset_children(module: nn.Module) -> None:
    """Call `reset_parameters` of the submodules, from the outside in; one that has it draws for all inside it."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        reset() if callable(reset) else reset_children(child)


def size_heads(width: float, n_heads: int, head_dim: int | None, *, called: str = "d_model") -> int:
    """Channels of a head: `head_dim` or, if that is None, width / `n_heads`; messages call the width `called`.

    Raises:
        UserError: `n_heads` does not divide the width and there is no `head_dim`.
    """
    return divide(**{called: width, "n_heads": n_heads}) if head_dim is None else head_dim


def linear_flops(*layers: nn.Linear) -> float:
    """Forward operations per token of linear layers."""
    return float(sum(2 * layer.in_features * layer.out_features for layer in layers))


def init_linear(layer: nn.Linear, std: float = 0.02) -> None:
    """Normal weights and zero bias, as in GPT-2."""
    if not layer.weight.is_meta:  # without memory it draws nothing, but takes half the time of building a model
        nn.init.normal_(layer.weight, std=std)
    has_fixed_std(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def has_fixed_std(parameter: Tensor) -> None:
    """Note that outputs of the initial parameter grow with the square root of `d_model` (`seqarch.model.transfer`)."""
    parameter._fixed_std = True  # pyright: ignore[reportAttributeAccessIssue]


def leave_undecayed(*parameters: Tensor) -> None:
    """Exclude matrices from weight decay."""
    for parameter in parameters:
        parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]


def undecayed(*shape: int) -> nn.Parameter:
    """A new parameter without weight decay."""
    parameter = nn.Parameter(torch.empty(*shape))
    leave_undecayed(parameter)
    return parameter


def is_fused(layer: nn.Linear, *heights: int) -> None:
    """Note that the weight of a layer is several matrices below each other, with these numbers of rows."""
    layer.weight._heights = heights  # pyright: ignore[reportAttributeAccessIssue]


def residual_std(n_layers: int, *, scaled: bool = True) -> float:
    """Standard deviation for a layer's two projections that write to the residual stream (GPT-2, section 2.3)."""
    return 0.02 / (2 * n_layers) ** 0.5 if scaled else 0.02
