"""Evaluation tasks: each scores a model on fixed inputs and returns metrics with tags."""

from seqarch.evaluation.copying import Copying
from seqarch.evaluation.losses import LossByDomain, LossByPosition
from seqarch.evaluation.repeat_gain import RepeatGain
from seqarch.evaluation.scorer import Scorer
from seqarch.evaluation.task import Asked, Scores, Task, evaluate

__all__ = ["Asked", "Copying", "LossByDomain", "LossByPosition", "RepeatGain", "Scorer", "Scores", "Task", "evaluate"]
