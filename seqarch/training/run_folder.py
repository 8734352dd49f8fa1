"""The run folder: everything a report, a resumed run or a reader in a year needs.

RUN/config.yaml        the resolved configuration
RUN/run.json           what ran: model, data, versions, hardware, commit
RUN/curves.csv         every scalar of the run
RUN/evaluations/       the loss of each evaluation sequence (`ood_loss.keep_sequences`)
RUN/checkpoints/       the newest checkpoints
RUN/tensorboard/       the same scalars as TensorBoard events
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml

import seqarch
from seqarch.errors import UserError
from seqarch.training.curves import CurvesLogger
from seqarch.versions import commit, version

CONFIG, RECORD, CURVES = "config.yaml", "run.json", "curves.csv"
SEED = re.compile(r"seed_\d+")
FREE = (
    "ckpt_path",
    "run_dir",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.strategy",
    "trainer.enable_progress_bar",
    "data.root",
    "data.num_workers",
    "data.micro_batch_size",
    "checkpoint.",
)
"""Keys that may change when a run goes on: where it runs, not what is trained. The datamodule checks the rest itself
(the shards' checksums, and sequences a micro-batch over all devices).
"""


class RunFolder(L.Callback):
    """Writes `config.yaml` and `run.json`, and puts into each checkpoint what it needs to be used alone.

    Args:
        path: the run folder.
        config: the resolved configuration, of plain types.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CurvesLogger):
                logger.truncate(trainer.global_step or -1)  # a start from nothing keeps nothing
        if trainer.is_global_zero:
            _write(self.path / CONFIG, yaml.safe_dump(self.config, sort_keys=False))
            record = describe_run(self.path, trainer, pl_module, self.config)
            self._write_record(record)
            hardware = f"{record['hardware']['devices']} x {record['hardware']['device']}"
            steps = f"steps {trainer.global_step:,} to {trainer.max_steps:,}"
            print(f"{record['name']}: {record['parameters']:,} parameters, {steps}, {hardware}, into {self.path}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        checkpoint["seqarch"] = {"version": seqarch.__version__, "tokenizer": data.tokenizer.name}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            status = "finished" if trainer.global_step >= trainer.max_steps else "stopped"
            self._write_record({**read_record(self.path), "status": status, "finished": _now()})

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero and (self.path / RECORD).exists():
            self._write_record({**read_record(self.path), "status": "failed", "finished": _now()})

    def _write_record(self, record: dict[str, Any]) -> None:
        _write(self.path / RECORD, json.dumps(record, indent=2) + "\n")


def describe_run(
    path: Path, trainer: L.Trainer, pl_module: L.LightningModule, config: dict[str, Any]
) -> dict[str, Any]:
    """The facts of a run that starts now, as `run.json` holds them."""
    lm: Any = pl_module.lm
    data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
    layers = zip(lm.pattern, lm.blocks, strict=True)
    mixers = {name: type(block.mixer).__name__ for name, block in layers if block.mixer is not None}
    on_gpu = pl_module.device.type == "cuda"
    return {
        "name": run_name(path),
        "status": "running",
        "mixers": mixers,
        "pattern": lm.pattern,
        "parameters": lm.n_parameters(),
        "seed": config["seed_everything"],
        "data_seed": data.seed,
        "max_steps": trainer.max_steps,
        "sequence_length": data.sequence_length,
        "sequences_per_step": data.sequences_per_step,
        "tokenizer": data.tokenizer.name,
        "train": data.train,
        "ood": data.ood,
        "unigram_entropy": {each.domain: data.unigram_entropy(each.domain) for each in data.evaluation_sets()},
        "versions": {name: version(name) for name in ("seqarch", "torch", "lightning", "litdata", "triton")}
        | {"python": platform.python_version()},
        "hardware": {
            "device": torch.cuda.get_device_name(pl_module.device) if on_gpu else platform.machine() + " CPU",
            "devices": trainer.world_size,
            "threads": torch.get_num_threads(),
        },
        "commit": commit(),
        "started": _now(),
        "finished": None,
    }


def run_name(path: Path) -> str:
    """The folder's name; of `mamba2/seed_0` it is `mamba2`."""
    return path.parent.name if SEED.fullmatch(path.name) and path.parent.name else path.name


def read_record(path: Path) -> dict[str, Any]:
    """The `run.json` of a run folder."""
    return json.loads((path / RECORD).read_text())


def check_same_run(path: Path, config: dict[str, Any]) -> None:
    """Raise `UserError` if the folder holds a run with another configuration: going on would mix two runs.

    A run that failed before it measured or saved anything may be replaced.
    """
    file = path / CONFIG
    if not file.exists():
        if (path / CURVES).exists():
            raise UserError(f"{path} has curves but no {CONFIG}: choose another --run_dir")
        return
    before, now = flatten(yaml.safe_load(file.read_text())), flatten(config)
    keys = [key for key in sorted({*before, *now}) if not key.startswith(FREE)]
    if (other := difference(before, now, keys)) and not _failed_at_once(path):
        raise UserError(
            f"{path} holds a run with another configuration ({other}): choose another --run_dir, or delete that folder"
        )


def _failed_at_once(path: Path) -> bool:
    """Whether a run failed and left nothing that could be lost: no row of `curves.csv` and no checkpoint."""
    if not (path / RECORD).exists() or read_record(path)["status"] != "failed":
        return False
    measured = (path / CURVES).exists() and len((path / CURVES).read_text().splitlines()) > 1  # the first names columns
    return not measured and not any(path.rglob("*.ckpt"))


def difference(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The first of the keys whose values differ and how many more do, in words; `None` where none does."""
    differ = [key for key in keys if before.get(key) != now.get(key)]
    if not differ:
        return None
    key = differ[0]
    more = f" and {len(differ) - 1} more keys" if len(differ) > 1 else ""
    return f"{key} was {before.get(key)}, is {now.get(key)}{more}"


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their dotted names."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    dotted = {f"{prefix}.{name}" if prefix else str(name): branch for name, branch in tree.items()}
    return {key: value for name, branch in dotted.items() for key, value in flatten(branch, name).items()}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
