"""Where things are in a run folder.

RUN/config.yaml        the resolved configuration
RUN/run.json           what ran: model, data, versions, hardware, commit
RUN/curves.csv         every scalar of the run
RUN/evaluations/       the loss of each evaluation sequence (`ood_loss.keep_sequences`)
RUN/checkpoints/       the newest checkpoints
RUN/tensorboard/       the same scalars as TensorBoard events
RUN/exam.json          what an exam notes about the run
"""

from __future__ import annotations

import re
from pathlib import Path

CONFIG, RECORD, CURVES = "config.yaml", "run.json", "curves.csv"
EVALUATIONS, CHECKPOINTS, TENSORBOARD = "evaluations", "checkpoints", "tensorboard"
EXAM_NOTE = "exam.json"
_SEED = re.compile(r"seed_\d+")


def run_name(run: Path) -> str:
    """The name of a run: its folder's name, or `mamba2` for `mamba2/seed_0`."""
    return run.parent.name if _SEED.fullmatch(run.name) and run.parent.name else run.name


def checkpoint_path(run: str | Path, step: int) -> Path:
    """The checkpoint that a run writes after an optimizer step."""
    return Path(run) / CHECKPOINTS / f"step_{step:08d}.ckpt"


def checkpoints(run: str | Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((Path(run) / CHECKPOINTS).glob("step_*.ckpt"))


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest checkpoint of a run, `None` if there is none."""
    return next(reversed(checkpoints(run)), None)


def evaluation_path(run: str | Path, step: int) -> Path:
    """The losses by evaluation sequence that a run writes after an optimizer step."""
    return Path(run) / EVALUATIONS / f"step_{step:08d}.npz"
