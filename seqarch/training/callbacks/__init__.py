"""Callbacks that run between the steps: measurements, checkpoints, the guard against a broken loss."""

from seqarch.training.callbacks.attention_entropy import AttentionEntropy
from seqarch.training.callbacks.branches import Branches
from seqarch.training.callbacks.checkpoint import RunCheckpoint
from seqarch.training.callbacks.evaluate_tasks import EvaluateTasks, OODLoss, RecallProbe
from seqarch.training.callbacks.non_finite import NonFiniteGuard
from seqarch.training.callbacks.throughput import Throughput
from seqarch.training.callbacks.train_loss import TrainLoss

CALLBACKS = {
    "ood_loss": OODLoss,
    "attention_entropy": AttentionEntropy,
    "recall_probe": RecallProbe,
    "train_loss": TrainLoss,
    "throughput": Throughput,
    "branches": Branches,
    "checkpoint": RunCheckpoint,
}
"""The callbacks of every run, and the sections of a recipe that hold their options."""

__all__ = ["CALLBACKS", "EvaluateTasks", "NonFiniteGuard", "OODLoss", "RunCheckpoint", "Throughput"]
