"""Lightning's loggers next to our curves: the name of the run, its configuration, and its tags."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from seqarch.runs.layout import TENSORBOARD, event_folder


class TensorBoard(TensorBoardLogger):
    """Shows losses first: TensorBoard sorts groups by name, so what lies before "loss" goes to `other/`, heads below.

    A run of an earlier version keeps its folder and its names.

    Args:
        run_dir: the run folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.old = event_folder(run_dir) != run_dir
        super().__init__(run_dir, name="", version=TENSORBOARD if self.old else "", default_hp_metric=False)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics if self.old else {shown(tag): value for tag, value in metrics.items()}, step)

    @rank_zero_only
    def save(self) -> None:
        """Write no `hparams.yaml`: the resolved config lies in the run folder."""
        self.experiment.flush()


def shown(tag: str) -> str:
    """The name of a tag in TensorBoard."""
    if "/head_" in tag:
        return f"per_head/{tag}"
    return tag if tag >= "loss" else f"other/{tag}"


class MLFlow(MLFlowLogger):
    """Lightning's logger for MLflow. In a local file store the tags have `.` in place of `/`.

    That store keeps each tag in a file, and `loss/ood` cannot be a file while `loss/ood/code` is one too.
    """

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.save_dir is not None:
            metrics = {tag.replace("/", "."): value for tag, value in metrics.items()}
        super().log_metrics(metrics, step)


class Wandb(WandbLogger):
    """Lightning's logger for Weights & Biases. The next run of the process, such as a branch, has a run of its own."""

    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))


OURS = {
    "lightning.pytorch.loggers.wandb.WandbLogger": (Wandb, "name"),
    "lightning.pytorch.loggers.mlflow.MLFlowLogger": (MLFlow, "run_name"),
}
"""By the path of a logger what stands in for it, and its option that names the run."""


def adapt_loggers(loggers: Sequence[Any], name: str) -> None:
    """Change Lightning's loggers, as they are parsed, to `OURS`, and name the run where the recipe does not."""
    for logger in loggers:
        if (path := getattr(logger, "class_path", None)) in OURS:
            ours, option = OURS[path]
            logger.class_path = f"{__name__}.{ours.__name__}"
            logger.init_args[option] = logger.init_args.get(option) or name


def describe_to(loggers: Sequence[Logger], config: Mapping[str, Any]) -> None:
    """Give each logger the configuration of the run, without the options of loggers, which may hold a key."""
    described = {**config, "trainer": {**config["trainer"], "logger": None}}
    for logger in loggers:
        logger.log_hyperparams(described)
