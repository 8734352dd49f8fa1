"""`Scorer`: the model that tasks see. Only this module batches rows and shares them between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from seqarch.data.tokenizers import Tokenizer
from seqarch.errors import UserError
from seqarch.model import SequenceLM, generate


class Rows(Protocol):
    """Sequences of equal length: a tensor `[n, T + 1]`, or what reads one row `[T + 1]` at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


Measure = Callable[[Tensor, Tensor], Tensor]
"""Takes the losses `[b, T]` and tokens `[b, T + 1]` of a batch; returns one row per sequence, `[b, ...]`."""


Ids = Sequence[int]
Row = tuple[int, ...]


class Scorer:
    """Computes losses and texts of one model, in the precision of its training.

    Args:
        lm: the model, on its device.
        tokenizer: of the model's token ids, for tasks that read or write text.
        context: returns the context of a forward pass, such as autocast.
        batch_size: sequences per forward pass and process, where all have one length.
        max_tokens: tokens per forward pass and process, where lengths differ; a longer sequence has a pass of its own.
        prefix: whether one EOS token stands before every prompt, as before every document but the first in training.
        rank: of this process among those that share the work.
        world_size: number of these processes.
        progress: called with the share of the work that is done, after each batch.
    """

    def __init__(
        self,
        lm: SequenceLM,
        tokenizer: Tokenizer | None = None,
        *,
        context: Callable[[], AbstractContextManager] = nullcontext,
        batch_size: int = 16,
        max_tokens: int = 8192,
        prefix: bool = True,
        rank: int = 0,
        world_size: int = 1,
        progress: Callable[[float], None] = lambda share: None,
    ) -> None:
        self.lm = lm
        self.tokenizer = tokenizer
        self.context = context
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.prefix = prefix
        self.rank = rank
        self.world_size = world_size
        self.progress = progress

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    @contextmanager
    def evaluating(self, context: Callable[[], AbstractContextManager] | None = None) -> Iterator[None]:
        """The model in evaluation mode, without gradients and in the precision of its training or another `context`."""
        training = self.lm.training
        self.lm.eval()
        try:
            with torch.no_grad(), (context or self.context)():
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
                self.progress(min(1.0, (start + self.batch_size) / n))
            if table is None:
                raise ValueError("there are no rows to measure")
            return table.compute().reshape(table.values.shape).cpu()

    def prompt(self, ids: Ids) -> list[int]:
        """The tokens that the model reads for `ids`: one EOS token before them, unless `prefix` is off."""
        if self.tokenizer is None or not (self.prefix or len(ids) == 0):
            return list(ids)
        return [self.tokenizer.eos_id, *ids]

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        assert self.tokenizer is not None
        return self.tokenizer.encode(text)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of two texts that follow each other, split as lm-evaluation-harness splits them.

        Spaces at the end of the context go to the continuation, whose tokens are those that it adds to the context's.
        """
        whole, before = self.encode(context + continuation), self.encode(context.rstrip())
        return whole[: len(before)], whole[len(before) :]

    def log_likelihood(self, pairs: Sequence[tuple[Ids, Ids]]) -> Tensor:
        """Log-probabilities of continuations after their contexts.

        Pairs with equal inputs (answers of one token) share a row. Rows are padded on the right, which a causal model
        never sees, and batched by length.

        Args:
            pairs: tokens of contexts and continuations, each continuation at least one.

        Returns:
            `[n, 2]` float64 on the CPU: the log-probability of the continuation in nats, and 1 where each of its tokens
            is the most likely one, else 0.
        """
        rows: dict[Row, list[tuple[int, Ids]]] = {}
        for index, (context, continuation) in enumerate(pairs):
            rows.setdefault((*self.prompt(context), *continuation[:-1]), []).append((index, continuation))
        with self._evaluating_texts():
            table = self._table(len(pairs), 2, dtype=torch.float64)
            for batch, mine in self._batches(list(rows)):
                values = self._of_batch(batch, [rows[row] for row in batch])
                for index, value in values.items() if mine else ():
                    table.update(index, value[None])
            return table.compute().reshape(table.values.shape).cpu()

    def _of_batch(self, batch: Sequence[Ids], asked: Sequence[Sequence[tuple[int, Ids]]]) -> dict[int, Tensor]:
        """The rows `[2]` of `log_likelihood` by index; every row of the batch is asked for some continuations."""
        counts = [max(len(continuation) for _, continuation in each) for each in asked]
        tokens = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long)
        at = torch.zeros_like(tokens, dtype=torch.bool)
        for i, (row, count) in enumerate(zip(batch, counts, strict=True)):
            tokens[i, : len(row)] = torch.tensor(row)
            at[i, len(row) - count : len(row)] = True
        logits = self.lm(tokens.to(self.device), at=at.to(self.device))
        where, targets, sizes, indices = [], [], [], []
        for end, each in zip(torch.tensor(counts).cumsum(0).tolist(), asked, strict=True):
            for index, continuation in each:
                where += range(end - len(continuation), end)
                targets += continuation
                sizes.append(len(continuation))
                indices.append(index)
        logits, target = logits[where].float(), torch.tensor(targets, device=self.device)
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none").double().cpu()
        likeliest = (logits.argmax(dim=1) == target).cpu()
        parts = zip(indices, losses.split(sizes), likeliest.split(sizes), strict=True)
        return {index: torch.stack([-loss.sum(), best.all().double()]) for index, loss, best in parts}

    def generate(self, prompts: Sequence[Ids], max_new: int, stop: Sequence[str] = ()) -> list[str]:
        """The most likely continuation of each prompt as text: up to EOS, a stop string or `max_new` tokens.

        Raises:
            UserError: a mixer of the model cannot decode, or the model is sharded.
        """
        if self.world_size > 1 and any(isinstance(each, DTensor) for each in self.lm.parameters()):
            raise UserError("a sharded model writes no text while it trains: score its checkpoint with seqarch eval")
        rows = [tuple(self.prompt(prompt)) for prompt in prompts]
        places: dict[Row, list[int]] = {}
        for index, row in enumerate(rows):
            places.setdefault(row, []).append(index)
        with self._evaluating_texts(nullcontext):
            table = self._table(len(rows), max_new, dtype=torch.long)
            for batch, mine in self._batches(list(places)):
                ids = [torch.tensor(row) for row in batch]
                drawn = generate(self.lm, ids, max_new, temperature=0, stop=lambda row, new: self._ends(new, stop))
                for row, new in zip(batch, drawn, strict=True):
                    for index in places[row] if mine else ():
                        padded = torch.nn.functional.pad(new + 1, (0, max_new - len(new)))  # 0 is no token
                        table.update(index, padded[None])
            return [self._text(row, stop) for row in table.compute().reshape(table.values.shape).tolist()]

    def _ends(self, new: list[int], stop: Sequence[str]) -> bool:
        """Whether no text needs a token after these."""
        assert self.tokenizer is not None
        return new[-1] == self.tokenizer.eos_id or any(each in self.tokenizer.decode(new) for each in stop)

    def _text(self, row: Sequence[int], stop: Sequence[str]) -> str:
        assert self.tokenizer is not None
        ids = [token - 1 for token in row if token and token != self.tokenizer.eos_id + 1]
        text = self.tokenizer.decode(ids)
        return text[: min((text.index(each) for each in stop if each in text), default=len(text))]

    def _table(self, *shape: int, dtype: torch.dtype) -> GatheredRows:
        """An empty table, where the processes can gather it."""
        shared = self.world_size > 1
        return GatheredRows(torch.zeros(shape, dtype=dtype, device=self.device if shared else "cpu"), shared)

    @contextmanager
    def _evaluating_texts(self, context: Callable[[], AbstractContextManager] | None = None) -> Iterator[None]:
        """`evaluating`, in the given context, without compiled code, which would be compiled anew for each length."""
        if self.tokenizer is None:
            raise UserError("a Scorer without a tokenizer reads and writes no text")
        with self.evaluating(context), torch.compiler.set_stance("force_eager"):
            yield

    def _batches(self, rows: list[Row]) -> Iterator[tuple[list[Row], bool]]:
        """This process's batches of at most `max_tokens`, the longest rows first, and whether their results count.

        All processes get as many batches, so that sharded ones stay in step.
        """
        batches: list[list[Row]] = []
        for row in sorted(rows, key=len, reverse=True):
            last = batches[-1] if batches else []
            if last and (len(last) + 1) * len(last[0]) <= self.max_tokens:
                last.append(row)
            else:
                batches.append([row])
        total, done = sum(map(len, rows)), 0
        for start in range(0, len(batches), self.world_size):
            own = start + self.rank
            yield batches[min(own, len(batches) - 1)], own < len(batches)
            done += sum(len(row) for batch in batches[start : start + self.world_size] for row in batch)
            self.progress(done / total)


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
