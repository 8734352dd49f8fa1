"""Evaluation tasks on a checkpoint: what `seqarch eval` does."""

import itertools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError, check_counts, one_line
from seqarch.evaluation import Scorer, Task
from seqarch.evaluation.registry import as_tasks
from seqarch.evaluation.results import evaluate_into
from seqarch.experiment.checks import user_errors_of_lightning
from seqarch.experiment.load import load
from seqarch.runs.layout import CHECKPOINTS, CONFIG, named_checkpoint
from seqarch.runs.record import read_config
from seqarch.runs.results import Result
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.integrity import fingerprint


def evaluate_checkpoint(
    checkpoint: str | Path,
    tasks: Task | str | Sequence[Task | str],
    out: str | Path | None = None,
    *,
    precision: str | None = None,
    prefix: bool = True,
    batch_tokens: int | None = None,
    verbose: bool = False,
    allow_code: str | Collection[str] = (),
) -> list[Result]:
    """Score a checkpoint on tasks and write the results to `evaluations/` of its run folder.

    A finished result is not measured again. An interrupted task keeps the samples that it has measured.

    Args:
        checkpoint: the file; of a run folder the newest.
        tasks: what is scored: tasks, or words of `seqarch eval --tasks`.
        out: folder for the results instead of the run folder; needed for a checkpoint outside a run folder.
        precision: a precision of Lightning's trainer; by default the one of the training.
        prefix: whether every prompt begins with one EOS token.
        batch_tokens: tokens per forward pass; by default 65,536 on a GPU and 8,192 on a CPU.
        verbose: show a progress bar.
        allow_code: packages whose classes the checkpoint may name, next to those of seqarch and plug-ins.

    Raises:
        UserError: the checkpoint cannot be read, or a task cannot score it.
    """
    tasks = as_tasks(tasks)
    opened = open_checkpoint(checkpoint, precision, prefix=prefix, batch_tokens=batch_tokens, allow_code=allow_code)
    folder = Path(out) if out else opened.run
    if folder is None:
        raise UserError(f"{opened.path} is not in a run folder: set --out, the folder for the results")
    data = _data(opened.config, opened.tokenizer)
    origin = {"precision": opened.precision, "checkpoint": fingerprint(opened.path)}
    bar, begin = _bar(opened.scorer, len(tasks), verbose)
    with bar:
        return evaluate_into(folder, opened.step, tasks, opened.scorer, data, origin, begin)


class Opened(NamedTuple):
    """A checkpoint ready to be scored; `run` is its run folder, if any, and `config` the configuration in there."""

    path: Path
    scorer: Scorer
    tokenizer: str
    precision: str
    step: int
    run: Path | None
    config: dict[str, Any]


def open_checkpoint(
    checkpoint: str | Path,
    precision: str | None = None,
    *,
    prefix: bool = True,
    batch_tokens: int | None = None,
    allow_code: str | Collection[str] = (),
) -> Opened:
    """Load a checkpoint and make a `Scorer` that computes as its training did; arguments as `evaluate_checkpoint`."""
    check_counts(**{"--batch_tokens": batch_tokens})
    path = named_checkpoint(checkpoint)
    content = read_checkpoint(path)
    run = path.parent.parent if path.parent.name == CHECKPOINTS else None
    config = read_config(run) if run and (run / CONFIG).is_file() else {}
    precision = precision or content["seqarch"].get("precision") or config.get("trainer", {}).get("precision")
    if precision is None:
        raise UserError(f"{path} does not say in which precision it was trained: set --precision, such as bf16-mixed")
    lm, tokenizer = load(path, allow_code)
    device = next(lm.parameters()).device
    with user_errors_of_lightning(of_trainer_options=True):
        fabric = Fabric(accelerator=device.type, devices=1, precision=precision)  # pyright: ignore[reportArgumentType]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    fabric.setup_module(lm, move_to_device=False)  # casts the weights where the precision asks for it
    max_tokens = batch_tokens or (65536 if device.type == "cuda" else 8192)
    scorer = Scorer(lm, tokenizer, context=fabric.autocast, max_tokens=max_tokens, prefix=prefix)
    return Opened(path, scorer, tokenizer.name, precision, content["global_step"], run, config)


def _data(config: dict[str, Any], tokenizer: str) -> TextDataModule | None:
    """The data of the run; `None` if they are not here."""
    options = config.get("data")
    if not options:
        return None
    try:
        if options["root"] != "embedded" and not Path(options["root"]).is_dir():
            return None
        data = TextDataModule(**options)
    except (KeyError, TypeError) as error:
        raise UserError(f"the section data of the run's {CONFIG} is not one of seqarch: {one_line(error)}") from error
    if data.tokenizer.name != tokenizer:
        raise UserError(f"{options['root']} has the tokenizer {data.tokenizer.name}, the checkpoint has {tokenizer}")
    return data


def _bar(scorer: Scorer, n_tasks: int, shown: bool) -> tuple[Progress, Callable[[str], None]]:
    """A progress bar with the time left for a task's current measurement, and a function to name the next task."""
    columns = ("{task.description}", BarColumn(), "{task.percentage:.0f} %", TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    line = bar.add_task("", total=1.0)
    scorer.progress = lambda share: bar.update(line, completed=share)
    begun = itertools.count(1)
    return bar, lambda name: bar.reset(line, description=f"{name} ({next(begun)} of {n_tasks})", total=1.0)
