"""Evaluation tasks on a checkpoint: what `seqarch eval` does."""

import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import ArgumentParser
from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import SeqarchWarning, UserError, several
from seqarch.evaluation import Scorer, Task
from seqarch.evaluation.registry import as_tasks
from seqarch.evaluation.results import evaluate_into
from seqarch.experiment.checker import parse_tree
from seqarch.experiment.checks import user_errors_of_lightning
from seqarch.experiment.load import load_content
from seqarch.experiment.tree import read_plain
from seqarch.runs.folder import CHECKPOINTS, CONFIG, config_of, named_checkpoint, run_of
from seqarch.runs.results import Result
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.integrity import fingerprint
from seqarch.training.provenance import Provenance


def evaluate_checkpoint(
    checkpoint: str | Path,
    tasks: Task | str | Sequence[Task | str],
    out: str | Path | None = None,
    *,
    precision: str | None = None,
    prefix: bool = True,
    batch_tokens: int | None = None,
    verbose: bool = False,
    data_root: str | None = None,
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
        data_root: where the data of the run are now; by default where they were in training.
        allow_code: packages whose classes the checkpoint may name, next to those of seqarch and plug-ins.

    Raises:
        UserError: the checkpoint cannot be read, or a task cannot score it.
    """
    tasks = as_tasks(tasks)
    opened = open_checkpoint(checkpoint, precision, prefix=prefix, batch_tokens=batch_tokens, allow_code=allow_code)
    folder = Path(out) if out else opened.run
    if folder is None:
        raise UserError(f"{opened.path} is not in a run folder: set --out, the folder for the results")
    data, trained_on = _text(opened, tasks, data_root)
    origin = {"precision": opened.precision, "checkpoint": fingerprint(opened.path)}
    bar, begin = _bar(opened.scorer, len(tasks), verbose)
    with bar:
        return evaluate_into(folder, opened.step, tasks, opened.scorer, data, origin, trained_on, begin)


class Opened(NamedTuple):
    """A checkpoint ready to be scored; `run` is its run folder, if any, and `config` the configuration in there."""

    path: Path
    scorer: Scorer
    provenance: Provenance
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
    path = named_checkpoint(checkpoint)
    content = read_checkpoint(path)
    run, config = run_of(path) if path.parent.name == CHECKPOINTS else None, config_of(path)
    precision = precision or content["seqarch"].get("precision") or config.get("trainer", {}).get("precision")
    if precision is None:
        raise UserError(f"{path} does not say in which precision it was trained: set --precision, such as bf16-mixed")
    length = (content.get("TextDataModule") or {}).get("sequence_length")
    if not isinstance(length, int) or length < 1:
        raise UserError(f"{path} does not say how long its training sequences were, to which prompts are cut")
    lm, tokenizer = load_content(content, path, several(allow_code))
    device = next(lm.parameters()).device
    with user_errors_of_lightning(of_trainer_options=True):
        fabric = Fabric(accelerator=device.type, devices=1, precision=precision)  # pyright: ignore[reportArgumentType]
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    fabric.setup_module(lm, move_to_device=False)  # casts the weights where the precision asks for it
    max_tokens = batch_tokens or (65536 if device.type == "cuda" else 8192)
    scorer = Scorer(lm, tokenizer, context=fabric.autocast, max_tokens=max_tokens, prefix=prefix, length=length)
    return Opened(path, scorer, Provenance.of_checkpoint(content), precision, content["global_step"], run, config)


def _text(opened: Opened, tasks: Sequence[Task], root: str | None) -> tuple[TextDataModule | None, Mapping[str, str]]:
    """The data of the run, if a task reads them, and the files that the model was trained on."""
    reader, sources = next((task.name for task in tasks if task.reads_data), None), opened.provenance.sources
    if reader is None and sources:
        return None, sources
    try:
        data = _data(opened, root)
        return data, sources or data.training_files()
    except UserError as error:
        if reader is not None:
            raise UserError(f"{reader} reads the data of the run: {error}") from error
        unknown = f"{opened.path} does not say which files it was trained on, so rows are not compared with them"
        warnings.warn(f"{unknown}: {error}", SeqarchWarning, stacklevel=3)
        return None, {}


def _data(opened: Opened, root: str | None) -> TextDataModule:
    """The data of the run: hold-outs that it was measured on, and its training text."""
    if not (options := opened.config.get("data")):
        raise UserError(f"{opened.path} is in no run with data: put it there, or give text to `seqarch import --data`")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TextDataModule, "data")
    data = parser.instantiate(parse_tree(parser, read_plain({"data": options}, CONFIG, arrays=False))).data
    data.root = root or data.root
    opened.provenance.find(data, opened.path, named=root is not None)
    return data


def _bar(scorer: Scorer, tasks: int, shown: bool) -> tuple[Progress, Callable[[str], None]]:
    """A progress bar with the time left for a task's current measurement, and a function to name the next task."""
    columns = ("{task.description}", BarColumn(), "{task.percentage:.0f} %", TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
    line = bar.add_task("", total=1.0, visible=False)  # a refusal comes without a bar
    scorer.progress = lambda share: bar.update(line, completed=share)
    begun = itertools.count(1)
    return bar, lambda name: bar.reset(line, description=f"{name} ({next(begun)} of {tasks})", total=1.0, visible=True)
