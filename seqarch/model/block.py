"""A block: pre-norm mixer and pre-norm feed-forward around a residual stream; either may be absent."""

import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqarch.arguments import Limited, Positive
from seqarch.errors import UserError
from seqarch.kernels.checkpointing import keep_selections
from seqarch.kernels.tensors import autocast_dtype
from seqarch.mixers.base import Carry, Clock, Device, Losses, Mixer, MixerState, each_tensor, through_canon
from seqarch.mixers.canon import Canon, CanonLayer
from seqarch.mixers.pieces import Piece, in_turn, state_before
from seqarch.model.feed_forward import FeedForward

NormName = Literal["rmsnorm", "layernorm"]
ADDED = "loss/"
"""How names of the losses that mixers add begin in the carry of a block."""


def build_norm(name: NormName, d_model: int, eps: float) -> nn.Module:
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450) over the last dimension."""
    return {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}[name](d_model, eps=eps)


@dataclasses.dataclass
class BlockState(MixerState):
    """The decoding state of one block."""

    mixer: MixerState | None
    feed_forward: MixerState | None
    mixer_canon: MixerState | None = None
    feed_forward_canon: MixerState | None = None
    pinned: list[Any] = dataclasses.field(default_factory=list)

    def pin(self, clock: Clock) -> bool:
        parts = (self.mixer, self.feed_forward, self.mixer_canon, self.feed_forward_canon)
        static = [part.pin(clock) for part in parts if part is not None]
        self.pinned = [(owner, name, getattr(owner, name)) for owner, name in self.owned()]
        return all(static)

    def settle(self, *, keep: bool = True) -> None:
        """Put the pinned tensors back into the state; with `keep`, first copy what a static step made into them."""
        for owner, name, value in self.pinned:
            for tensor, new in zip(each_tensor(value), each_tensor(getattr(owner, name)), strict=True):
                if keep and new is not tensor:
                    tensor.copy_(new)
            setattr(owner, name, value)


class Block(Limited, nn.Module):
    """`x + mixer(norm(x))`, then `x + feed_forward(norm(x))`.

    Args:
        d_model: width of the residual stream.
        mixer: the sequence mixer, or `None`.
        feed_forward: the feed-forward layer, or `None`.
        norm: normalisation before each of them.
        norm_eps: its epsilon.
        canon: Canon layers before and inside the mixer and the feed-forward layer.
    """

    def __init__(
        self,
        d_model: int,
        mixer: Mixer | None,
        feed_forward: FeedForward | None,
        norm: NormName,
        norm_eps: Positive = 1e-5,
        canon: Canon | None = None,
    ) -> None:
        super().__init__()
        if mixer is None and feed_forward is None:
            raise UserError("a block needs a mixer or a feed-forward layer; this one has neither")
        self.mixer = mixer
        self.feed_forward = feed_forward
        self.mixer_norm = build_norm(norm, d_model, norm_eps) if mixer is not None else None
        self.feed_forward_norm = build_norm(norm, d_model, norm_eps) if feed_forward is not None else None
        self.mixer_canon = canon.layer("A", d_model) if canon and mixer is not None else None
        self.feed_forward_canon = canon.layer("C", d_model) if canon and feed_forward is not None else None
        for layer, place in ((mixer, "B"), (feed_forward, "D")):
            if canon and layer is not None:
                canon.put_inside(layer, place)
        self.activation_checkpointing = False
        """Whether training keeps only the block's input and computes the rest again in the backward pass."""

    def forward(
        self,
        x: Tensor,
        carry: Carry | None = None,
        *,
        state: BlockState | None = None,
        cu_seqlens: Tensor | None = None,
        losses: bool = False,
        piece: Piece | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, Carry]:
        """Returns the new `x [B, T, d_model]` and the carry for the next block; the given one stays as it is.

        With `losses` the carry holds the sums of what this mixer and earlier ones add to the training loss. With a
        `piece`, `x` is a piece of sequences that several processes share.
        """
        carry = carry or {}
        if self.activation_checkpointing and state is None and torch.is_grad_enabled():
            # Inside the block, so that a compiled block has its checkpoint in the graph.
            options: Any = {"use_reentrant": False, "context_fn": keep_selections}
            found: Any = checkpoint(self._mix, x, carry, None, cu_seqlens, losses, piece, tokens, **options)
            return found
        return self._mix(x, carry, state, cu_seqlens, losses, piece, tokens)

    def _mix(
        self,
        x: Tensor,
        carry: Carry,
        state: BlockState | None,
        cu_seqlens: Tensor | None,
        losses: bool,
        piece: Piece | None,
        tokens: Tensor | None,
    ) -> tuple[Tensor, Carry]:
        carry = dict(carry)  # a copy: activation checkpointing runs this again, from the same carry
        if piece is not None:
            state = self._before(piece, x.shape[0], x.device, autocast_dtype(x))
        if self.mixer is not None and self.mixer_norm is not None:
            added: Losses | None = {} if losses else None
            options = self.mixer.arguments(state.mixer if state else None, cu_seqlens, carry, added, tokens)
            canon = self.mixer_canon, state and state.mixer_canon, cu_seqlens
            x = _plus(x, self.mixer, self.mixer_norm, canon, piece, **options)
            for name, loss in (added or {}).items():
                if not isinstance(loss, Tensor) or loss.dim():
                    by = f"{type(self.mixer).__name__} adds a loss '{name}'"
                    raise UserError(f"{by} of {_described(loss)}, not a 0-d tensor")
                carry[ADDED + name] = carry[ADDED + name] + loss if ADDED + name in carry else loss
        if self.feed_forward is not None and self.feed_forward_norm is not None:
            options = {"state": state.feed_forward if state else None, "cu_seqlens": cu_seqlens}
            canon = self.feed_forward_canon, state and state.feed_forward_canon, cu_seqlens
            x = _plus(x, self.feed_forward, self.feed_forward_norm, canon, piece, **options)
        if state is not None:
            state.settle()
        return x, carry

    def init_state(self, batch_size: int, max_length: int, device: Device, dtype: torch.dtype) -> BlockState:
        parts = (self.mixer, self.feed_forward)
        mixer, feed_forward = (part and part.init_state(batch_size, max_length, device, dtype) for part in parts)
        return BlockState(mixer, feed_forward, *self._canon_states(batch_size, device, dtype))

    def _before(self, piece: Piece, *like: Any) -> BlockState:
        """The state before a piece of a sequence that several processes share."""
        mixer, feed_forward = (part and state_before(part, piece, *like) for part in (self.mixer, self.feed_forward))
        before, between = (state and state.split(piece) for state in self._canon_states(*like))
        return BlockState(mixer, feed_forward, before, between)

    def _canon_states(self, *like: Any) -> tuple[MixerState | None, MixerState | None]:
        before, between = (layer and layer.init_state(*like) for layer in (self.mixer_canon, self.feed_forward_canon))
        return before, between

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        flops = self.mixer.flops_per_token(seq_len, training=training) if self.mixer is not None else 0.0
        if self.feed_forward is not None:
            flops += self.feed_forward.flops_per_token() * (3 if training else 1)
        canon = sum(layer.flops_per_token() for layer in self.modules() if isinstance(layer, CanonLayer))
        return flops + canon * (3 if training else 1)

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        state = self.feed_forward and self.feed_forward.init_state(1, seq_len, "meta", dtype)
        states = (state, *self._canon_states(1, "meta", dtype))
        own = sum(tensor.nbytes for state in states if state is not None for tensor in state.tensors())
        return own + (self.mixer.state_bytes(seq_len, dtype) if self.mixer is not None else 0)


def _plus(
    x: Tensor, layer: nn.Module, norm: nn.Module, canon: tuple[Any, ...], piece: Piece | None, **options: Any
) -> Tensor:
    """`x + layer(canon(norm(x)))`, where the layer gets autocast's dtype. Refuses what a sum would broadcast or widen.

    `canon` is a Canon layer or `None`, its state and the borders of documents.
    """
    normed = norm(x)  # under autocast LayerNorm returns float32, which doubles memory traffic
    inputs, state = through_canon(normed.to(autocast_dtype(normed)), *canon), options.get("state")
    if piece is not None and state is not None and state.piece is None:
        output = in_turn(layer, inputs, piece, options)
    else:
        output = layer(inputs, **options)
    total = x + output if isinstance(output, Tensor) and output.shape == x.shape else None
    if total is None or autocast_dtype(total) != autocast_dtype(x):
        expected = f"a tensor of its input's shape {_described(inputs)}"
        raise UserError(f"{type(layer).__name__} returned {_described(output)}, not {expected}")
    return total


def _described(found: Any) -> str:
    return f"{tuple(found.shape)} in {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
