"""The run of an experiment: its folder, its trainer, and what it came to."""

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich import get_console

from seqarch.errors import SeqarchWarning, UserError, join_processes, of_storage, one_line, say, several
from seqarch.experiment.checks import check_callbacks, check_machine, has_own_checkpoints, user_errors_of_lightning
from seqarch.experiment.parser import FROM
from seqarch.plugins import split_flags
from seqarch.report import report
from seqarch.report.runs import load_run
from seqarch.runs import folder, tags
from seqarch.runs.files import check_folder, refuse_place
from seqarch.runs.folder import CONFIG, CURVES, PROFILE
from seqarch.tables import readable_time
from seqarch.training.callbacks import CALLBACKS, NonFiniteGuard, Throughput
from seqarch.training.callbacks.profile import Profile
from seqarch.training.checkpoint import Checkpoints, check_resumable, holds_only_weights, other_model, read_checkpoint
from seqarch.training.curves import CurvesLogger
from seqarch.training.integrity import check_checkpoint
from seqarch.training.loggers import TensorBoard
from seqarch.training.run_folder import RunFolder, check_same_run

FIRST_LINE, LONGEST = 10, 600
"""Seconds to the first line of progress in a log, and the most between two."""


class Progress(RichProgressBar):
    """Lightning's progress bar over the steps of the run, with the loss and the tokens per second.

    A log gets a line after 10 seconds, then whenever the time so far has doubled, at least every 10 minutes. To read
    the loss waits for the GPU, so the bar does it twice a second and not in each step.
    """

    _began: tuple[float, int] | None = None
    """When the first batch of this process ended, and the steps that were done then."""
    _due = 0.0

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"

    @property
    def total_train_batches(self) -> int:
        """Batches of this epoch at its end or at the run's end. Lightning's count omits batches before a resume."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        left = (self.trainer.max_steps - self.trainer.global_step) * self.trainer.accumulate_grad_batches
        return int(min(self.trainer.num_training_batches, done + left))

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        if "loss" in trainer.callback_metrics:
            metrics["loss"] = float(trainer.callback_metrics["loss"])
        for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, Throughput) and callback.tokens_per_second:
                metrics["tokens/s"] = f"{callback.tokens_per_second:,.0f}"
        return metrics

    def _update_metrics(self, trainer: Trainer, pl_module: Any) -> None:
        now, step, console = time.monotonic(), trainer.global_step, get_console()
        in_log = not console.is_terminal and not console.is_jupyter
        if self._began is None:
            self._began, self._due = (now, step), now + FIRST_LINE * in_log
        if now < self._due and step < trainer.max_steps:
            return
        super()._update_metrics(trainer, pl_module)
        began, first = self._began
        self._due = now + (min(LONGEST, max(FIRST_LINE, now - began)) if in_log else 0.5)
        if in_log and first < step < trainer.max_steps and self.is_enabled:
            metrics = self.get_metrics(trainer, pl_module).items()
            shown = "".join(
                f", {name} {value if isinstance(value, str) else f'{value:.3f}'}" for name, value in metrics
            )
            left = readable_time((now - began) / (step - first) * (trainer.max_steps - step))
            say(f"step {step:,} of {trainer.max_steps:,}{shown}, about {left} left")


def recipe_of_run(args: Sequence[str]) -> list[str]:
    """The arguments with the recipe of the run that `--from` names before them.

    Raises:
        UserError: it is not in the folder of a run.
    """
    rest, found = split_flags(args, lambda flag: flag == FROM)
    if not found:
        return rest
    origin = found[-1][1]
    config = folder.run_of(folder.named_checkpoint(origin)) / CONFIG
    if not config.is_file():
        raise UserError(f"{FROM} {origin}: there is no run with a {CONFIG}: name a run folder, or a checkpoint in one")
    other = [f"--{key}=null" for key in ("run_dir", "ckpt_path", "branches.at")]
    return ["--config", str(config), *other, f"{FROM}={origin}", *rest]


def _beginning(config: Mapping[str, Any]) -> Path | None:
    """The checkpoint of another run that a run begins from."""
    if config["ckpt_path"] and config["from"]:
        raise UserError("--from and --ckpt_path both name a checkpoint to begin from: leave one out")
    named = config["from"] if config["ckpt_path"] is None else config["ckpt_path"]
    if named is None and config["model"]["rewarm_steps"]:
        raise UserError("model.rewarm_steps is for a run that goes on from another one: name that with --from")
    return None if named is None else folder.named_checkpoint(named)


def open_run(config: Mapping[str, Any], complete: Callable[[Any], Any]) -> Path:
    """Return the run folder that `fit` writes to, after a check that this configuration may use it.

    `complete` is that of `seqarch.runs.keys.difference`.

    Raises:
        UserError: no folder or no number of steps is given, there is no such checkpoint, the folder holds a run of
            another configuration, or this is not the main thread.
    """
    if not config["run_dir"] or not Path(config["run_dir"]).resolve().name:
        raise UserError("fit needs --run_dir, a new folder for the run, such as runs/first")
    if config["trainer"]["max_steps"] < 1:  # Lightning's default is -1
        raise UserError("trainer.max_steps is not set, or below 1: give the number of steps")
    if threading.current_thread() is not threading.main_thread():
        raise UserError("fit needs the main thread, which gets all signals: call it there, or in a new process")
    if (start := _beginning(config)) is not None:
        check_checkpoint(start, files=False)
    refuse_place("--run_dir", config["run_dir"])
    run_dir = Path(config["run_dir"])
    check_folder(run_dir)
    if strange := next(run_dir.glob("*hpc_ckpt_*"), None):  # Lightning would take it in a job of SLURM, unchecked
        raise UserError(f"{strange} is not a file of seqarch: remove it; --ckpt_path names a checkpoint to resume from")
    check_same_run(run_dir, dict(config), complete)
    return run_dir


Start = tuple[str | None, dict[str, Any] | None]
"""The checkpoint that training begins from, and its content if that holds only weights."""


def starting_checkpoint(run_dir: Path, config: Mapping[str, Any], complete: Callable[[Any], Any]) -> Start:
    """Return the checkpoint of `fit`: the newest in the run folder, else the given one. Training resumes from it.

    If that of `--from` holds only weights, training begins anew with them, and its content is returned too.
    `complete` is that of `seqarch.runs.keys.difference`.

    Raises:
        UserError: it holds another model, or leaves a run no step.
    """
    own, named = folder.newest_checkpoint(run_dir), _beginning(config)
    if (found := own or named) is None:
        return None, None
    if own and named and not own.samefile(named):
        say(f"{run_dir} resumes from its own newest checkpoint, {own}, not from {named}")
    content, max_steps = read_checkpoint(found, weights=False), config["trainer"]["max_steps"]
    if anew := not own and config["from"] and holds_only_weights(content):
        content = read_checkpoint(found)
    if not anew:
        check_resumable(content, found)
    elif config["model"]["rewarm_steps"]:
        raise UserError(f"{found} holds only weights, so the rate begins anew: set model.warmup_steps, no rewarm_steps")
    if other := other_model(content, config, complete):
        raise UserError(f"{found} holds another model ({other}): give the options it was trained with")
    if not anew and (step := content["global_step"]) >= max_steps + bool(own):  # the run's own of the last step ends it
        raise UserError(f"{found} is of step {step}, so no step is left: trainer.max_steps is {max_steps}")
    # Lightning takes "last", "best" and URLs for other files
    return os.path.abspath(found), content if anew else None


def build_trainer(objects: Namespace, config: Mapping[str, Any], run_dir: Path | None) -> Trainer:
    """Return the trainer of a recipe, whose other sections are instantiated; without `run_dir` it only evaluates."""
    options = dict(objects.trainer)
    objects.model.asked_precision = options["precision"]
    check_machine(config)
    if options["accumulate_grad_batches"] != 1:
        raise UserError("leave trainer.accumulate_grad_batches out: data.sequences_per_step sets it")
    join_processes()
    callbacks: list[Any] = [*_as_list(options["callbacks"]), NonFiniteGuard()]
    check_callbacks(callbacks)
    if options["enable_progress_bar"] is not False:
        callbacks.append(Progress())
    loggers: list[Any] = []
    if run_dir is not None:
        loggers = [*_as_list(options["logger"]), TensorBoard(run_dir), CurvesLogger(run_dir / CURVES)]
        threading.excepthook = _report_thread_error
        callbacks.insert(0, RunFolder(run_dir, dict(config)))  # it notes the end before other callbacks can fail
        if objects.profile:
            if options["profiler"]:
                raise UserError("--profile and trainer.profiler cannot record at once: leave one out")
            callbacks.insert(0, Profile(run_dir / PROFILE, objects.profile))  # it may refuse before the run has begun
    callbacks += [objects[key] for key in CALLBACKS]
    options |= {"logger": loggers, "callbacks": callbacks, "default_root_dir": str(run_dir or ".")}
    with user_errors_of_lightning(of_trainer_options=True):
        trainer = Trainer(**options)
    if has_own_checkpoints(kind := type(trainer.strategy)):
        raise UserError(f"trainer.strategy {kind.__name__} has checkpoints of its own: use ddp or fsdp2")
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = Checkpoints(training=run_dir is not None)
    rank = max(trainer.local_rank, rank_zero_only.rank or 0)  # which comes from the environment
    if trainer.local_rank >= (devices := trainer.num_devices) or rank >= trainer.world_size:
        raise UserError(f"RANK, LOCAL_RANK or SLURM_LOCALID is {rank}: start {devices} per node (trainer.devices)")
    return trainer


@contextlib.contextmanager
def warn_after_finish(run_dir: Path) -> Iterator[None]:
    """Around training and what follows it: an error after the run has finished becomes a warning."""
    try:
        yield
    except Exception as error:
        if not folder.is_finished(run_dir):
            raise
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"{run_dir} is finished; after its last step this failed: {what}", SeqarchWarning, stacklevel=3)


def outcome(run_dir: Path) -> str:
    """Draw the figures of a run; return its final losses and where its files are."""
    if not folder.is_finished(run_dir):
        return f"stopped; the same command resumes from {folder.newest_checkpoint(run_dir)}"
    run = load_run(run_dir)
    lines = [f"{run.name}: {run.facts.get('parameters') or 0:,} parameters, {run.tokens:,} tokens"]
    entropies = run.facts.get("unigram_entropy") or {}
    for role, kind in ((tags.IN_DOMAIN, "in-domain"), (tags.OOD, "OOD")):
        for domain in tags.domains(run.curves, role):
            values, entropy = run.curves[tags.loss(role, domain)].value, entropies.get(domain, math.nan)
            if len(values):
                lines.append(f"  {kind:9} {domain:12} {values[-1]:.3f} nats per token  (unigram entropy {entropy:.3f})")
    try:
        lines.append(f"  plot         {report([run_dir], run_dir / 'report')[0]}")
    except Exception as error:  # the run went well; a plot that fails is not a failure
        lines.append(f"  no plot      {one_line(error)}")
    lines.append(f"  curves       {run_dir / CURVES}")
    lines.append(f"  TensorBoard  tensorboard --logdir {folder.event_folder(run_dir)}")
    return "\n".join(lines)


def _report_thread_error(args: threading.ExceptHookArgs) -> None:
    """Print nothing on a full disk: TensorBoard raises its thread's error in the main thread too."""
    if not (isinstance(args.exc_value, OSError) and of_storage(args.exc_value)):
        threading.__excepthook__(args)


def _as_list(value: Any) -> list[Any]:
    return [] if isinstance(value, bool) or value is None else several(value)
