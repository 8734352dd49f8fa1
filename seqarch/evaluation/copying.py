"""Whether a model looks up what followed a token before: its loss on random tokens, and on the same tokens again."""

import functools
from typing import Annotated

import torch

from seqarch.arguments import Count, Interval
from seqarch.data.datamodule import TextDataModule
from seqarch.evaluation.losses import mean_by_range
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task
from seqarch.runs import tags


class Copying(Task):
    """The loss on random tokens and on the same tokens again: `copying/loss_first`, `copying/loss_again`, in nats.

    Each row is a reading of random tokens, repeated until the row is as long as a training sequence. Only the first
    reading tells the second, so the fall of the loss between them, `copying/gain`, measures copying (the induction of
    arXiv 2209.11895, section 2). Neither loss includes the first token of its reading. The tokens are drawn from the
    first training domain's evaluation set, by the task's own generator: every model gets the same rows. A row is one
    document, also with a document mask.

    Args:
        sequences: number of rows.
        reading: tokens of a reading; at most half of a training sequence.
    """

    group = "loss"

    def __init__(self, sequences: Count = 64, reading: Annotated[int, Interval(2)] = 256) -> None:
        self.sequences = sequences
        self.reading = reading

    def prepare(self, data: TextDataModule) -> None:
        length = data.sequence_length + 1
        Interval(3).check("data.sequence_length for Copying", data.sequence_length)
        self.half = min(self.reading, length // 2)
        text = data.evaluation_sets()[0].text
        generator = torch.Generator().manual_seed(0)
        drawn = text[torch.randint(len(text), (self.sequences, self.half), generator=generator)]
        self.tokens = drawn.repeat(1, -(-length // self.half))[:, :length]

    def score(self, scorer: Scorer) -> Scores:
        readings = [(0, self.half - 1), (self.half, 2 * self.half - 1)]
        means = scorer.measure(self.tokens, functools.partial(mean_by_range, ranges=readings))
        first, again = means.mean(dim=0).tolist()
        return Scores({tags.COPYING_FIRST: first, tags.COPYING_AGAIN: again, tags.COPYING_GAIN: first - again})
