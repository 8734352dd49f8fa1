"""Branches of a run: `RUN/branches/step_00000649` is the run folder of the same training with 649 steps.

Where the learning rate is constant, trainings of different lengths are one training: the longest one, the trunk. A
branch is a copy of the trunk at the step from which its own rate falls. `fit` resumes it like any interrupted run
(Hägele et al. 2024, arXiv 2405.18392).
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqarch.errors import UserError
from seqarch.runs.folder import (
    CURVES,
    EVALUATIONS,
    branches,
    evaluation_paths,
    is_finished,
    read_config,
    step_of,
    write_config,
)
from seqarch.training.module import LanguageModel
from seqarch.training.schedule import decay_start


def unfinished_branches(run: str | Path) -> list[Path]:
    """The branches of a run that were begun and are not finished, shortest first."""
    return [branch for branch in branches(run) if not is_finished(branch)]


def branch_steps(at: Sequence[float], model: LanguageModel, max_steps: int) -> dict[int, int]:
    """Map each step at which a branch leaves the trunk to the number of all steps of the branch.

    Args:
        at: lengths of the branches as shares of the trunk's steps.
        model: what is trained.
        max_steps: steps of the trunk.

    Raises:
        UserError: the trunk's rate is not constant, a branch would leave before the end of the warm-up, or two at once.
    """
    if at and model.decay_share is None:
        raise UserError("branches.at needs a constant learning rate to leave from: set model.decay_share, such as 0.2")
    steps = {}
    for share in at:
        length = round(share * max_steps)
        start = decay_start(model.warmup_steps, length, model.decay_share)
        if not 0 < start < length:
            raise UserError(f"branches.at: a branch of {length} steps would leave at step {start}, not after warm-up")
        if (other := steps.setdefault(start, length)) != length:
            raise UserError(f"branches.at: branches of {other} and {length} steps would both leave at step {start}")
    return steps


def begin(run: Path, branch: Path, step: int) -> None:
    """Copy to a branch what the run has measured up to `step`, and the configuration with the branch's steps."""
    copy_measurements(run, branch, step)
    write_config(branch, branch_config(branch, read_config(run)))


def copy_measurements(origin: Path, run: Path, step: int) -> None:
    """Copy to a run what the run that it comes from has measured up to a step, and later rows of its curves."""
    (run / EVALUATIONS).mkdir(parents=True, exist_ok=True)
    shutil.copy2(origin / CURVES, run / CURVES)
    for losses in evaluation_paths(origin):
        if step_of(losses) <= step:
            shutil.copy2(losses, run / EVALUATIONS)


def branch_config(branch: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a branch, given that of its trunk."""
    trainer = {**config["trainer"], "max_steps": step_of(branch)}
    return {**config, "trainer": trainer, "branches": {"at": None}, "run_dir": str(branch), "ckpt_path": None}
