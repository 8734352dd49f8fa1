"""Lets branches begin: short trainings that share their first part with the run."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from seqarch.arguments import Interval
from seqarch.errors import UserError
from seqarch.runs.files import atomic
from seqarch.runs.folder import branch_path, checkpoint_path, newest_checkpoint
from seqarch.training.callbacks.base import EveryNSteps
from seqarch.training.callbacks.checkpoint import save_sealed
from seqarch.training.callbacks.evaluate_tasks import OODLoss
from seqarch.training.run_folder import begin, branch_steps


class Branches(EveryNSteps, Checkpoint):
    """Also finishes runs of fewer steps: `branches/step_00000649` has 649 steps (`seqarch.training.run_folder`).

    At the step from which the rate of the shorter run falls, training stops with a checkpoint. `fit` finishes the
    branch and then continues the run, which does not change.

    Args:
        at: lengths of the branches as shares of the run's steps, such as [0.125, 0.25, 0.5]. In each branch and in the
            run itself, the learning rate falls over the share `model.decay_share` of its steps. `ood_loss.at` then
            must hold 1, the last step.
    """

    def __init__(self, at: list[Annotated[float, Interval(0, 1, "()")]] | None = None) -> None:
        super().__init__(every_n_steps=0)
        self.at = at or []
        self._steps: dict[int, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._steps = branch_steps(self.at, pl_module, trainer.max_steps)
            measured = [each.at for each in trainer.callbacks if isinstance(each, OODLoss)]
            if self._steps and any(at and max(at) < 1 for at in measured):
                raise UserError("branches.at finishes models, which ood_loss.at must measure: add 1, the last step")

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        step, own = checkpoint["global_step"], newest_checkpoint(trainer.default_root_dir)
        passed = {leaves: length for leaves, length in self._steps.items() if leaves <= step}
        if passed and own is None:
            raise UserError(f"the checkpoint is of step {step}: name one before {min(passed)}, the start of a branch")

    def is_due(self, step: int, max_steps: int) -> bool:
        return step in self._steps

    def measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run, step = Path(trainer.default_root_dir), trainer.global_step
        branch = branch_path(run, self._steps[step])
        if trainer.strategy.broadcast(newest_checkpoint(branch)) is not None:
            return  # finished, and the run was interrupted before it wrote a later checkpoint than this step's
        first = checkpoint_path(branch, step)
        with atomic(first, durable=True, replace=trainer.is_global_zero, folders=True) as partial:
            save_sealed(trainer, partial)
            if trainer.is_global_zero:
                begin(run, branch, step)
        if trainer.is_global_zero:
            with atomic(checkpoint_path(run, step), durable=True, folders=True) as partial:
                (shutil.copytree if first.is_dir() else shutil.copy2)(first, partial)
        trainer.strategy.barrier()
        trainer.should_stop = True
