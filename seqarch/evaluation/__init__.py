"""Evaluation tasks: each scores a model on fixed inputs and returns metrics with tags."""

from seqarch.evaluation.losses import LossByDomain
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Scores, Task, evaluate

__all__ = ["LossByDomain", "Scorer", "Scores", "Task", "evaluate"]
