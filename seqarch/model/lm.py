"""The language model: embedding, blocks by a pattern of named mixers, final norm and head."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from seqarch.arguments import Count, Interval, Limited, Positive, divide
from seqarch.errors import UserError, several, unknown
from seqarch.kernels import linear_cross_entropy
from seqarch.kernels.tensors import autocast_dtype, document_positions, known_end
from seqarch.mixers.base import Carry, Clock, Device, Losses, Mixer, MixerState, init_linear
from seqarch.mixers.canon import Canon
from seqarch.mixers.pieces import Piece
from seqarch.model.block import ADDED, Block, BlockState, NormName, build_norm
from seqarch.model.feed_forward import FeedForward
from seqarch.model.looping import Looping
from seqarch.model.roles import kinds_of, scalings_of

Reduction = Literal["mean", "sum", "none"]
MixerFactory = Callable[[int, int, int], Mixer]
FeedForwardFactory = Callable[[int, int, int], FeedForward]
LoopingFactory = Callable[[int, int], Looping]
RunBlock = Callable[..., tuple[Tensor, Carry]]
"""Runs a block on what its `forward` takes."""
NO_MIXER = "none"
"""In a pattern: a block without a mixer."""

MOST_LAYERS = 10_000


@dataclasses.dataclass
class LMState(MixerState):
    """The decoding state of a model: one state for each block in each loop, and the number of tokens seen."""

    blocks: list[BlockState]
    length: int = 0
    clock: Clock | None = None

    @property
    def start(self) -> int | Tensor:
        """Position of the next token; in static steps `[1]`, on the device."""
        return self.length if self.clock is None else self.clock.position

    def advance(self, count: int) -> None:
        """Count tokens that were read: any number or, in static steps, one."""
        if self.clock is None:
            self.length += count
        else:
            self.clock.tick()

    def pin(self, clock: Clock) -> bool:
        self.clock = clock
        pinned = [block.pin(clock) for block in self.blocks]
        return all(pinned)

    def owned(self) -> list[tuple[MixerState, str]]:
        return [each for block in self.blocks for each in block.owned()]


class Blocks(nn.Sequential):
    """The blocks of a model, one after the other. (Before PyTorch 2.12, FSDP2 refuses a ModuleList with a forward.)"""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        states: Sequence[BlockState | None],
        cu_seqlens: Tensor | None,
        run_block: RunBlock,
        tokens: Tensor,
        losses: bool = False,
        piece: Piece | None = None,
        looping: Looping | None = None,
    ) -> tuple[Tensor, Carry]:
        """Run all blocks on `x [B, T, d_model]`, once for every `len(self)` of `states`; see `SequenceLM.forward`.

        Returns:
            The output, and with `losses` the losses that mixers add.
        """
        added: Carry = {}
        options = {"cu_seqlens": cu_seqlens, "losses": losses, "piece": piece, "tokens": tokens}

        def run(x: Tensor, loop: int) -> Tensor:
            carry = added  # a layer sees the carry of its own loop, not of an earlier loop
            for block, state in zip(self, states[loop * len(self) :], strict=False):
                x, carry = run_block(block, x, carry, state=state, **options)
            added.update({name: loss for name, loss in carry.items() if name.startswith(ADDED)})
            return x

        if looping is None:
            for loop in range(len(states) // len(self)):
                x = run(x, loop)
            return x, added
        own: Losses | None = {} if losses else None
        x = looping(x, run, own)
        return x, {**added, **{ADDED + name: loss for name, loss in (own or {}).items()}}


class SequenceLM(Limited, nn.Module):
    """A causal language model whose layers are named mixers in a repeating pattern.

    Args:
        vocab_size: number of token ids, V.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        loops: times that the blocks run, one loop after the other, with the same weights (Universal Transformer, arXiv
            1807.03819). Each loop has its own decoding state.
        mixers: for each name a mixer (in Python: a function of `d_model, layer_idx, n_layers`).
        pattern: names of `mixers`, repeated until there are `n_layers`; "none" is a block without a mixer. May be left
            out when there is one mixer.
        feed_forward: the feed-forward layer of every block; `null` for none.
        no_feed_forward: names of `mixers` whose blocks have no feed-forward layer all the same.
        norm: "rmsnorm" or "layernorm".
        norm_eps: epsilon of all these norms.
        tie_embeddings: whether the head shares the embedding's weights.
        embedding_norm: whether the embedding is normalised before the first block, as in RWKV; it is then drawn with a
            smaller standard deviation, see `embedding_std`.
        learned_positions: number of learned absolute positions added to the embedding; 0 for none.
        residual_in_fp32: whether the residual stream is float32 under autocast, as in Mamba's code, and not its dtype.
        canon: residual short convolutions before and inside the layers of every block; `null` for none.
        looping: what comes between loops, such as halting (in Python: a function of `d_model, loops`); `null` for
            nothing.

    Raises:
        UserError: for a pattern that names no mixer or does not divide `n_layers`.
    """

    document_mask: bool = False
    """Whether no document began with the token that ends another when the model was trained (`data.document_mask`)."""

    def __init__(
        self,
        vocab_size: Count,
        d_model: Count,
        n_layers: Count,
        mixers: dict[str, MixerFactory],
        pattern: list[str] | None = None,
        feed_forward: FeedForwardFactory | None = None,
        no_feed_forward: list[str] | None = None,
        norm: NormName = "rmsnorm",
        norm_eps: Positive = 1e-5,
        tie_embeddings: bool = True,
        embedding_norm: bool = False,
        learned_positions: Annotated[int, Interval(0)] = 0,
        loops: Count = 1,
        residual_in_fp32: bool = False,
        canon: Canon | None = None,
        looping: LoopingFactory | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.d_model, self.loops, self.residual_in_fp32 = d_model, loops, residual_in_fp32
        self.added: Losses = {}
        """What mixers added to the last training loss, by name; layers of one name are summed."""
        self.pattern = layer_names(mixers, pattern, n_layers, loops)
        bare = _known_names(several(no_feed_forward or []), mixers, "no_feed_forward")
        self.embedding = nn.Embedding(vocab_size, d_model)
        # One draw whatever follows: a seed gives all models of one size this embedding, up to its scale.
        std = embedding_std(vocab_size, d_model, normalised=embedding_norm, tied=tie_embeddings)
        nn.init.normal_(self.embedding.weight, std=std)
        self.positions = nn.Embedding(learned_positions, d_model) if learned_positions else None
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=std)
        self.embedding_norm = build_norm(norm, d_model, norm_eps) if embedding_norm else None
        self.blocks = Blocks()
        for layer_idx, name in enumerate(self.pattern):
            place = d_model, layer_idx, n_layers
            mixer = mixers[name](*place) if name != NO_MIXER else None
            after = feed_forward(*place) if feed_forward and name not in bare else None
            self.blocks.append(Block(d_model, mixer, after, norm, norm_eps, canon))
        self._connect(canon)
        self.looping = looping(d_model, loops) if looping else None
        self.norm = build_norm(norm, d_model, norm_eps)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.embedding.weight
        else:
            init_linear(self.head)
        # by name, since copied and sharded parameters have lost their marks
        self.kinds, self.scalings = kinds_of(self), scalings_of(self)

    def _connect(self, canon: Canon | None) -> None:
        """Show each mixer those before it."""
        if canon is not None:
            canon.check(self.blocks)
        built = [block.mixer for block in self._blocks() if block.mixer is not None]
        for index, mixer in enumerate(built):
            mixer.connect(built[:index])

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        state: LMState | None = None,
        cu_seqlens: Tensor | None = None,
        reduction: Reduction = "mean",
        last_only: bool = False,
        at: Tensor | None = None,
        run_block: RunBlock = Block.__call__,
        added: float | Tensor | None = None,
        piece: Piece | None = None,
    ) -> Tensor:
        """Loss against `targets`, or logits without them.

        Args:
            tokens: `[B, T]` token ids.
            targets: `[B, T]` ids of the next tokens; -100 is left out of the loss.
            state: from `init_state`; the call continues from it and updates it.
            cu_seqlens: `[N + 1]` int32 borders of packed documents (B = 1), with a `piece` of the whole row.
            reduction: "mean" over the targets, their "sum", or "none" for `[B, T]`.
            last_only: logits of the last position only.
            at: `[B, T]` bool; logits of these N positions only.
            run_block: calls a block with the arguments that follow it; a compiled function, for instance.
            added: factor of the losses that mixers add, in training; `None` for the loss without them.
            piece: which piece of sequences that several processes share `tokens` is; then without state.

        Returns:
            The loss in nats, or logits `[B, T, V]` (`[B, 1, V]` with `last_only`, `[N, V]` with `at`).
        """
        start = piece.start if piece else state.start if state else 0
        x = self._embed(tokens, start, cu_seqlens)
        states = state.blocks if state else [None] * (self.loops * len(self.blocks))
        x, losses = self.blocks(x, states, cu_seqlens, run_block, tokens, added is not None, piece, self.looping)
        if state is not None:
            state.advance(tokens.shape[1])
        if targets is None:
            x = x[:, -1:] if last_only else x if at is None else x[at]
            return self.head(self.norm(x))
        loss = self._loss(x, targets, reduction)
        if added is not None:
            self.added = {name.removeprefix(ADDED): added * each for name, each in losses.items()}
            loss = sum(self.added.values(), start=loss)
            self.added = {name: each.detach() for name, each in self.added.items()}
        return loss

    def init_state(self, batch_size: int, max_length: int, device: Device, dtype: torch.dtype) -> LMState:
        """The state before the first token, for `batch_size` sequences of at most `max_length` tokens."""
        self.check_positions(max_length)
        blocks = self._blocks() * self.loops
        return LMState([block.init_state(batch_size, max_length, device, dtype) for block in blocks])

    def flops_per_token(self, seq_len: int, *, training: bool = False) -> float:
        """Operations per token, averaged over a sequence, with the head; see `Mixer.flops_per_token`."""
        head = 2.0 * self.d_model * self.vocab_size * (3 if training else 1)
        blocks = sum(block.flops_per_token(seq_len, training=training) for block in self._blocks())
        between = self.looping.flops_per_token() * (3 if training else 1) if self.looping is not None else 0.0
        return head + self.loops * blocks + between

    @property
    def flops_counted(self) -> bool:
        """Whether a mixer has no formula for its operations, so that torch counts them."""
        return any(block.mixer is not None and block.mixer.flops_counted for block in self._blocks())

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes of decoding state for one sequence after `seq_len` tokens."""
        return self.loops * sum(block.state_bytes(seq_len, dtype) for block in self._blocks())

    def state_elements(self, seq_len: int) -> int | None:
        """Numbers in the decoding state after `seq_len` tokens; `None` for a model that cannot decode."""
        try:
            return self.state_bytes(seq_len, torch.float32) // torch.float32.itemsize
        except UserError:
            return None

    def checkpoint_activations(self) -> None:
        """Keep only the input of each block while training and compute the rest again in the backward pass.

        Selections of Top-1 chunk attention are kept as well: 4 bytes per query and head.
        """
        for block in self._blocks():
            block.activation_checkpointing = True

    def compile_parts(self) -> None:
        """Compile each block and the loss by themselves, which compiles one layer for all of a kind."""
        for block in self.blocks:
            block.compile()
        self._loss = torch.compile(self._loss)

    def n_parameters(self) -> int:
        """Number of parameters; tied weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _loss(self, x: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
        hidden = self.norm(x).flatten(0, 1)
        loss = linear_cross_entropy(hidden, self.head.weight, targets.flatten(), reduction=reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _embed(self, tokens: Tensor, offset: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            self.check_positions(known_end(tokens, offset, cu_seqlens))
            x = x + self.positions(document_positions(tokens, start=offset, cu_seqlens=cu_seqlens))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        # Under autocast only the embedding keeps the residual stream in fp32, which is twice the memory traffic.
        return x if self.residual_in_fp32 else x.to(autocast_dtype(x))

    def check_positions(self, length: int) -> None:
        """Raise `UserError` if sequences of `length` tokens have more positions than are learned."""
        if self.positions is not None and length > self.positions.num_embeddings:
            raise UserError(f"learned_positions is {self.positions.num_embeddings}: a sequence of {length} needs more")


def embedding_std(vocab_size: int, d_model: int, *, normalised: bool, tied: bool) -> float:
    """Standard deviation of the initial embedding: GPT-2's 0.02, less if a norm makes its vectors long again.

    With an untied head it is RWKV's, uniform in +-1e-4. The norm's epsilon keeps these vectors short, so the
    blocks soon dominate. A tied head gives a token a logit of `std * d_model` for itself if its normalised vector
    passes blocks that start as zero, as in RWKV. Half of `ln(vocab_size)` keeps the first loss at that of equal
    guesses.

    Mamba's authors also use GPT-2's value. It does not keep the first loss there in a wide Mamba-1, whose blocks
    together start about twice as long as the embedding. A token then has a logit of about `0.43 * 0.02 * d_model` for
    itself. At `d_model` 2048 and 32,000 tokens the first loss is about 17.5, in the authors' code and in ours.
    """
    if not normalised:
        return 0.02
    return min(0.02, 0.5 * math.log(vocab_size) / d_model) if tied else 1e-4 / 3**0.5


def layer_names(mixers: dict[str, MixerFactory], pattern: Sequence[str] | None, n_layers: int, loops: int) -> list[str]:
    """The name of each layer's mixer: `pattern` repeated to `n_layers`."""
    if n_layers * loops > MOST_LAYERS:
        raise UserError(f"n_layers times loops must be at most {MOST_LAYERS:,}, not {n_layers * loops:,}")
    if strange := {"", NO_MIXER} & {*mixers}:  # in a pattern, a block without a mixer
        raise UserError(f"a mixer cannot be called '{min(strange)}': give it another name")
    if pattern is None and len(mixers) != 1:
        raise UserError(f"give a pattern: there are {len(mixers)} mixers ({', '.join(mixers)})")
    names = _known_names(several(pattern) if pattern is not None else list(mixers), mixers, "pattern")
    repeats = divide(**{"n_layers": n_layers, "layers of pattern": len(names)})
    if unused := sorted({*mixers} - {*names}):
        raise UserError(f"mixers has {', '.join(unused)}, which the pattern does not use")
    return names * repeats


def _known_names(names: list[str], mixers: dict[str, MixerFactory], where: str) -> list[str]:
    for name in names:
        if name not in mixers and name != NO_MIXER:
            raise unknown(f"mixer name in {where}", name, mixers)
    return names
