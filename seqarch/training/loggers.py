"""Lightning's loggers next to our curves: the name of the run, its id there, its configuration, and its tags."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from seqarch.errors import UserError
from seqarch.runs.folder import RECORD, TENSORBOARD, event_folder, newest_checkpoint, read_record, run_name


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

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log them once: MLflow refuses others, such as another number of devices, for a run that goes on."""
        if not self.experiment.get_run(self.run_id).data.params:
            super().log_hyperparams(params)
        self.experiment.update_run(self.run_id, "RUNNING")


class Wandb(WandbLogger):
    """Lightning's logger for Weights & Biases. The next run of the process, such as a branch, has a run of its own."""

    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status != "success"))


class Comet(CometLogger):
    """Lightning's logger for Comet. The next run of the process, such as a branch, has an experiment of its own."""

    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.end()


LIGHTNING = "lightning.pytorch.loggers."
OURS = {
    "WandbLogger": (Wandb, "name", "id"),
    "MLFlowLogger": (MLFlow, "run_name", "run_id"),
    "CometLogger": (Comet, "name", "experiment_key"),
}
"""By the name of Lightning's logger what stands in for it, and its options for the name and the id of the run."""


def adapt_loggers(loggers: Sequence[Any], run_dir: Path) -> None:
    """Change Lightning's loggers, as they are parsed, to `OURS`, and name the run where the recipe does not.

    If the run resumes from a checkpoint, they go on in the runs whose ids `run.json` has.
    """
    known = _known_ids(run_dir) if newest_checkpoint(run_dir) else {}
    for logger in loggers:
        package, _, name = (getattr(logger, "class_path", None) or "").rpartition(".")
        if f"{package}.".startswith(LIGHTNING) and name in OURS:
            ours, named, identified = OURS[name]
            logger.class_path = f"{__name__}.{ours.__name__}"
            for option, value in ((named, run_name(run_dir)), (identified, known.get(ours.__name__))):
                logger.init_args[option] = logger.init_args.get(option) or value


def ids_of(loggers: Sequence[Logger]) -> dict[str, str]:
    """The ids that runs have in W&B, MLflow and Comet, by our class, as `run.json` keeps them."""
    return {type(each).__name__: str(each.version) for each in loggers if isinstance(each, Wandb | MLFlow | Comet)}


def _known_ids(run_dir: Path) -> dict[str, str]:
    ids = read_record(run_dir).get("loggers", {}) if (run_dir / RECORD).is_file() else {}
    if not (isinstance(ids, dict) and all(isinstance(each, str) for each in ids.values())):
        raise UserError(f"{run_dir / RECORD}: 'loggers' must give an id for each logger; remove it to log to new runs")
    return ids


def describe_to(loggers: Sequence[Logger], config: Mapping[str, Any]) -> None:
    """Give each logger the configuration of the run, without the options of loggers, which may hold a key."""
    described = {**config, "trainer": {**config["trainer"], "logger": None}}
    for logger in loggers:
        logger.log_hyperparams(described)
