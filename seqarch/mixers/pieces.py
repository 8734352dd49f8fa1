"""One sequence over several processes (context parallelism): each process has one piece of consecutive tokens.

A mixer reads its piece through a state, as it reads a sequence in several calls. The state says by `MixerState.split`
how the piece learns about the tokens before it. Exchanges are symmetric and have gradients, so that every process
meets the others in the same order, forward and backward. Compiled graphs break at each exchange. In a graph the
compiler would leave out exchanges that give a process nothing, and the processes would wait for each other forever.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.op import LEFT

GROUPS: dict[str, dist.ProcessGroup] = {}
"""Groups of processes that share sequences, by name: operators take no groups."""
MOST_DIMENSIONS = 8
# the names before PyTorch 2.13
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclasses.dataclass(frozen=True)
class Piece:
    """The piece of a process: the tokens `start .. start + length - 1` of sequences of `total` tokens.

    Args:
        rank: number of the piece, from 0.
        size: number of pieces, P.
        length: tokens in each of them.
        group: name of the processes' group in `GROUPS`.
    """

    rank: int
    size: int
    length: int
    group: str = ""

    @property
    def start(self) -> int:
        """Tokens before the piece."""
        return self.rank * self.length

    @property
    def total(self) -> int:
        """Tokens of all pieces together."""
        return self.size * self.length

    def of_row(self, total: int) -> "Piece":
        """The piece of the same process, of a row of `total` tokens."""
        return dataclasses.replace(self, length=total // self.size)

    def cut(self, x: Tensor) -> Tensor:
        """The piece of the whole sequences `x [B, total, ...]`."""
        return x[:, self.start : self.start + self.length]

    def stacked(self, x: Tensor) -> Tensor:
        """`x` of all processes, `[P, *x.shape]`."""
        return uncompiled(all_pieces, x, self.group, self.size)

    def gathered(self, x: Tensor) -> Tensor:
        """`x [B, length, ...]` of all pieces, `[B, total, ...]`."""
        return torch.cat(self.stacked(x).unbind(0), dim=1)

    def exchanged(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """What all processes give to this one: of their flat `x`, the elements `given[r]` to process r, in order."""
        return uncompiled(exchange, x, self.group, given, taken)

    def shifted(self, x: Tensor) -> Tensor:
        """`x` of the process before; zeros in the first process."""
        given, taken = (
            [x.numel() * (rank == each) for rank in range(self.size)] for each in (self.rank + 1, self.rank - 1)
        )
        found = self.exchanged(x.reshape(-1)[: sum(given)], given, taken)
        return torch.cat((found, x.new_zeros(x.numel() - sum(taken)))).view_as(x)

    def half(self, number: int) -> tuple[int, int]:
        """Tokens of a half of a piece, by its `number` in the whole sequence, and the position after its last."""
        piece, late = divmod(number, 2)
        first = (self.length + 1) // 2
        return (self.length // 2, (piece + 1) * self.length) if late else (first, piece * self.length + first)

    def halves(self) -> tuple[int, int]:
        """The numbers of an early and a late half. Causal attention of both costs each process the same."""
        return self.rank, 2 * self.size - 1 - self.rank

    def balanced(self, x: Tensor, back: bool = False) -> Tensor:
        """`x [B, length, ...]` of the `halves`, from that of the pieces; with `back` that of the pieces."""
        given, taken = [0] * self.size, [0] * self.size
        for number in (2 * self.rank, 2 * self.rank + 1):
            given[min(number, 2 * self.size - 1 - number)] += self.half(number)[0]
        for number in self.halves():
            taken[number // 2] += self.half(number)[0]
        turn = self.half(0)[0] * (2 * self.rank >= self.size)  # the late half goes to an earlier process than the early
        rows, width = x.transpose(0, 1), x.numel() // self.length
        if back:
            given, taken = taken, given
        else:
            rows = rows.roll(-turn, 0)
        found = self.exchanged(rows.reshape(-1), *([width * count for count in each] for each in (given, taken)))
        return (found.view_as(rows).roll(turn, 0) if back else found.view_as(rows)).transpose(0, 1)

    def before(self, x: Tensor, count: int) -> Tensor:
        """The last `count` tokens before the piece, `[B, count, ...]`; zeros before the first token."""
        if count <= self.length:
            return self.shifted(x[:, self.length - count :])
        earlier = self.gathered(x)[:, : self.start]
        zeros = x.new_zeros(x.shape[0], max(0, count - self.start), *x.shape[2:])
        return torch.cat((zeros, earlier[:, max(0, self.start - count) :]), dim=1)

    def earlier(self, window: int | None) -> int:
        """Tokens before the piece that its first token sees, through a `window` if there is one."""
        return self.start if window is None else min(self.start, window - 1)

    def seen(self, x: Tensor, window: int | None = None) -> Tensor:
        """`x [B, length, ...]` after that of the `earlier` tokens."""
        if window is None:
            return self.gathered(x)[:, : self.start + self.length]
        return torch.cat((self.before(x, window - 1)[:, window - 1 - self.earlier(window) :], x), dim=1)

    def attend(
        self,
        core: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        cu_seqlens: Tensor | None,
        **inputs: Tensor,
    ) -> Tensor:
        """Causal attention of the piece, `[B, length, H, D]`; processes share the work of all pieces evenly.

        Args:
            core: takes queries, the keys and values up to the last of them, borders of documents in the keys, and
                `inputs`.
            q: queries of the piece.
            k: their keys.
            v: their values.
            window: number of last keys that a query sees; all unless given.
            cu_seqlens: borders of documents in the whole row.
            inputs: what else belongs to the queries, `[B, length, ...]`.
        """
        if window is not None:
            borders = self.borders(cu_seqlens, self.earlier(window))
            return core(q, self.seen(k, window), self.seen(v, window), cu_seqlens=borders, **inputs)
        k, v = self.gathered(k), self.gathered(v)
        sizes, ends = zip(*map(self.half, self.halves()), strict=True)
        parts = {name: self.balanced(each).split(sizes, dim=1) for name, each in {"q": q, **inputs}.items()}
        outputs = []
        for index, end in enumerate(ends):
            if sizes[index]:
                of_half = {name: each[index] for name, each in parts.items()}
                borders = None if cu_seqlens is None else cu_seqlens.clamp(max=end)
                outputs.append(core(k=k[:, :end], v=v[:, :end], cu_seqlens=borders, **of_half))
        return self.balanced(torch.cat(outputs, dim=1), back=True)

    def borders(self, cu_seqlens: Tensor | None, earlier: int = 0) -> Tensor | None:
        """Borders `[N + 1]` of the documents in the piece and the `earlier` tokens before it.

        Documents elsewhere in the row are empty there.

        Args:
            cu_seqlens: borders in the whole row.
            earlier: number of tokens; those before the first token belong to the first document.
        """
        if cu_seqlens is None:
            return None
        inside = (cu_seqlens - (self.start - earlier)).clamp(0, earlier + self.length)
        return F.pad(inside[1:], (1, 0))

    def entering(self, state: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """States `[N, ...]` of all documents before the piece: `state [1, ...]` of the one it continues, else zeros."""
        if cu_seqlens is None:
            return state
        continued = (cu_seqlens[:-1] < self.start) & (cu_seqlens[1:] > self.start)
        return torch.where(continued.view(-1, *[1] * (state.dim() - 1)), state, 0)

    def continues(self, cu_seqlens: Tensor) -> Tensor:
        """Whether each token of the piece belongs to the document of the token before the piece, `[length]`."""
        ahead = torch.where(cu_seqlens >= self.start, cu_seqlens - self.start, self.length)
        return torch.arange(self.length, device=cu_seqlens.device) < ahead.min()

    def leaving(self, states: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The state `[1, ...]` of the document that the piece ends in, from those of all documents `[N, ...]`."""
        if cu_seqlens is None:
            return states
        last = self.start + self.length - 1
        holds_last = (cu_seqlens[:-1] <= last) & (cu_seqlens[1:] > last)
        return states.index_select(0, holds_last.int().argmax().view(1))

    def carried(self, after: Tensor, transition: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """The state of a linear recurrence before the piece, `[B, *state_shape]`.

        Args:
            after: the state after the piece if it begins with zeros; of each document, `[N, *state_shape]`.
            transition: what the piece does to a state before it: factors that broadcast to the state, or matrices
                `[B, H, K, K]` for states `[B, H, K, V]`. A border within the piece makes it zero.
            cu_seqlens: borders of the documents in the whole row.
        """
        if cu_seqlens is not None:
            inside = (cu_seqlens >= self.start) & (cu_seqlens < self.start + self.length)
            after, transition = self.leaving(after, cu_seqlens), torch.where(inside.any(), 0, transition)
        matrices = transition.dim() == 4 and transition.shape[-1] == transition.shape[-2] > 1
        sizes = [after[0].numel(), transition[0].numel()]
        pieces = self.stacked(torch.cat((after.flatten(1), transition.to(after.dtype).flatten(1)), dim=1))
        state = torch.zeros_like(after)
        with torch.autocast(after.device.type, enabled=False):  # which would round products of states
            for rank in range(max(1, self.rank)):
                added, factor = pieces[rank].split(sizes, dim=1)
                factor = factor.view_as(transition)
                state = (factor @ state if matrices else factor * state) + added.view_as(after)
        # The first process too, so that it meets the others in the backward pass.
        return state if self.rank else state.masked_fill(torch.ones_like(state, dtype=torch.bool), 0)

    def receive(self, x: Tensor, state: Any) -> Tensor:
        """`x`, after `state` has got the values that it has in the process before."""
        x, *tensors = _Receive.apply(x, self, state) if self.rank else (x, *state.tensors())
        fill(state, tensors)
        return x

    def send(self, y: Tensor, state: Any) -> Tensor:
        """`y`, after `state` went to the next process."""
        return _Send.apply(y, self, numbers_of(state), *state.tensors()) if self.rank < self.size - 1 else y


def state_before(layer: Any, piece: Piece, *like: Any) -> Any:
    """The state of a mixer or feed-forward layer before a piece, or before the first token if it does not split.

    Args:
        layer: has `init_state`.
        piece: what it reads next.
        *like: number of sequences, device and dtype of activations.
    """
    batch_size, *others = like
    state = layer.init_state(batch_size, 1, *others)
    return state and (state.split(piece) or layer.init_state(batch_size, piece.total, *others))


@torch.compiler.disable()
def in_turn(layer: Any, x: Tensor, piece: Piece, options: dict[str, Any]) -> Tensor:
    """The output of a layer whose state does not split: each process waits for the state of the process before."""
    state = options["state"]
    return piece.send(layer(piece.receive(x, state), **options), state)


def waits(layer: Any) -> bool:
    """Whether a mixer or feed-forward layer reads pieces one after the other."""
    state = layer.init_state(1, 1, "meta", torch.float32)
    return state is not None and state.split(Piece(0, 1, 1)) is None


@torch.compiler.disable()
def uncompiled(function: Callable[..., Tensor], *args: Any, left: bool = False, **options: Any) -> Tensor:
    """Call a function outside of compiled graphs; `left` tells ops that one was left for it."""
    token = LEFT.set(left)
    try:
        return function(*args, **options)
    finally:
        LEFT.reset(token)


@torch.library.custom_op("seqarch::all_pieces", mutates_args=())
def all_pieces(x: Tensor, group: str, size: int) -> Tensor:
    found = x.new_empty(size, *x.shape)
    _all_gather(found.view(-1), x.reshape(-1), group=GROUPS[group])
    return found


@torch.library.custom_op("seqarch::sum_of_pieces", mutates_args=())
def sum_of_pieces(x: Tensor, group: str) -> Tensor:
    own = torch.empty_like(x[0], memory_format=torch.contiguous_format)
    _reduce_scatter(own.view(-1), x.reshape(-1), group=GROUPS[group])
    return own


@torch.library.custom_op("seqarch::exchange", mutates_args=())
def exchange(x: Tensor, group: str, given: Sequence[int], taken: Sequence[int]) -> Tensor:
    found = x.new_empty(sum(taken))
    dist.all_to_all_single(found, x.contiguous(), taken, given, group=GROUPS[group])
    return found


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[1:]


all_pieces.register_autograd(lambda ctx, grad: (sum_of_pieces(grad, ctx.place[0]), None, None), setup_context=_keep)
exchange.register_autograd(
    lambda ctx, grad: (exchange(grad, ctx.place[0], ctx.place[2], ctx.place[1]), None, None, None), setup_context=_keep
)


class _Send(torch.autograd.Function):
    """Gives the tensors of a state to the next process; backward it takes their gradients from there."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, piece: Piece, numbers: list[float], *tensors: Tensor) -> Tensor:
        # Saved, so that activation checkpointing does not end its second forward pass before the state is sent.
        ctx.save_for_backward(y)
        ctx.piece, ctx.like = piece, [torch.empty_like(tensor, device="meta") for tensor in tensors]
        shapes = [size for each in tensors for size in (each.dim(), *each.shape, *[0] * (MOST_DIMENSIONS - each.dim()))]
        header = torch.tensor([*numbers, *shapes], dtype=torch.float64, device=y.device)
        for tensor in (header, *tensors):
            dist.send(tensor.contiguous(), group_dst=piece.rank + 1, group=GROUPS[piece.group])
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = [torch.empty(each.shape, dtype=each.dtype, device=grads[0].device) for each in ctx.like]
        floating = [each for each in found if each.is_floating_point()]
        for each in floating:
            dist.recv(each, group_src=ctx.piece.rank + 1, group=GROUPS[ctx.piece.group])
        return grads[0], None, None, *(each if each.is_floating_point() else None for each in found)


class _Receive(torch.autograd.Function):
    """Takes the tensors of a state from the process before; backward it gives their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, piece: Piece, state: Any) -> tuple[Tensor, ...]:
        ctx.piece = piece
        group: Any = {"group_src": piece.rank - 1, "group": GROUPS[piece.group]}
        numbers, tensors = numbers_of(state), state.tensors()
        width = MOST_DIMENSIONS + 1
        header = torch.empty(len(numbers) + width * len(tensors), dtype=torch.float64, device=x.device)
        dist.recv(header, **group)
        values = header.tolist()
        fill(state, tensors, values[: len(numbers)])
        found = []
        for index, like in enumerate(tensors):
            dims, *shape = (int(each) for each in values[len(numbers) + index * width :][:width])
            found.append(like.new_empty(shape[:dims]))
            dist.recv(found[-1], **group)
        ctx.floating = [each.is_floating_point() for each in found]
        ctx.mark_non_differentiable(*(each for each in found if not each.is_floating_point()))
        return x.view_as(x), *found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for grad in itertools.compress(grads[1:], ctx.floating):
            dist.send(grad.contiguous(), group_dst=ctx.piece.rank - 1, group=GROUPS[ctx.piece.group])
        return grads[0], None, None


def numbers_of(state: Any) -> list[float]:
    """The numbers in a state, nested states included.

    Raises:
        UserError: the state has something that cannot be sent.
    """
    return [float(getattr(owner, name)) for owner, name in _numbered(state)]


def fill(state: Any, tensors: Sequence[Tensor], numbers: Sequence[float] | None = None) -> None:
    """Put other tensors, in the order of `MixerState.tensors`, and other numbers into a state."""
    left = iter(tensors)
    for owner, name in state.owned():
        value = getattr(owner, name)
        setattr(owner, name, tuple(next(left) for _ in value) if isinstance(value, tuple) else next(left))
    for (owner, name), number in zip(_numbered(state), numbers or (), strict=False):
        setattr(owner, name, type(getattr(owner, name))(number))


def _numbered(state: Any) -> list[tuple[Any, str]]:
    """Each field that holds a number: its state (this one or a nested one) and its name."""
    found: list[tuple[Any, str]] = []
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if isinstance(value, int | float):
            found.append((state, field.name))
        elif dataclasses.is_dataclass(value):
            found.extend(_numbered(value))
        elif not isinstance(value, Tensor | tuple | str | None):
            raise UserError(f"{type(state).__name__}.{field.name} is a {type(value).__name__}: no process can send it")
    return found
