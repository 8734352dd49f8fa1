"""Measures how much a model saves when it reads held-out text again, by the distance between the two readings."""

import hashlib
from typing import Annotated

import torch
from torch import Tensor

from seqarch.arguments import FILLED, Count, Interval, Steps
from seqarch.data.datamodule import TextDataModule
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task
from seqarch.runs import tags

Passage = Annotated[int, Interval(2)]


class RepeatGain(Task):
    """The nats per token that a model saves on text which it read some distance before: `repeat_gain/<distance>`.

    A row is a passage of held-out text, as many tokens of other text as the distance, and the passage again. Its loss
    is taken from the loss of a row that begins with another passage and is equal otherwise. So position and filler
    cancel, and 0 means that the model remembers nothing. The first token of the passage does not count. All text is
    the evaluation set of the first training domain, at fixed places: every model reads the same rows. A row is one
    document, also with a document mask.

    Args:
        sequences: rows per distance.
        passage: tokens that are read again.
        distances: tokens between the two readings. The default is 256, 512, ... as far as a row has at most
            `data.sequence_length` tokens.

    Raises:
        UserError: the training sequences or the hold-out are too short.
    """

    group = "recall"

    def __init__(
        self, sequences: Count = 32, passage: Passage = 256, distances: Annotated[list[Steps], FILLED] | None = None
    ) -> None:
        self.sequences = sequences
        self.passage = passage
        self.distances = distances

    def held_out(self, data: TextDataModule) -> dict[str, str]:
        first = data.evaluation_sets()[0]
        return {first.domain: hashlib.sha256(first.tokens.numpy().tobytes()).hexdigest()}

    def prepare(self, data: TextDataModule) -> None:
        room = data.sequence_length - 2 * self.passage
        distances = self.distances or [256 << k for k in range(32) if 256 << k <= room]
        if not distances:
            Interval(2 * self.passage + 256).check("data.sequence_length for RepeatGain.passage", data.sequence_length)
        text = data.evaluation_sets()[0].text
        longest = 2 * self.passage + max(distances)
        Interval(longest).check("tokens of held-out text (data.eval_tokens) for RepeatGain.distances", len(text))
        starts = [i * (len(text) - longest) // max(1, self.sequences - 1) for i in range(self.sequences)]
        self.rows = {distance: self._rows(text, starts, distance) for distance in distances}

    def _rows(self, text: Tensor, starts: list[int], distance: int) -> Tensor:
        """`[2 * sequences, 2 * passage + distance]`: first the rows that repeat their passage, then the others."""
        n = self.passage
        parts = [text[start : start + 2 * n + distance].split([n, n, distance]) for start in starts]
        repeated = [torch.cat([again, filler, again]) for again, _, filler in parts]
        fresh = [torch.cat([other, filler, again]) for again, other, filler in parts]
        return torch.stack(repeated + fresh)

    def score(self, scorer: Scorer) -> Scores:
        samples = {}
        for distance, rows in self.rows.items():
            # The mean loss on the passage at the end of each row, `[b]` float64.
            repeated, fresh = scorer.measure(rows, lambda x, _: x[:, 1 - self.passage :].double().mean(dim=1)).chunk(2)
            samples[tags.repeat_gain(distance)] = (fresh - repeated).numpy()
        return Scores.of(samples)
