"""The parts of hold-outs that evaluation measures: whole, or fixed sequences of them."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from seqarch.data.packing import Segments, predicted, segments_of
from seqarch.data.shards import PackedSequences

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
