"""Evaluation tasks while the model trains: any, the loss on the hold-outs and OOD domains, and recall."""

import math
from typing import Annotated, Any

from seqarch.arguments import FILLED, Count, Share, Steps
from seqarch.errors import DivergedError
from seqarch.evaluation import LossByDomain, RepeatGain, Scores, Task, evaluate
from seqarch.evaluation.repeat_gain import Passage
from seqarch.runs.files import write_arrays
from seqarch.runs.folder import evaluation_path, newest_checkpoint
from seqarch.training.callbacks.averages import averaged
from seqarch.training.callbacks.base import EveryNSteps, log


class EvaluateTasks(EveryNSteps):
    """Logs the metrics of evaluation tasks.

    Args:
        tasks: evaluation tasks by class, such as `[Copying]`.
        every_n_steps: distance between two evaluations in optimizer steps; 0 for none.
        at: when to evaluate instead, as shares of the training: 0.5 is the step half-way through, 1 the last.
    """

    def __init__(
        self, tasks: list[Task], every_n_steps: int = 100, at: Annotated[list[Share], FILLED] | None = None
    ) -> None:
        super().__init__(every_n_steps)
        self.tasks = tasks
        self.at = at

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and (self.at or self.every_n_steps):
            for task in self.tasks:  # which may refuse the data, before the run has begun
                task.prepare_once(trainer.datamodule)

    def is_due(self, step: int, max_steps: int) -> bool:
        if self.at is None:
            return super().is_due(step, max_steps)
        return step in {max(1, round(share * max_steps)) for share in self.at}

    def measure(self, trainer: Any, pl_module: Any) -> Scores:
        """Score the tasks and log their metrics."""
        with averaged(trainer, pl_module):
            scores = evaluate(self.tasks, pl_module.scorer(), trainer.datamodule)
        log(trainer, scores.metrics)
        return scores


class OODLoss(EvaluateTasks):
    """Logs `loss/in_domain/<domain>`, `loss/ood/<domain>` and their means, in nats per token (task `LossByDomain`).

    Each time the same tokens: `data.eval_tokens` of each domain's hold-out. They do not pass through the training
    loader and no random number is drawn, so a run with the callback trains exactly like one without.

    Args:
        every_n_steps: distance between two evaluations in optimizer steps; 0 for none.
        at: when to evaluate instead, as shares of the training: 0.5 is the step half-way through, 1 the last.
        keep_sequences: also write the loss of each evaluation sequence to `evaluations/` of the run folder. A report
            resamples the documents from it.
        tasks: further evaluation tasks for the same steps.
    """

    option_prefix = "ood_loss."

    def __init__(
        self,
        every_n_steps: int = 100,
        at: list[Share] | None = None,
        keep_sequences: bool = False,
        tasks: list[Task] | None = None,
    ) -> None:
        super().__init__([LossByDomain(), *(tasks or [])], every_n_steps, at)
        self.keep_sequences = keep_sequences

    def measure(self, trainer: Any, pl_module: Any) -> Scores:
        scores = super().measure(trainer, pl_module)
        if self.keep_sequences and trainer.is_global_zero:
            write_arrays(evaluation_path(trainer.default_root_dir, trainer.global_step), scores.samples)
        broken = [tag for tag, value in scores.metrics.items() if tag.startswith("loss/") and not math.isfinite(value)]
        if broken and trainer.global_step == trainer.max_steps:  # before that, NonFiniteGuard sees the next step
            before = newest_checkpoint(trainer.default_root_dir) or "none"
            raise DivergedError(f"{broken[0]} is not a finite number after the last step; checkpoint before: {before}")
        return scores


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

    option_prefix = "recall_probe."

    def __init__(
        self,
        every_n_steps: int = 0,
        at: list[Share] | None = None,
        sequences: Count = 32,
        passage: Passage = 256,
        distances: list[Steps] | None = None,
    ) -> None:
        super().__init__([RepeatGain(sequences, passage, distances)], every_n_steps, at)
