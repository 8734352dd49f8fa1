"""Writes the run folder (`seqarch.runs.folder`): all that a report, a resumed run or a later reader needs.

RUN/branches/step_00000649 is the run folder of the same training with 649 steps. Where the learning rate is constant,
trainings of different lengths are one training: the longest one, the trunk. A branch is a copy of the trunk at the step
from which its own rate falls. `fit` resumes it like any interrupted run (Hägele et al. 2024, arXiv 2405.18392).
"""

import contextlib
import dataclasses
import datetime
import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

import seqarch
from seqarch.data.tokenizer_files import write_tokenizer
from seqarch.errors import DivergedError, UserError, of_storage, one_line, say
from seqarch.runs import folder
from seqarch.runs.curves import read_rows
from seqarch.runs.folder import CONFIG, CURVES, EVALUATIONS, EVENTS, LOCK, OWN, RECORD, TOKENIZER
from seqarch.runs.keys import difference
from seqarch.training.checkpoint import check_optimizer, tokenizer_files
from seqarch.training.curves import CurvesLogger
from seqarch.training.loggers import describe_to, ids_of
from seqarch.training.module import LanguageModel
from seqarch.training.provenance import Provenance, continue_text, measures_alike, origin_of
from seqarch.training.schedule import decay_start
from seqarch.versions import commit, version


class RunFolder(L.Callback):
    """Writes `config.yaml` and `run.json`, and puts into each checkpoint what it needs to be used without them.

    Args:
        path: the run folder.
        config: the resolved configuration, of plain types.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self._lock = filelock.FileLock(path / LOCK, timeout=0)
        self._noted: dict[str, Any] = {}
        self._record: dict[str, Any] = {}
        self._began = False
        self._origin: Path | None = None
        self._read_before: dict[str, str] = {}
        self._new = [each for each in (path, *path.parents) if not each.exists()]
        self._events = folder.event_folder(path)
        self._before = {*self._events.glob(f"{EVENTS}*")}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        why = ""
        if trainer.is_global_zero:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()
            except filelock.Timeout:
                why = f"another process trains into {self.path}: wait for it or stop it, or choose another --run_dir"
            except OSError as error:
                why = of_storage(error) or str(error)
        if why := trainer.strategy.broadcast(why):  # all processes of this run end, or none
            raise UserError(why)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.origin:
            origin = origin_of(self.config)
            Provenance.of_checkpoint(pl_module.origin).check_tokenizer(trainer.datamodule, origin)
            self._read_before = pl_module.origin["seqarch"].get("sources", {})
            if trainer.is_global_zero:
                unknown = "" if self._read_before else "; what that model was trained on is unknown"
                say(f"takes the weights of {origin}: the optimizer, the steps and the text begin anew{unknown}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not self._began and trainer.global_step >= trainer.max_steps:  # killed after its last checkpoint
            there = (self.path / RECORD).is_file()
            self._record = (
                folder.read_record(self.path) if there else describe_run(self.path, trainer, pl_module, self.config)
            )
            self.on_train_end(trainer, pl_module)
        elif trainer.is_global_zero and not self._began:
            limit = "such as max_time, which counts the time before a resumption too"
            raise UserError(f"no step was taken: an option of the trainer, {limit}, ended the run")
        self._release()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        noted = checkpoint["seqarch"]
        if folder.newest_checkpoint(self.path):  # one of another run has other hold-outs and rows
            Provenance.of_checkpoint(checkpoint).check(trainer.datamodule, self.path)
            self._noted = noted
            pl_module.began = began = noted.get("began", 0)
            pl_module.began_tokens = noted.get("began_tokens", _tokens_at(checkpoint, began))
        else:
            pl_module.began = step = checkpoint["global_step"]
            pl_module.began_tokens = _tokens_at(checkpoint, step)
            origin = origin_of(self.config)
            data = trainer.datamodule
            same = bool(origin) and continue_text(checkpoint, data, str(origin))
            if origin and same and measures_alike(noted, self.config, data, origin):
                self._origin, self._noted = origin, noted
        self._read_before = noted.get("sources", {})
        check_optimizer(checkpoint["optimizer_states"][0], pl_module.configure_optimizers()["optimizer"])
        _recount_batches(checkpoint, trainer.accumulate_grad_batches)
        _forget_outside_files(checkpoint, self.path)

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        describe_to(trainer.loggers, self.config)
        self._began = True
        for logger in trainer.loggers:
            if isinstance(logger, CurvesLogger):
                curves = (self._origin or self.path) / CURVES
                logger.truncate(trainer.global_step or -1, self._noted, curves)  # a start from nothing keeps nothing
                if self._origin and trainer.is_global_zero:
                    copy_evaluations(self._origin, self.path, trainer.global_step)
            elif isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                _purge(logger, trainer.global_step + 1 if trainer.global_step else 0)
        if trainer.is_global_zero:
            folder.write_config(self.path, self.config)
            write_tokenizer(trainer.datamodule.tokenizer, self.path / TOKENIZER)
            self._record = record = describe_run(self.path, trainer, pl_module, self.config)
            folder.write_record(self.path, record)
            hardware = f"{record['hardware']['devices']} x {record['hardware']['device']}"
            steps = f"steps {trainer.global_step:,} to {trainer.max_steps:,}"
            say(f"{record['name']}: {record['parameters']:,} parameters, {steps}, {hardware}, into {self.path}")

    def on_save_checkpoint(self, trainer: Any, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["seqarch"] = {
            "version": seqarch.__version__,
            "precision": trainer.precision,
            **dataclasses.asdict(Provenance.of_run(trainer.datamodule, self.path)),
            **tokenizer_files(trainer.datamodule.tokenizer),
        }
        noted = checkpoint["seqarch"]
        noted["sources"] = {**self._read_before, **noted["sources"]}  # what a run before this one has read counts too
        if began := getattr(pl_module, "began", 0):
            noted |= {"began": began, "began_tokens": pl_module.began_tokens}
        for logger in trainer.loggers:
            logger.save()
            if isinstance(logger, CurvesLogger):
                logger.sync()
                checkpoint["seqarch"] |= logger.note

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._end("finished" if trainer.global_step >= trainer.max_steps else "stopped")
        trainer.strategy.barrier()  # all processes read the same end, and go on or stop together

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if (launcher := trainer.strategy.launcher) is not None:
            launcher.kill(signal.SIGKILL)  # the processes that this one started, which would wait for it
        with contextlib.suppress(OSError):  # report the first error
            if self._record.get("status") == "running":  # else another process writes it, or the run had ended already
                end = "stopped" if isinstance(exception, KeyboardInterrupt | SystemExit) else "failed"
                self._end(end, diverged=isinstance(exception, DivergedError))
        mine = "*" if self._lock.is_locked else f"*.{platform.node()}.{os.getpid()}.*"  # another process may write too
        self._release()
        with contextlib.suppress(OSError):
            if not self._began:
                self._remove_new_files(trainer.loggers, mine)

    def _release(self) -> None:
        """Free the folder; the system frees it too when this process ends."""
        if self._lock.is_locked:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()

    def _end(self, outcome: str, **facts: Any) -> None:
        self._record |= {"status": outcome, "finished": now(), **facts}
        folder.write_record(self.path, self._record)

    def _remove_new_files(self, loggers: list[Any], mine: str) -> None:
        """Remove the new files of TensorBoard that have such a name, and the new folders if they are empty."""
        for logger in loggers:
            logger.finalize("failed")
        for path in {*self._events.glob(EVENTS + mine)} - self._before:
            path.unlink()
        for path in filter(Path.exists, self._new):
            path.rmdir()


def _tokens_at(checkpoint: dict[str, Any], step: int) -> int:
    """The training tokens of the run that wrote a checkpoint until one of its steps."""
    noted, data = checkpoint["seqarch"], checkpoint["TextDataModule"]
    a_step, began = data["sequences_per_step"] * data["sequence_length"], noted.get("began", 0)
    return noted.get("began_tokens", began * a_step) + (step - began) * a_step


def _recount_batches(checkpoint: dict[str, Any], accumulation: int) -> None:
    """Let Lightning resume its epoch with another number of batches per step, as on another number of devices."""
    data = checkpoint["TextDataModule"]
    before = data["sequences_per_step"] // data["sequences_per_micro_step"]
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    if progress["current"]["completed"] == progress["current"]["ready"]:  # a ModelCheckpoint's, between two epochs
        progress["current"] = dict.fromkeys(progress["current"], 0)
    for counts in (progress["total"], progress["current"]):
        # the last batch may be ready and not completed
        more = counts["ready"] * accumulation // before - counts["ready"]
        counts.update({what: count + more for what, count in counts.items()})


def _forget_outside_files(checkpoint: dict[str, Any], run: Path) -> None:
    """Remove files outside of the run folder from `ModelCheckpoint`'s states: it deletes files that these name."""
    states = [state for state in (checkpoint.get("callbacks") or {}).values() if isinstance(state, dict)]
    for state in states:
        single = {
            key: state[key] for key in ("best_model_path", "last_model_path", "kth_best_model_path") if key in state
        }
        paths = [path for path in (*single.values(), *(state.get("best_k_models") or ())) if path]
        # a colon: a URL, for fsspec
        if all(":" not in str(path) and Path(path).resolve().is_relative_to(run.resolve()) for path in paths):
            continue
        state.update(dict.fromkeys(single, ""))
        if "best_k_models" in state:
            state["best_k_models"] = {}
        say(f"seqarch: warning: a ModelCheckpoint forgets its files, which lie outside of {run}", file=sys.stderr)


def _purge(logger: TensorBoardLogger, step: int) -> None:
    """Make TensorBoard forget the rows that an earlier process logged from a step on; this process logs them again."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    start = SessionLog(status=SessionLog.START)
    logger.experiment._get_file_writer().add_event(Event(step=step, session_log=start))


def describe_run(path: Path, trainer: Any, pl_module: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The facts of a run that starts now, as `run.json` holds them."""
    lm, data = pl_module.lm, trainer.datamodule
    on_gpu = pl_module.device.type == "cuda"
    return {
        "name": one_line(folder.run_name(path)),
        "status": "running",
        **describe_model(lm, data.sequence_length),
        "flops_counted": lm.flops_counted,
        "seed": config["seed_everything"],
        "data_seed": data.seed,
        "max_steps": trainer.max_steps,
        "sequences_per_step": data.sequences_per_step,
        **({"documents": data.document_shares()} if data.document_mask else {}),
        "tokenizer": data.tokenizer.name,
        "train": data.train,
        "ood": data.ood,
        "unigram_entropy": {each.domain: data.unigram_entropy(each.domain) for each in data.evaluation_sets()},
        "versions": {name: version(name) for name in ("seqarch", "torch", "lightning", "triton")}
        | {"python": platform.python_version()},
        "hardware": {
            "device": torch.cuda.get_device_name(pl_module.device) if on_gpu else platform.machine() + " CPU",
            "devices": trainer.world_size,
            "threads": torch.get_num_threads(),
        },
        "loggers": ids_of(trainer.loggers),
        "commit": commit(),
        "started": now(),
        "finished": None,
    }


def describe_model(lm: Any, sequence_length: int) -> dict[str, Any]:
    """The facts of a model in `run.json`."""
    layers = zip(lm.pattern, lm.blocks, strict=True)
    mixers = {name: block.mixer for name, block in layers if block.mixer is not None}
    return {
        "mixers": {name: type(mixer).__name__ for name, mixer in mixers.items()},
        "families": {name: mixer.family or type(mixer).__name__ for name, mixer in mixers.items()},
        "pattern": lm.pattern,
        "parameters": lm.n_parameters(),
        "state_elements": lm.state_elements(sequence_length),
        "sequence_length": sequence_length,
    }


def check_same_run(path: Path, config: Mapping[str, Any], complete: Callable[[Any], Any] | None = None) -> None:
    """Raise `UserError` if the folder holds a run with another configuration: going on would mix two runs.

    A run that failed before it measured or saved anything may be replaced. `complete` is that of `difference`.
    """
    if not (path / CONFIG).is_file():
        if (path / CURVES).exists():
            raise UserError(f"{path} has curves but no {CONFIG}: choose another --run_dir")
        if foreign := _foreign(path):
            raise UserError(f"{path} is not a run folder, it holds {', '.join(foreign[:3])}: name a new or empty one")
        return
    if (other := difference(folder.read_config(path), config, "resume", complete)) and not _failed_at_once(path):
        instead = "choose another --run_dir, or delete that folder"
        if other.startswith("trainer.max_steps was ") and not other.endswith("keys"):
            longer = f"--trainer.max_steps {config['trainer']['max_steps']}"
            instead = f"to train on, give --run_dir NEW --from {path} {longer}"
        raise UserError(f"{path} holds a run with another configuration ({other}): {instead}")


def _foreign(path: Path) -> list[str]:
    """The names in a folder that come neither from `fit` nor from a shell that saves its output."""
    names = sorted(each.name.removesuffix(".partial") for each in path.glob("*"))
    return [
        name for name in names if name not in OWN and not re.search(rf"^\.|^{re.escape(EVENTS)}|\.(log|out|err)$", name)
    ]


def _failed_at_once(path: Path) -> bool:
    """Whether a run failed and left nothing that could be lost: no row of `curves.csv` and no checkpoint."""
    if folder.status(path) != "failed":
        return False
    return not read_rows(path / CURVES)[1] and not any(path.rglob("*.ckpt"))


def now() -> str:
    """The time in UTC, as `run.json` holds it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def unfinished_branches(run: str | Path) -> list[Path]:
    """The branches of a run that have a checkpoint and are not finished, shortest first; it makes others anew."""
    begun = (branch for branch in folder.branches(run) if folder.newest_checkpoint(branch))
    return [branch for branch in begun if not folder.is_finished(branch)]


def branch_steps(at: Sequence[float], model: LanguageModel, max_steps: int) -> dict[int, int]:
    """Map each step at which a branch leaves the trunk to the number of all steps of the branch.

    Args:
        at: lengths of the branches as shares of the trunk's steps.
        model: what is trained.
        max_steps: steps of the trunk.

    Raises:
        UserError: the trunk's rate is not constant, or a branch would leave during warm-up or repeat another run.
    """
    if at and not model.decay_share:
        raise UserError("branches.at needs a learning rate that falls at its end: set model.decay_share, such as 0.2")
    steps = {}
    for share in at:
        length = round(share * max_steps)
        start = decay_start(model.warmup_steps, length, model.decay_share)
        if not 0 < start < length:
            raise UserError(
                f"branches.at: a branch of {length} steps would leave at step {start}, not between warm-up and end: "
                "make its share larger, or model.warmup_steps or model.decay_share smaller"
            )
        other = max_steps if length == max_steps else steps.get(start)
        if other:
            raise UserError(f"branches.at: runs of {other} and {length} steps would both decay from step {start}")
        steps[start] = length
    return steps


def begin(run: Path, branch: Path, step: int) -> None:
    """Copy to a branch what the run has measured up to `step`, and the configuration with the branch's steps."""
    copy_evaluations(run, branch, step)
    shutil.copy2(run / CURVES, branch / CURVES)  # with later rows, which the branch leaves out when it starts
    folder.write_config(branch, branch_config(branch, folder.read_config(run)))


def copy_evaluations(origin: Path, run: Path, step: int) -> None:
    """Copy to a run the evaluations, up to a step, of the run that it comes from."""
    (run / EVALUATIONS).mkdir(parents=True, exist_ok=True)
    for losses in folder.evaluation_paths(origin):
        if folder.step_of(losses) <= step:
            shutil.copy2(losses, run / EVALUATIONS)


def branch_config(branch: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a branch, given that of its trunk."""
    trainer = {**config["trainer"], "max_steps": folder.step_of(branch)}
    return {**config, "trainer": trainer, "branches": {"at": None}, "run_dir": str(branch), "ckpt_path": None}
