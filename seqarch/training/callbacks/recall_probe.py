"""Measures how much a model recalls while it trains."""

from __future__ import annotations

from seqarch.evaluation import RepeatGain
from seqarch.training.callbacks.evaluate_tasks import EvaluateTasks


class RecallProbe(EvaluateTasks):
    """Logs the nats per token that reading held-out text again saves, by distance (task `RepeatGain`).

    It reads fixed rows and draws no random number, so a run with the callback trains exactly like one without.

    Args:
        every_n_steps: distance between two measurements in optimizer steps; 0 for none.
        at: when to measure instead, as shares of the training: 0.5 is the step half-way through, 1 the last.
        sequences: rows per distance.
        passage: tokens that are read again.
        distances: tokens between the two readings. The default is 256, 512, ... as far as a row has at most
            `data.sequence_length` tokens.
    """

    key = "recall_probe"

    def __init__(
        self,
        every_n_steps: int = 0,
        at: list[float] | None = None,
        sequences: int = 32,
        passage: int = 256,
        distances: list[int] | None = None,
    ) -> None:
        super().__init__([RepeatGain(sequences, passage, distances)], every_n_steps, at)
