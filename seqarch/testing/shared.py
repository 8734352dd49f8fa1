"""Pieces of one sequence in threads of one process, which exchange through its memory."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from seqarch.mixers.pieces import Piece, fill, numbers_of

SECONDS = 20.0
"""After which a thread waits in vain for another one."""


class Board:
    """Where `size` threads show each other values. All of them do so equally often."""

    def __init__(self, size: int) -> None:
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=SECONDS)

    def shown(self, rank: int, value: Any) -> list[Any]:
        """The values of all threads, by rank, once all have shown one."""
        self._values[rank] = value
        self._barrier.wait()
        values = [*self._values]
        self._barrier.wait()
        return values

    def run(self, of_rank: Callable[[int], Tensor]) -> list[Tensor]:
        """The results of a function in one thread for each rank."""

        def guarded(rank: int) -> Tensor:
            try:
                return of_rank(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(self._values)) as pool:
            done = [pool.submit(guarded, rank) for rank in range(len(self._values))]
        errors = [error for each in done if (error := each.exception())]
        if own := [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]:
            raise own[0]
        assert not errors, "the processes of a sequence exchange unequally often: one of them waits forever"
        return [each.result() for each in done]


@dataclasses.dataclass(frozen=True)
class SharedPiece(Piece):
    """One of several pieces, or of two where they are read in turn. Tensors keep their gradients between threads."""

    board: Board = dataclasses.field(kw_only=True)

    def stacked(self, x: Tensor) -> Tensor:
        return torch.stack(self.board.shown(self.rank, x))

    def exchanged(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        shown = self.board.shown(self.rank, x.split([*given]))
        return torch.cat([parts[self.rank] for parts in shown])

    def receive(self, x: Tensor, state: Any) -> Tensor:
        if self.rank:
            numbers, tensors = self.board.shown(self.rank, None)[self.rank - 1]
            fill(state, tensors, numbers)
        return x

    def send(self, y: Tensor, state: Any) -> Tensor:
        if not self.rank:
            self.board.shown(self.rank, (numbers_of(state), state.tensors()))
        return y
