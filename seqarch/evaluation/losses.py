"""Tasks that measure the language-model loss on the hold-outs: by domain, and by position in the sequence."""

import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from seqarch.arguments import Limit
from seqarch.data.datamodule import EvaluationSet, HoldOut, TextDataModule
from seqarch.data.packing import predicted
from seqarch.errors import SeqarchWarning, UserError
from seqarch.evaluation.bits_per_byte import bits_per_byte, text_bytes
from seqarch.evaluation.recall import frequent_bigrams, recallable
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task
from seqarch.runs import tags

LEAST_LEAK = 0.2
"""Nats per token by which later tokens change the losses of a model that is not causal. Rounding stays below it."""
CUTS = 8


class LossByDomain(Task):
    """The loss on each domain's hold-out, in nats per token, and its split into recallable and other tokens.

    Metrics: `loss/<role>/<domain>`, their weighted means `loss/in_domain` and `loss/ood`; for each set also
    `loss_recallable/<role>/<domain>`, `loss_other/<role>/<domain>` and `share_recallable/<role>/<domain>`, the share of
    the tokens that are recallable (`seqarch.evaluation.recall`), and `bits_per_byte/<role>/<domain>`
    (`seqarch.evaluation.bits_per_byte`). A part without tokens has no loss.

    With a document mask (`data.document_mask`) no token sees another document, the first token of a document is not a
    target, and a token is recallable from its own document only. All metrics are then means over the targets; samples
    are divided by the mean number of targets.

    Samples: the loss of each sequence, `loss/<role>/<domain>` float32 `[n]`, and the document of the hold-out in which
    the sequence begins, `document/<role>/<domain>` int32 `[n]`.

    Args:
        whole: measure whole hold-outs, without samples, instead of the evaluation sets (`data.eval_tokens`).
    """

    group = "loss"

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def prepare(self, data: TextDataModule) -> None:
        self.sets = data.hold_outs() if self.whole else data.evaluation_sets()
        self.frequent = frequent_bigrams(data)
        self.n_bytes = [0] * len(self.sets)
        try:
            self.n_bytes = [text_bytes(each, data.tokenizer) for each in self.sets]
        except UserError as error:  # training on shards does not need the tokenizer's package
            warnings.warn(f"no bits_per_byte is measured: {error}", SeqarchWarning, stacklevel=2)

    def score(self, scorer: Scorer) -> Scores:
        check_causal(scorer, self.sets[0].tokens[0])
        split = functools.partial(split_losses, frequent=self.frequent.to(scorer.device))
        measured = [scorer.measure(each.tokens, split, segments=each.segments) for each in self.sets]
        # with a document mask not all positions have a target, and the columns are means over targets
        tables = [each if each.shape[1] == 3 else each[:, :3] / each[:, 3].mean() for each in measured]
        metrics = loss_metrics(self.sets, [float(table[:, 0].contiguous().mean()) for table in tables])
        samples: dict[str, np.ndarray] = {}
        for each, table, whole, n_bytes in zip(self.sets, tables, measured, self.n_bytes, strict=True):
            metrics |= part_metrics(each.role, each.domain, table)
            nats = float(whole[:, 0].sum()) * (len(each.tokens[0]) - 1)
            metrics |= bits_per_byte(each, nats, n_bytes)
            if isinstance(each, EvaluationSet):
                samples[tags.loss(each.role, each.domain)] = table[:, 0].numpy().astype(np.float32)
                samples[f"document/{each.role}/{each.domain}"] = each.documents.numpy().astype(np.int32)
        return Scores(metrics, samples)


class Rising(Limit):
    """Positions that rise from 1 on."""

    def check(self, name: str, value: Any) -> None:
        whole = isinstance(value, list) and all(isinstance(each, int) for each in value)
        if value is not None and not (whole and value and [0, *value] == sorted({0, *value})):
            raise UserError(f"{name} must be rising positions from 1 on, not {value}")


Edges = Annotated[list[int], Rising()]


class LossByPosition(Task):
    """The mean loss in ranges of positions, `loss_by_position/<domain>/<from>-<to>`, in nats per token.

    Position `t` is that of a prediction from `t + 1` tokens; a range includes `from` and excludes `to`. With a document
    mask these are positions in the document.

    Args:
        edges: where ranges after the first begin; by default 64, 128, 256 and so on.
    """

    group = "loss"

    def __init__(self, edges: Edges | None = None) -> None:
        self.edges = edges

    def prepare(self, data: TextDataModule) -> None:
        self.sets = data.evaluation_sets()
        edges = self.edges or [64 << n for n in range(32)]
        edges = [0, *(edge for edge in edges if edge < data.sequence_length), data.sequence_length]
        self.ranges = list(itertools.pairwise(edges))

    def score(self, scorer: Scorer) -> Scores:
        metrics: dict[str, float] = {}
        by_range = functools.partial(mean_by_range, ranges=self.ranges)
        in_document = functools.partial(sums_by_range, ranges=self.ranges)
        for each in self.sets:
            if each.segments is None:
                sums, counts = scorer.measure(each.tokens, by_range).mean(dim=0), torch.ones(len(self.ranges))
            else:
                sums, counts = scorer.measure(each.tokens, in_document, segments=each.segments).sum(dim=0)
            for (start, stop), total, count in zip(self.ranges, sums.tolist(), counts.tolist(), strict=True):
                if count:  # a document reaches that range
                    metrics[tags.loss_by_position(each.domain, start, stop)] = total / count
        return Scores(metrics)


def mean_by_range(losses: Tensor, tokens: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The mean of `losses [b, T]` in each range of positions, `[b, R]` float64."""
    return torch.stack([losses[:, start:stop].double().mean(dim=1) for start, stop in ranges], dim=1)


def sums_by_range(losses: Tensor, tokens: Tensor, segments: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Sums of `losses [b, T]` in each range of positions in the document, and numbers of targets, `[b, 2, R]`."""
    index = torch.arange(losses.shape[1], device=losses.device).expand_as(losses)
    begins = torch.ones_like(losses, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:-1] != segments[:, :-2]
    positions = index - torch.where(begins, index, 0).cummax(dim=1).values
    within = [predicted(segments) & (positions >= start) & (positions < stop) for start, stop in ranges]
    sums = [torch.where(each, losses.double(), 0).sum(dim=1) for each in within]
    return torch.stack([torch.stack(sums, dim=1), torch.stack(within, dim=2).sum(dim=1).double()], dim=1)


def split_losses(losses: Tensor, tokens: Tensor, segments: Tensor | None = None, *, frequent: Tensor) -> Tensor:
    """For each sequence the mean loss, the part of this mean that is due to recallable tokens, and their share.

    Args:
        losses: `[b, T]`.
        tokens: `[b, T + 1]`.
        segments: `[b, T + 1]`, with a document mask.
        frequent: `[K]` codes of bigrams that are frequent in training.

    Returns:
        `[b, 3]` float64; with segments a fourth column, the share of positions with a target, and means over all.
    """
    losses, hits = losses.double(), recallable(tokens, frequent, segments)
    columns = [losses, torch.where(hits, losses, 0), hits.double()]
    if segments is not None:
        columns.append(predicted(segments).double())
    return torch.stack([column.mean(dim=1) for column in columns], dim=1)


def part_metrics(role: str, domain: str, table: Tensor) -> dict[str, float]:
    """The losses of the recallable and of the other tokens of a set, and the share of recallable tokens.

    Weighted by their shares, the two losses add up to the loss of the set.

    Args:
        role: of the set.
        domain: of the set.
        table: `[n, 3]` of `split_losses`.
    """
    loss, part, share = table.mean(dim=0).tolist()
    metrics = {tags.share_recallable(role, domain): share}
    if share > 0:
        metrics[tags.loss_recallable(role, domain)] = part / share
    if share < 1:
        metrics[tags.loss_other(role, domain)] = (loss - part) / (1 - share)
    return metrics


def loss_metrics(sets: Sequence[HoldOut | EvaluationSet], losses: Sequence[float]) -> dict[str, float]:
    """The loss of each set under its tag, and the weighted means `loss/in_domain` and `loss/ood`."""
    metrics = {tags.loss(each.role, each.domain): loss for each, loss in zip(sets, losses, strict=True)}
    for role in (tags.IN_DOMAIN, tags.OOD):
        weighted = [(each.weight, loss) for each, loss in zip(sets, losses, strict=True) if each.role == role]
        if weighted:
            metrics[tags.loss(role)] = sum(weight * loss for weight, loss in weighted) / sum(w for w, _ in weighted)
    return metrics


def check_causal(scorer: Scorer, row: Tensor) -> None:
    """Raise `UserError` if later tokens change earlier losses: such losses say nothing about a model."""
    if (leak := leak_of_later_tokens(scorer, row)) > LEAST_LEAK:
        by = f"{leak:.2g} nats per token; seqarch.testing.MixerSuite finds the mixer"
        raise UserError(f"the model is not causal: later tokens change its losses by {by}")


def leak_of_later_tokens(scorer: Scorer, row: Tensor) -> float:
    """Mean change of the loss of a token, in nats, where tokens after it are replaced.

    The row is read many times. Each time its tokens from another place on are replaced, and the loss of the token
    before this place must stay.

    Args:
        scorer: the model; its batches have the shape and strides of `Scorer.measure`, so nothing is compiled anew.
        row: `[T + 1]` tokens.
    """
    size, length = scorer.batch_size, len(row) - 1
    cuts = torch.linspace(length, 1, size * math.ceil(CUTS / size)).long().unsqueeze(1)  # the first replaces nothing
    batches = torch.where(torch.arange(length + 1) < cuts, row, row[0]).to(scorer.device).split(size)
    targets = row.repeat(size, 1).to(scorer.device)[:, 1:]
    with scorer.evaluating():
        passes = [scorer.lm(tokens[:, :-1], targets, reduction="none") for tokens in batches]
    losses = torch.cat(passes).double().cpu()
    return float((losses - losses[0]).gather(1, cuts - 1).abs().mean())
