"""Documents in sequences of tokens, for `data.document_mask`: where they begin, and sequences of whole documents.

The *segments* of a sequence number its documents from 1 on. Tokens that only fill it up are 0.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from seqarch.data.manifest import Split
from seqarch.data.shards import Domain, PackedSequences

Pack = Literal["cut", "whole"]
NO_TARGET = -100
"""The target of a token that predicts nothing."""


class DocumentSequences(PackedSequences):
    """The sequences of a split, each with the borders of its documents."""

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The first token of each document in the split, in order."""
        return np.unique(self.domain.starts(self.split))

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """The pieces of documents in a sequence: the first token of each in the split, and the one after its last."""
        start, stop = self.token_range(index)
        first, last = np.searchsorted(self._starts, (start + 1, stop))
        return list(itertools.pairwise([start, *self._starts[first:last].tolist(), stop]))

    def segments(self, index: int) -> Tensor:
        """The segments of a sequence, `[length]` int32."""
        sizes = [stop - start for start, stop in self.ranges(index)]
        row = np.zeros(self.length, np.int32)
        row[: sum(sizes)] = np.repeat(np.arange(1, len(sizes) + 1), sizes)
        return torch.from_numpy(row)

    def pieces(self, indices: np.ndarray) -> np.ndarray:
        """How many pieces of documents are in each of the sequences `[n]`, with those that only fill up."""
        first = self._token_of(indices)
        return 1 + np.searchsorted(self._starts, first + self.length) - np.searchsorted(self._starts, first, "right")

    def targets(self, indices: np.ndarray) -> np.ndarray:
        """How many tokens are predicted in each of the sequences `[n]`: all but the first of each piece."""
        return self.length - self.pieces(indices)

    def shares(self) -> dict[str, float]:
        """The shares of `targets` among all predictions, of `padded` tokens, and of documents that are `cut`."""
        every = np.arange(len(self))
        ends = np.r_[self._starts[1:], self._first_token[-1]]
        return {
            "targets": float(self.targets(every).sum() / (len(self) * (self.length - 1))),
            "padded": 1 - float(self._tokens(every).sum() / (len(self) * self.length)),
            "cut": float(self._is_cut(self._starts, ends).mean()),
        }

    def _tokens(self, indices: np.ndarray) -> np.ndarray:
        """The tokens of documents in each of the sequences `[n]`."""
        return np.full(len(indices), self.length)

    def _is_cut(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Which documents, from `starts` to before `ends`, are not whole in one sequence."""
        places = []
        for tokens in (starts, ends - 1):
            shard = np.searchsorted(self._first_token, tokens, "right") - 1
            places.append((shard, (tokens - np.array(self._first_token)[shard]) // self.length))
        (shard, number), (last_shard, last_number) = places
        return (shard != last_shard) | (number != last_number) | (last_number >= np.array(self.counts)[last_shard])

    def _token_of(self, indices: np.ndarray) -> np.ndarray:
        """The first token of each sequence in the split."""
        shard = np.searchsorted(self._first_sample, indices, "right") - 1
        return np.array(self._first_token)[shard] + (indices - np.array(self._first_sample)[shard]) * self.length


class WholeDocuments(DocumentSequences):
    """Sequences of whole documents, by the best-fit packing of arXiv 2404.10830 within each shard file.

    A document that is longer than a sequence is cut into whole sequences and a rest. Documents and rests, the longest
    first, go to the fullest sequence that has room for them. The end-of-document token fills sequences up. Pieces of
    one token, which predict nothing, are left out.
    """

    def __init__(self, domain: Domain, split: Split, length: int) -> None:
        super().__init__(domain, split, length)
        packed = [self._pack(*between) for between in itertools.pairwise(self._first_token)]
        self.counts = tuple(len(sizes) for _, sizes in packed)
        self._first_sample = [0, *itertools.accumulate(self.counts)]
        self._packed = np.concatenate([np.empty((0, 2), np.int64), *(pieces for pieces, _ in packed)])
        self._first_piece = np.cumsum(np.r_[0, *(sizes for _, sizes in packed)]).astype(np.int64)
        self._filled = np.diff(np.r_[0, self._packed[:, 1].cumsum()][self._first_piece])

    def _pack(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The pieces `[n, 2]` (first token, tokens) of a shard file by sequence, and how many each sequence has."""
        begins = np.r_[first, self._starts[slice(*np.searchsorted(self._starts, (first + 1, stop)))]]
        sizes = np.diff(np.r_[begins, stop])
        cuts = -(-sizes // self.length)
        number = np.arange(cuts.sum()) - np.repeat(cuts.cumsum() - cuts, cuts)
        tokens = np.minimum(np.repeat(sizes, cuts) - number * self.length, self.length)
        pieces = np.stack([np.repeat(begins, cuts) + number * self.length, tokens], axis=1)[tokens > 1]
        pieces = pieces[np.argsort(-pieces[:, 1], kind="stable")]
        places = np.array(best_fit(pieces[:, 1].tolist(), self.length), np.int64)
        return pieces[np.argsort(places, kind="stable")], np.bincount(places)

    def __getitem__(self, index: int) -> Tensor:
        index = range(len(self))[index]  # an `IndexError` beyond the end
        row = torch.full((self.length,), self.domain.tokenizer.eos_id)
        shard, at = self._shard(index), 0
        for start, stop in self.ranges(index):
            tokens = self._read(shard, start - self._first_token[shard], stop - start)
            row[at : at + len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            at += len(tokens)
        return row

    def ranges(self, index: int) -> list[tuple[int, int]]:
        pieces = self._packed[self._first_piece[index] : self._first_piece[index + 1]]
        return [(start, start + tokens) for start, tokens in pieces.tolist()]

    def token_range(self, index: int) -> tuple[int, int]:
        """First token of the first piece of a sequence, and the one after its last."""
        return self.ranges(index)[0]

    def _tokens(self, indices: np.ndarray) -> np.ndarray:
        return self._filled[indices]

    def _is_cut(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        first, last = (np.searchsorted(self._first_token, tokens, "right") for tokens in (starts, ends - 1))
        return (ends - starts > self.length) | (first != last)

    def pieces(self, indices: np.ndarray) -> np.ndarray:
        return np.diff(self._first_piece)[indices] + (self._filled[indices] < self.length)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        return self._filled[indices] - np.diff(self._first_piece)[indices]

    def describe(self, index: int) -> str:
        return ", ".join(self.domain.describe(self.split, *each) for each in self.ranges(index))


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of each sequence, as rows."""

    sequences: DocumentSequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Tensor:
        return self.sequences.segments(index)


def segments_of(sequences: PackedSequences) -> Segments | None:
    """The segments of each sequence, if they have a document mask."""
    return Segments(sequences) if isinstance(sequences, DocumentSequences) else None


def best_fit(sizes: list[int], room: int) -> list[int]:
    """The number of the bin that each item goes to: the fullest with room for it, or a new one.

    Args:
        sizes: of the items, from the largest to the smallest; each at most `room`.
        room: of a bin.
    """
    bins: list[list[int]] = [[] for _ in range(room + 1)]
    rooms = 0  # bit r is set where there is a bin with room r
    places, count = [], 0
    for size in sizes:
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            place = bins[left].pop()
            rooms ^= 0 if bins[left] else 1 << left
        else:
            left, place, count = room, count, count + 1
        bins[left - size].append(place)
        rooms |= 1 << (left - size)
        places.append(place)
    return places


def usual_documents(sequences: DocumentSequences, rows: int) -> int:
    """A power of two that the documents in `rows` sequences hardly ever exceed: six standard deviations above."""
    pieces = sequences.pieces(np.array(spread(range(len(sequences)), 1 << 16)))
    bound = min(rows * pieces.max(), rows * pieces.mean() + 6 * rows**0.5 * pieces.std())
    return 1 << int(bound).bit_length()


def usual_lengths(mixture: list[tuple[float, DocumentSequences]], n: int = 16) -> list[int]:
    """`n` lengths of documents within inputs, such that equally many tokens of the mixture are in documents of each.

    Args:
        mixture: the share of each domain, and its sequences.
        n: number of lengths.
    """
    lengths, shares = [], []
    for share, sequences in mixture:
        for row in (rows := spread(range(len(sequences)), 256)):
            _, tokens = np.unique(sequences.segments(row)[:-1].numpy(), return_counts=True)
            lengths.append(tokens)
            shares.append(share / len(rows) * tokens / tokens.sum())
    order = np.argsort(joined := np.concatenate(lengths), kind="stable")
    until = np.concatenate(shares)[order].cumsum()
    places = np.searchsorted(until, (np.arange(n) + 0.5) / n * until[-1])
    return joined[order][places].tolist()


def spread(items: Sequence[Any], n: int) -> list[Any]:
    """`n` evenly spread items: at least one, at most all."""
    n = min(len(items), max(1, n))
    return [items[i * len(items) // n] for i in range(n)]


def predicted(segments: Tensor) -> Tensor:
    """Which tokens after the first are targets, `[b, T]` bool for `segments [b, T + 1]`: no first one of a document."""
    return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)


def as_documents(tokens: Tensor, segments: Tensor, count: int = 1) -> dict[str, Tensor]:
    """What makes of `tokens [b, T + 1]` with their segments a batch of documents, for `LanguageModel.loss`.

    Args:
        tokens: the sequences.
        segments: `[b, T + 1]` int32.
        count: number of documents to make room for, N; the next power of two where there are more.

    Returns:
        * `targets [b, T]`: the next token of the same document, or -100;
        * `cu_seqlens [N + 1]` int32: borders of the documents in the `b * T` inputs, one sequence after the other;
        * `loss_scale`: makes the mean over the targets of the sum of their losses.
    """
    kept = predicted(segments)
    return {
        "targets": torch.where(kept, tokens[:, 1:], NO_TARGET),
        "cu_seqlens": borders(segments[:, :-1], count),
        "loss_scale": 1 / kept.sum().clamp_min(1).float(),
    }


def borders(segments: Tensor, count: int = 1) -> Tensor:
    """`cu_seqlens` of the documents in `segments [b, T]`; see `as_documents`. Every row begins a document.

    The last border is repeated, so that batches with other numbers of documents have the same shape.
    """
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    found = begins.flatten().nonzero().squeeze(1)
    while count < len(found):
        count *= 2
    padded = torch.full((count + 1,), segments.numel(), dtype=torch.int32)
    padded[: len(found)] = found
    return padded


Role = Literal["in_domain", "ood"]


@dataclass(frozen=True)
class HoldOut:
    """The whole hold-out of a domain in sequences of T + 1 tokens; the weights of each role sum to 1."""

    domain: str
    role: Role
    weight: float
    tokens: PackedSequences

    @property
    def segments(self) -> Segments | None:
        """With a document mask, the segments of each sequence."""
        return segments_of(self.tokens)


@dataclass(frozen=True)
class EvaluationSet:
    """Fixed sequences of a hold-out. `tokens [n, T+1]` int64; the weights of each role sum to 1.

    `documents [n]` int64 is the document of the hold-out in which each sequence begins. With a document mask,
    `segments [n, T+1]` int32 is the document in the sequence that each token belongs to (`seqarch.data.packing`).
    """

    domain: str
    role: Role
    weight: float
    tokens: Tensor
    documents: Tensor
    segments: Tensor | None = None

    @property
    def text(self) -> Tensor:
        """The tokens one after the other; with a document mask without those that end a document or fill up."""
        return self.tokens.flatten() if self.segments is None else self.tokens[:, :-1][predicted(self.segments)]
