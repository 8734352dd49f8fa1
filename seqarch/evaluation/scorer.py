"""`Scorer`: the model that tasks see. Only this module batches rows and shares them between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torchmetrics import Metric

from seqarch.data.tokenizers import Tokenizer
from seqarch.model import SequenceLM


class Rows(Protocol):
    """Sequences of equal length: a tensor `[n, T + 1]`, or what reads one row `[T + 1]` at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


Measure = Callable[[Tensor, Tensor], Tensor]
"""Takes the losses `[b, T]` and tokens `[b, T + 1]` of a batch; returns one row per sequence, `[b, ...]`."""


class Scorer:
    """Computes losses of one model, in the precision of its training.

    Args:
        lm: the model, on its device.
        tokenizer: of the model's token ids, for tasks that write text.
        context: returns the context of a forward pass, such as autocast.
        batch_size: sequences per forward pass and process.
        rank: of this process among those that share the work.
        world_size: number of these processes.
    """

    def __init__(
        self,
        lm: SequenceLM,
        tokenizer: Tokenizer | None = None,
        *,
        context: Callable[[], AbstractContextManager] = nullcontext,
        batch_size: int = 16,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.context = context
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The model in evaluation mode, without gradients and in the precision of its training."""
        training = self.lm.training
        self.lm.eval()
        try:
            with torch.no_grad(), self.context():
                yield
        finally:
            self.lm.train(training)

    def losses(self, rows: Rows) -> Tensor:
        """The next-token loss of every prediction in nats: `[n, T]` float32 on the CPU, the same on all processes."""
        return self.measure(rows, lambda losses, tokens: losses.float())

    def measure(self, rows: Rows, of: Measure) -> Tensor:
        """Apply `of` to the losses of each batch, and gather its rows from all processes.

        Each process takes its share of the batches. Every batch has the same shape: the last one is filled up with
        rows that do not count. So a compiled model is compiled once, and sharded processes stay in step.

        Returns:
            `[n, ...]` on the CPU, in the type that `of` returns, the same on all processes.
        """
        n, stride = len(rows), self.world_size * self.batch_size
        table: GatheredRows | None = None
        with self.evaluating():
            for start in range(self.rank * self.batch_size, -(-n // stride) * stride, stride):
                batch = torch.stack([rows[min(i, n - 1)] for i in range(start, start + self.batch_size)])
                batch = batch.to(self.device)
                values = of(self.lm(batch[:, :-1], batch[:, 1:], reduction="none"), batch)
                if table is None:
                    table = GatheredRows(values.new_zeros(n, *values.shape[1:]), shared=self.world_size > 1)
                table.update(start, values[: max(0, n - start)])
            if table is None:
                raise ValueError("there are no rows to measure")
            return table.compute().reshape(table.values.shape).cpu()


class GatheredRows(Metric):
    """A table of which each process fills some rows; `compute` returns all rows on every process.

    Every row comes from one process and is zero on the others. Their sum is therefore exact, and does not depend on
    the number of processes.

    Args:
        zeros: the empty table.
        shared: whether there are other processes.
    """

    full_state_update = False
    values: Tensor

    def __init__(self, zeros: Tensor, shared: bool) -> None:
        super().__init__(sync_on_compute=shared)
        self.add_state("values", zeros, dist_reduce_fx="sum")
        self.to(zeros.device)

    def update(self, start: int, rows: Tensor) -> None:
        self.values[start : start + len(rows)] = rows

    def compute(self) -> Tensor:
        return self.values
