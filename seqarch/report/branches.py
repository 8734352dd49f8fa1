"""The finished models of a run: the ends of its branches and of the run itself, whose learning rate has decayed."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from seqarch.report.documents import stack_documents
from seqarch.report.runs import Evaluations, Group, Run
from seqarch.runs import tags

Tag = Callable[[str, str], str]
"""The tag of a loss on a domain: `tag(role, domain)`."""
PARTS: Mapping[str, Tag] = {"recallable": tags.loss_recallable, "other": tags.loss_other}


def finished_models(run: Run, tag: Tag = tags.loss) -> Evaluations | None:
    """The last evaluation of each finished branch of a run, shortest first, then of the run itself if it is finished.

    `None` if none of them is finished yet. Another `tag` gives the losses on a part of the tokens. These are nan where
    they were not measured, and have no documents.
    """
    if not (ended := run.ended):
        return None
    last = [each.evaluations.at(np.array([-1])) for each in ended]
    models = Evaluations(
        tokens=np.concatenate([each.tokens for each in last]),
        in_domain=np.concatenate([each.in_domain for each in last]),
        losses={name: np.concatenate([each.losses[name] for each in last]) for name in last[0].losses},
        step=np.concatenate([each.step for each in last]),
        documents=stack_documents([each.documents for each in last]),
    )
    if tag is tags.loss:
        return models
    parts = {name: np.array([_last(each, tag(run.role.name, name)) for each in ended]) for name in models.losses}
    return replace(models, losses=parts, documents=None)


def copying_gains(group: Group) -> dict[int, float]:
    """Nats per token that finished models save by copying, by their training tokens: means of the seeds that tell."""
    gains: dict[int, list[float]] = {}
    for each in (each for run in group.runs for each in run.ended):
        if np.isfinite(gain := _last(each, tags.COPYING_GAIN)):
            gains.setdefault(each.tokens, []).append(gain)
    return {tokens: float(np.mean(each)) for tokens, each in gains.items()}


def _last(run: Run, tag: str) -> float:
    """The last value of a curve, or nan if it has none."""
    curve = run.curves.get(tag)
    return float(curve.value[-1]) if curve is not None and len(curve.value) else float("nan")
