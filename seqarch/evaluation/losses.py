"""Tasks that measure the language-model loss on the hold-outs: by domain, and by position in the sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from seqarch.data.datamodule import EvaluationSet, HoldOut, TextDataModule
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task
from seqarch.runs import tags


class LossByDomain(Task):
    """The loss on each domain's hold-out, `loss/<role>/<domain>`, and the means `loss/in_domain` and `loss/ood`.

    The samples are the losses of the sequences `loss/<role>/<domain>` float32 `[n]`, and `document/<role>/<domain>`
    int32 `[n]`, the document of the hold-out in which each sequence begins.

    Args:
        whole: measure whole hold-outs, without samples, instead of the evaluation sets (`data.eval_tokens`).
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def prepare(self, data: TextDataModule) -> None:
        self.sets = data.hold_outs() if self.whole else data.evaluation_sets()

    def score(self, scorer: Scorer) -> Scores:
        losses = [scorer.measure(each.tokens, mean_losses) for each in self.sets]
        metrics = loss_metrics(self.sets, [float(loss.mean()) for loss in losses])
        samples: dict[str, np.ndarray] = {}
        for each, loss in zip(self.sets, losses, strict=True):
            if isinstance(each, EvaluationSet):
                samples[tags.loss(each.role, each.domain)] = loss.numpy().astype(np.float32)
                samples[f"document/{each.role}/{each.domain}"] = each.documents.numpy().astype(np.int32)
        return Scores(metrics, samples)


def mean_losses(losses: Tensor, tokens: Tensor) -> Tensor:
    """Mean loss of each sequence, `[b]` float64."""
    return losses.double().mean(dim=1)


def loss_metrics(sets: Sequence[HoldOut | EvaluationSet], losses: Sequence[float]) -> dict[str, float]:
    """The loss of each set under its tag, and the weighted means `loss/in_domain` and `loss/ood`."""
    metrics = {tags.loss(each.role, each.domain): loss for each, loss in zip(sets, losses, strict=True)}
    for role in (tags.IN_DOMAIN, tags.OOD):
        weighted = [(each.weight, loss) for each, loss in zip(sets, losses, strict=True) if each.role == role]
        if weighted:
            metrics[tags.loss(role)] = sum(weight * loss for weight, loss in weighted) / sum(w for w, _ in weighted)
    return metrics
