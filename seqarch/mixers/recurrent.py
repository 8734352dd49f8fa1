"""The skeleton of recurrent mixers: project, recur through a state of fixed size, finish."""

import dataclasses
import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.kernels import OPS
from seqarch.kernels.short_convolution.op import unit_heads
from seqarch.mixers.base import Device, Mixer, MixerState, linear_flops
from seqarch.mixers.implied import implied_entropy
from seqarch.mixers.pieces import Piece
from seqarch.mixers.short_convolution import ShortConvolution, ShortConvolutionState

Composes = Literal["in_turn", "decays", "matrix"]
Shape = tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class RecurrentState(MixerState):
    """The state of the recurrence, `[B, *state_shape]` in float32 or more, and of a convolution before it.

    Where `state_shape` is a tuple of shapes, `state` is a tuple of tensors. Where attention takes the place of the
    recurrence, it is the attention's cache.
    """

    state: Any
    convolution: ShortConvolutionState | None = None
    shift: ShortConvolutionState | None = None
    static: ClassVar[bool] = True
    composes: Composes = "in_turn"
    """How pieces of a sequence compose; see `RecurrentMixer.composes`."""

    def split(self, piece: Piece) -> "RecurrentState | None":
        inner = self.state.split(piece) if isinstance(self.state, MixerState) else self.state
        if inner is None or (inner is self.state and self.composes == "in_turn"):
            return None
        convolution, shift = (part and part.split(piece) for part in (self.convolution, self.shift))
        return dataclasses.replace(self, state=inner, convolution=convolution, shift=shift, piece=piece)


class Projected(NamedTuple):
    """The result of `project`: the values of the recurrence, its other inputs, and tensors that only `finish` needs.

    The values are `[B, T, H, V]`: a head shares its decays over V. Mamba-1, whose channels
    decay by themselves, has `[B, T, D]`.
    """

    values: Tensor
    inputs: tuple[Any, ...]
    rest: tuple[Any, ...] = ()


class RecurrentMixer(Mixer):
    """A mixer that carries a state of fixed size from token to token.

    A subclass defines `project`, `recur` and `finish`. Its constructor sets `state_shape` and, where there is one,
    `convolution`, and calls `reset_parameters` last. If it cannot decode, take packed documents or give an entropy, it
    leaves this out of `capabilities`.
    """

    capabilities: frozenset[str] = frozenset({"decode", "packed", "entropy"})
    implied: bool = True

    products: ClassVar[int] = 2
    """Products of one token with the state: write and read, unless there are more."""

    shifts: ClassVar[bool] = False
    """Whether the state holds the last token, for a token shift."""

    composes: ClassVar[Composes] = "in_turn"
    """How pieces of a sequence on several processes compose. "in_turn": each process waits for the state of the one
    before. The others do not wait; for them the state must be a linear function of the state before. "decays": its
    elements decay by themselves, by the factors of `decays`. "matrix": each head of a `state_shape` `(H, K, V)` is
    multiplied by a matrix, `recur` takes values of K channels too, and outputs are linear in the state."""

    state_shape: Shape
    """Shape of the state of one sequence; a tuple of shapes where the state is a tuple of tensors."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, backend: str = "auto") -> None:
        super().__init__(d_model, layer_idx, n_layers)
        if self.ops:
            OPS[self.ops[0]].check(backend)
        self.backend: str = backend
        self.convolution: ShortConvolution | None = None

    @abstractmethod
    def project(self, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> Projected:
        """Compute the inputs of the recurrence and the output from `x [B, T, d_model]`.

        Put all that needs `x` here, because compiled graphs break at the recurrence.
        """

    @abstractmethod
    def recur(
        self, values: Tensor, *inputs: Any, initial_state: Any = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Outputs `[B, T, H, V]` in the dtype of `values`, and the final state; linear in `values`.

        Args:
            values: `Projected.values`, or probes with any other V, from which the entropy is read.
            *inputs: `Projected.inputs`.
            initial_state: the state before the first token; `None` for zeros.
            cu_seqlens: borders of packed documents, at which the state starts anew; `each_document` of
                `seqarch.kernels.packed` does that.
        """

    @abstractmethod
    def finish(self, o: Tensor, *rest: Any) -> Tensor:
        """The mixer's output `[B, T, d_model]` from the recurrence's output and `Projected.rest`."""

    def forward(self, x: Tensor, *, state: RecurrentState | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.mix(x, state, cu_seqlens)

    def mix(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None, **more: Any) -> Tensor:
        """As `forward`; `more` is what `project` of a subclass also takes, such as a carry."""
        values, inputs, rest = self.project(x, state, cu_seqlens, **more)
        if state is not None and state.piece is not None and not isinstance(state.state, MixerState):
            return self.finish(self._after_pieces(state.piece, values, inputs, cu_seqlens), *rest)
        o, after = self.recur(values, *inputs, initial_state=state.state if state else None, cu_seqlens=cu_seqlens)
        if state is not None:
            state.state = after
        return self.finish(o, *rest)

    def _after_pieces(self, piece: Piece, values: Tensor, inputs: tuple[Any, ...], cu_seqlens: Tensor | None) -> Tensor:
        """The outputs of `recur` for a piece, whose state before it is composed from what each earlier piece does."""
        borders = piece.borders(cu_seqlens)
        if self.composes == "matrix":
            return self._after_matrices(piece, values, inputs, cu_seqlens)
        o, after = self.recur(values, *inputs, cu_seqlens=borders)
        before = piece.carried(after, self.decays(*inputs), cu_seqlens)
        if (added := self.reads(before, *inputs)) is None:
            state = piece.entering(before, cu_seqlens)
            return self.recur(values, *inputs, initial_state=state, cu_seqlens=borders)[0]
        if cu_seqlens is not None:
            added = added.masked_fill(~piece.continues(cu_seqlens)[:, None, None], 0)
        return o + added.to(o.dtype)

    def _after_matrices(
        self, piece: Piece, values: Tensor, inputs: tuple[Any, ...], cu_seqlens: Tensor | None
    ) -> Tensor:
        """As `_after_pieces`, where each head of the state is multiplied by a matrix.

        One call of `recur` finds both what the piece adds to a state of zeros and what it does to each unit vector. Its
        values have K more columns, which are zero and begin with the unit matrix as state. On a GPU they cost little: a
        kernel's time is that of the chunks one after the other, and columns run side by side.
        """
        shape: Any = self.state_shape
        heads, size, width = shape
        like: Any = {"dtype": torch.promote_types(values.dtype, torch.float32), "device": values.device}
        unit = F.pad(torch.eye(size, **like), (width, 0)).expand(values.shape[0], heads, -1, -1)
        state = piece.entering(unit, cu_seqlens).contiguous()
        wide = F.pad(values, (0, size))
        found, after = self.recur(wide, *inputs, initial_state=state, cu_seqlens=piece.borders(cu_seqlens))
        (o, seen), (added, transition) = (each.split((width, size), dim=-1) for each in (found, after))
        before = piece.carried(added, piece.leaving(transition, cu_seqlens), cu_seqlens)
        return o + torch.einsum("bthk,bhkv->bthv", seen.to(before.dtype), before).to(o.dtype)

    def reads(self, before: Tensor, *inputs: Any) -> Tensor | None:
        """What the state `before` all tokens of `inputs` adds to the outputs, `[B, T, H, V]`.

        Only where `composes` is "decays". By default `None`: `recur` runs once more, with the state.
        """
        return None

    def decays(self, *inputs: Any) -> Tensor:
        """Factors by which all tokens of `inputs` together decay the state `[B, *state_shape]`; they broadcast to it.

        Only where `composes` is "decays".
        """
        raise TypeError(f"{type(self).__name__} composes by decays and does not define them")

    def convolved(self, x: Tensor, state: RecurrentState | None, cu_seqlens: Tensor | None) -> Tensor:
        """`x` after the short convolution and SiLU; a Canon layer is in its place, or nothing."""
        before = state.convolution if state else None
        if self.convolution is None:
            return F.silu(self.after_canon(x, before, cu_seqlens))
        return self.convolution(x, state=before, cu_seqlens=cu_seqlens)

    def convolved_heads(
        self, x: Tensor, n_heads: int, key_dim: int, state: RecurrentState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys of unit length, and values, by head: `convolved` for `x [B, T, 2 H K + H V]`."""
        before = state.convolution if state else None
        if self.convolution is None:
            return unit_heads(F.silu(self.after_canon(x, before, cu_seqlens)), n_heads, key_dim)
        return self.convolution.qkv(x, n_heads, key_dim, state=before, cu_seqlens=cu_seqlens)

    def init_state(self, batch_size: int, max_length: int, device: Device, dtype: torch.dtype) -> RecurrentState:
        """The state before the first token, zeros; see `Mixer.init_state`."""
        convolution = self.canon or self.convolution
        return RecurrentState(
            self.init_sequence_state(batch_size, max_length, device=device, dtype=dtype),
            convolution.init_state(batch_size, device, dtype) if convolution is not None else None,
            ShortConvolutionState.empty(batch_size, 1, self.d_model, device, dtype) if self.shifts else None,
            self.composes,
        )

    def init_sequence_state(self, batch_size: int, max_length: int, **like: Any) -> Any:
        """The state of the recurrence, or of what a subclass puts in its place; `like` holds `device` and `dtype`."""
        return empty_state(batch_size, self.state_shape, **like)

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Projections, convolution, and the products with the state; see `Mixer.flops_per_token`."""
        projections = linear_flops(*(layer for layer in self.modules() if isinstance(layer, nn.Linear)))
        convolution = 0.0 if self.convolution is None else self.convolution.flops_per_token()
        return (projections + convolution) * (3 if training else 1) + self.sequence_flops(seq_len, training=training)

    def sequence_flops(self, seq_len: int, *, training: bool) -> float:
        """Operations per token of the recurrence, or of what a subclass puts in its place."""
        sizes = sum(math.prod(shape) for shape in _shapes(self.state_shape))
        return 2.0 * self.products * sizes * (3 if training else 1)

    @torch.no_grad()
    def attention_entropy(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor | None:
        """Entropy `[B, T, H]` in nats of the implied weights of the recurrence, without gradient."""
        if "entropy" not in self.capabilities:
            return None
        values, inputs, _ = self.project(x, None, cu_seqlens)
        return implied_entropy(lambda probe: self.recur(probe, *inputs, cu_seqlens=cu_seqlens)[0], values)


def empty_state(batch_size: int, shape: Shape, device: Device, dtype: torch.dtype) -> Any:
    """A recurrent state before the first token, for activations of `dtype`: float32, or float64 for that dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    zeros = tuple(torch.zeros(batch_size, *each, device=device, dtype=wide) for each in _shapes(shape))
    return zeros if isinstance(shape[0], tuple) else zeros[0]


def _shapes(shape: Any) -> tuple[tuple[int, ...], ...]:
    return shape if isinstance(shape[0], tuple) else (shape,)


def init_step_bias(bias: Tensor) -> None:
    """The bias whose softplus, a step of the recurrence, is log-uniform in 0.001..0.1 (Mamba, arXiv 2312.00752)."""
    with torch.no_grad():
        step = bias.uniform_(math.log(0.001), math.log(0.1)).exp_()
        step.add_(torch.log(-torch.expm1(-step)))  # the inverse of softplus
