"""`Scorer`: the model that tasks see. Only this module batches rows and shares them between processes."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from seqarch.data.packing import as_documents
from seqarch.data.tokenizers import Tokenizer, begin_document
from seqarch.errors import UserError, several
from seqarch.evaluation.partial import Partial
from seqarch.kernels.tensors import autocast_dtype, bound_documents
from seqarch.mixers.pieces import Piece
from seqarch.model import SequenceLM, generate


class Rows(Protocol):
    """Sequences of equal length: a tensor `[n, T + 1]`, or what reads one row `[T + 1]` at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


Measure = Callable[..., Tensor]
"""Takes the losses `[b, T]` and tokens `[b, T + 1]` of a batch; returns one row per sequence, `[b, ...]`.

With segments it takes them as well, `[b, T + 1]`; a token that is not a target has the loss 0."""


Ids = Sequence[int]
Row = tuple[int, ...]
B = TypeVar("B")
Equals = dict[Row, list[int]]
"""The rows of a batch, each with the indices of all rows that are equal to it."""


@dataclass(eq=False)
class Scorer:
    """Computes losses and texts of one model, in the precision of its training.

    Args:
        lm: the model, on its device.
        tokenizer: of the model's token ids, for tasks that read or write text.
        context: returns the context of a forward pass, such as autocast.
        batch_size: sequences per forward pass and process, where all have one length.
        max_tokens: tokens per forward pass and process, where lengths differ; a longer sequence has a pass of its own.
        prefix: whether every prompt begins with the token that begins a document, or one EOS token where none does.
        length: tokens of a training sequence, if `cut` prompts should not be longer.
        rank: of this process among those that share the work.
        world_size: number of these processes.
        shared: this process's piece of each sequence whose losses `measure` computes, where several processes share it.
        progress: called after each batch with the share of the call's work that is done.

    With a `partial`, the scorer keeps what it measures there; only for a single process.
    """

    lm: SequenceLM
    tokenizer: Tokenizer | None = None
    _: KW_ONLY
    context: Callable[[], AbstractContextManager] = nullcontext
    batch_size: int = 16
    max_tokens: int = 8192
    prefix: bool = True
    length: int | None = None
    rank: int = 0
    world_size: int = 1
    shared: Piece | None = None
    progress: Callable[[float], None] = lambda share: None
    partial: Partial | None = field(default=None, init=False)

    @property
    def device(self) -> torch.device:
        return next(self.lm.parameters()).device

    @property
    def text(self) -> Tokenizer:
        """The tokenizer, for tasks that read or write text."""
        assert self.tokenizer is not None
        return self.tokenizer

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

    def measure(self, rows: Rows, of: Measure, *, pieces: bool = False, segments: Rows | None = None) -> Tensor:
        """Apply `of` to the losses of each batch, and gather its rows from all processes.

        Each process takes its share of the batches. Every batch has the same shape: the last one is filled up with
        rows that do not count. So a compiled model is compiled once, and sharded processes stay in step. With `pieces`
        a pass has at most `max_tokens`, and longer rows are read in pieces through the decoding state.
        With `segments` (`seqarch.data.packing`) no token sees another document, as in training with a document mask.
        Processes that share sequences take the same batches, and each computes the losses of its piece.

        Returns:
            `[n, ...]` on the CPU, in the type that `of` returns, the same on all processes.
        """
        size = max(1, self.max_tokens // (len(rows[0]) - 1)) if pieces else self.batch_size
        batches = [[*range(start, min(start + size, len(rows)))] for start in range(0, len(rows), size)]
        piece = None if pieces else self._piece_of(len(rows[0]) - 1)

        def measured(batch: list[int]) -> Tensor:
            filled = [*batch, *[len(rows) - 1] * (size - len(batch))]
            tokens = torch.stack([rows[index] for index in filled]).to(self.device)
            if segments is not None:
                inside = torch.stack([segments[index] for index in filled])
                losses = self._of_documents(tokens, inside, piece)
                return of(losses, tokens, inside.to(self.device))[: len(batch)]
            losses = self._in_pieces(tokens) if pieces else self._losses([tokens[:, :-1], tokens[:, 1:]], piece)
            return of(losses, tokens)[: len(batch)]

        with self.evaluating():
            return self._gather(len(rows), batches, lambda batch: batch, measured, piece)

    def _piece_of(self, length: int) -> Piece | None:
        """This process's piece of sequences of a length; none if they are not split into equal pieces."""
        if self.shared is None or length % self.shared.size:
            return None
        return self.shared.of_row(length)

    def _losses(self, rows: list[Tensor], piece: Piece | None, cu_seqlens: Tensor | None = None) -> Tensor:
        """The losses `[b, T]` of inputs and targets, of which this process computes a piece if there is one."""
        if piece is None:
            return self.lm(*rows, cu_seqlens=cu_seqlens, reduction="none")
        own = self.lm(*map(piece.cut, rows), cu_seqlens=cu_seqlens, reduction="none", piece=piece)
        return piece.gathered(own)

    def _of_documents(self, tokens: Tensor, segments: Tensor, piece: Piece | None) -> Tensor:
        """The losses `[b, T]` of `tokens [b, T + 1]`, each document read by itself; `segments` are on the CPU."""
        most = max(1, segments.numel() // 64)  # in each batch, so that a compiled model is compiled once
        documents = as_documents(tokens.cpu(), segments, most)
        targets, cu_seqlens = (documents[name].to(self.device) for name in ("targets", "cu_seqlens"))
        bound_documents(cu_seqlens, targets.shape[1])
        rows = [each.reshape(1, -1) for each in (tokens[:, :-1], targets)]
        return self._losses(rows, piece and piece.of_row(targets.numel()), cu_seqlens).view_as(targets)

    def _in_pieces(self, tokens: Tensor) -> Tensor:
        """The losses `[b, T]` of rows `[b, T + 1]`, at most `max_tokens` in one pass."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        dtype = autocast_dtype(next(self.lm.parameters()))
        state = self.lm.init_state(len(inputs), inputs.shape[1], self.device, dtype)
        cut = [each.split(max(1, self.max_tokens // len(tokens)), dim=1) for each in (inputs, targets)]
        return torch.cat([self.lm(*piece, state=state, reduction="none") for piece in zip(*cut, strict=True)], dim=1)

    def prompt(self, ids: Ids) -> list[int]:
        """The tokens that the model reads for `ids`: `begin_document`, unless `prefix` is off."""
        if self.tokenizer is None or not (self.prefix or len(ids) == 0):
            return list(ids)
        return begin_document(self.tokenizer, ids, alone=self.lm.document_mask)

    def excess(self, prompt: Ids, new: int) -> int:
        """How many tokens on the left of `prompt(...)` do not fit into a training sequence with `new` tokens after it.

        lm-evaluation-harness cuts them, also for models that could read longer prompts.

        Raises:
            UserError: no token of the prompt fits.
        """
        n, length = len(self.prompt(prompt)), self.length or math.inf
        if new >= length:
            raise UserError(f"the model was trained on {self.length} tokens: no prompt fits before {new} tokens")
        return int(max(0, n + new - length))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return self.text.encode(text)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of two texts that follow each other, split as lm-evaluation-harness splits them.

        Spaces at the end of the context go to the continuation, whose tokens are those that it adds to the context's.
        """
        whole, before = self.encode(context + continuation), self.encode(context.rstrip())
        return whole[: len(before)], whole[len(before) :]

    def log_likelihood(self, pairs: Sequence[tuple[Ids, Ids]], *, cut: bool = False) -> Tensor:
        """Log-probabilities of continuations after their contexts.

        Pairs with equal inputs (answers of one token) share a row. Rows are padded on the right, which a causal model
        never sees, and batched by length.

        Args:
            pairs: tokens of contexts and continuations, each continuation at least one.
            cut: whether to leave out the `excess` of each context.

        Returns:
            `[n, 2]` float64 on the CPU: the log-probability of the continuation in nats, and 1 where each of its tokens
            is the most likely one, else 0.

        Raises:
            UserError: a continuation is empty, or too long for `cut`.
        """
        if empty := [index for index, (_, continuation) in enumerate(pairs) if not continuation]:
            raise UserError(f"the continuation of pair {empty[0]} is empty: give at least one token")
        rows = []
        for context, continuation in pairs:
            excess = self.excess(context, len(continuation) - 1) if cut else 0
            rows.append((*self.prompt(context)[excess:], *continuation[:-1]))
        answers = [continuation for _, continuation in pairs]
        with self._evaluating_texts():
            return self._gather_texts(rows, lambda asked: self._likelihoods(asked, answers))

    def _likelihoods(self, batch: Equals, answers: Sequence[Ids]) -> Tensor:
        """The rows `[2]` of `log_likelihood` for the `asked` answers to each row of a batch, one after the other."""
        counts = [max(len(answers[index]) for index in each) for each in batch.values()]
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        at = torch.zeros_like(tokens, dtype=torch.bool)
        for i, (row, count) in enumerate(zip(batch, counts, strict=True)):
            at[i, len(row) - count : len(row)] = True
        logits = self.lm(tokens.to(self.device), at=at.to(self.device))
        where, targets, sizes = [], [], []
        for end, each in zip(itertools.accumulate(counts), batch.values(), strict=True):
            for answer in (answers[index] for index in each):
                where += range(end - len(answer), end)
                targets += answer
                sizes.append(len(answer))
        logits, target = logits[where].float(), torch.tensor(targets, device=self.device)
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none").double().cpu()
        parts = zip(losses.split(sizes), (logits.argmax(dim=1) == target).cpu().split(sizes), strict=True)
        return torch.stack([torch.stack([-loss.sum(), best.all().double()]) for loss, best in parts])

    def generate(
        self, prompts: Sequence[Ids], max_new: int, stop: str | Sequence[str] = (), *, cut: bool = False
    ) -> list[str]:
        """The most likely continuation of each prompt as text: up to EOS, a stop string or `max_new` tokens.

        With `cut`, the `excess` of each prompt is left out.

        Raises:
            UserError: a mixer of the model cannot decode, the model is sharded, or `max_new` is too long for `cut`.
        """
        if self.world_size > 1 and any(isinstance(each, DTensor) for each in self.lm.parameters()):
            raise UserError("a sharded model writes no text while it trains: score its checkpoint with seqarch eval")
        stop = several(stop)
        rows = [tuple(self.prompt(prompt)[self.excess(prompt, max_new) if cut else 0 :]) for prompt in prompts]

        def drawn(asked: Equals) -> Tensor:
            ids = [torch.tensor(row) for row in asked]
            found = generate(self.lm, ids, max_new, temperature=0, stop=lambda row, new: self._ends(new, stop))
            padded = [torch.nn.functional.pad(new + 1, (0, max_new - len(new))) for new in found]  # 0 is no token
            return torch.stack([new for new, each in zip(padded, asked.values(), strict=True) for _ in each])

        with self._evaluating_texts(nullcontext):
            return [self._text(row, stop) for row in self._gather_texts(rows, drawn).tolist()]

    def _ends(self, new: list[int], stop: Sequence[str]) -> bool:
        """Whether all texts end with these tokens."""
        return new[-1] == self.text.eos_id or any(each in self.text.decode(new) for each in stop)

    def _text(self, row: Sequence[int], stop: Sequence[str]) -> str:
        text = self.text.decode([token - 1 for token in row if token and token != self.text.eos_id + 1])
        return text[: min((text.index(each) for each in stop if each in text), default=len(text))]

    @contextmanager
    def _evaluating_texts(self, context: Callable[[], AbstractContextManager] | None = None) -> Iterator[None]:
        """`evaluating`, in the given context, without compiled code, which would be compiled anew for each length."""
        if self.tokenizer is None:
            raise UserError("a Scorer without a tokenizer reads and writes no text")
        with self.evaluating(context), torch.compiler.set_stance("force_eager"):
            yield

    def _gather_texts(self, rows: Sequence[Row], compute: Callable[[Equals], Tensor]) -> Tensor:
        """`_gather` batches of at most `max_tokens`, the longest rows first; rows that are equal are computed once."""
        places: Equals = {}
        for index, row in enumerate(rows):
            places.setdefault(row, []).append(index)
        batches: list[Equals] = []
        for row in sorted(places, key=len, reverse=True):
            if not batches or (len(batches[-1]) + 1) * len(next(iter(batches[-1]))) > self.max_tokens:
                batches.append({})
            batches[-1][row] = places[row]
        return self._gather(len(rows), batches, lambda asked: list(itertools.chain(*asked.values())), compute)

    def _gather(
        self,
        n: int,
        batches: Sequence[B],
        indices: Callable[[B], list[int]],
        compute: Callable[[B], Tensor],
        piece: Piece | None = None,
    ) -> Tensor:
        """Share the batches between the processes, and gather a table of `n` rows on all of them.

        All processes compute equally many batches, so that sharded ones stay in step. Every row comes from one process
        and is zero on the others. Their sum is therefore exact, and does not depend on the number of processes. Rows
        that `partial` knows from an interrupted call are not computed again.

        Args:
            n: rows of the table.
            batches: what `indices` and `compute` take.
            indices: the rows that a batch fills.
            compute: these rows, `[len(indices(batch)), ...]`.
            piece: of the rows, if several processes compute each of them together.
        """
        if not batches:
            raise ValueError("there are no rows to measure")
        done = self.partial.begin() if self.partial else []
        known = {index for rows, _ in done for index in rows}
        todo = [batch for batch in batches if not known.issuperset(indices(batch))]
        values = done[0][1] if done else torch.empty(0)
        size, first = (piece.size, piece.rank == 0) if piece else (1, True)
        rank, count = self.rank // size, self.world_size // size
        for start in range(0, len(todo), count):
            batch = todo[min(start + rank, len(todo) - 1)]
            values = compute(batch).to(self.device if self.world_size > 1 else "cpu")
            if first and start + rank < len(todo):
                done.append((indices(batch), values))
            if self.partial:
                self.partial.save()
            self.progress(1 - max(0, len(todo) - start - count) / len(batches))
        table = values.new_zeros(n, *values.shape[1:])
        for rows, values in done:
            table[rows] = values
        if self.world_size > 1:
            torch.distributed.all_reduce(table)
        return table.cpu()
