"""Checkpoint files, checked before they are read."""

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from seqarch.arguments import typed
from seqarch.data.tokenizer_files import tokenizer_from
from seqarch.data.tokenizers import Tokenizer
from seqarch.errors import UserError, one_line, refused
from seqarch.runs.files import Checked, atomic, check_new
from seqarch.runs.folder import is_sharded, named_checkpoint
from seqarch.runs.keys import difference
from seqarch.safe_yaml import check_plain
from seqarch.training.integrity import check_checkpoint, damaged, seal
from seqarch.training.optimizers import state_after_step
from seqarch.training.provenance import Provenance
from seqarch.training.sharded.folder import Damage, Folder
from seqarch.training.weights import SUFFIX, read_weights, save, with_head, write_content

FOLLOWED = ("lr", "initial_lr", "betas", "weight_decay")
"""Options of an optimizer that are those of the run, whatever its checkpoint says."""


@dataclass(frozen=True)
class Entries(Checked):
    """What every reader of a checkpoint finds in it."""

    seqarch: dict
    hyper_parameters: dict
    state_dict: dict
    global_step: int
    callbacks: dict | None
    TextDataModule: dict | None


@dataclass(frozen=True)
class Training(Checked):
    """What a checkpoint also needs so that a run goes on from it."""

    optimizer_states: list
    lr_schedulers: list
    loops: dict


NOTED = ("rows", "curves", "began", "began_tokens")
"""Numbers that a run's own entry of a checkpoint may hold."""
TRAINING = tuple(each.name for each in fields(Training))


def read_tensors(path: str | Path, device: Any = "cpu", *, mmap: bool = False) -> Any:
    """Load what `torch.save` wrote to a file, running no code that it may contain (`weights_only`)."""
    check_checkpoint(path)
    # any error of PyTorch on another person's file
    with refused(f"{path} is not a checkpoint of seqarch", Exception, why=_unpickling_reason):
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap)


def _unpickling_reason(error: Exception) -> object:
    """The reason of a refusal, in place of PyTorch's advice to load such a file without the check."""
    if not isinstance(error, pickle.UnpicklingError):
        return error
    match = re.search(r"GLOBAL (\S+)", str(error))
    return f"it asks for {match[1]}, which may run code" if match else "it holds more than tensors and plain values"


def read_checkpoint(path: str | Path, *, weights: bool = True) -> dict[str, Any]:
    """Load a checkpoint, or a file of `write_weights`, on the CPU; check what every reader of it finds in it.

    Args:
        path: the checkpoint.
        weights: whether the weights of a folder are needed. A file has them in any case, on the disk.
    """
    if is_sharded(path):
        content = read_folder(path, weights=weights)
    else:
        content = read_weights(path) if str(path).endswith(SUFFIX) else read_tensors(path, mmap=True)
    check_entries(content, path)
    check_weights(content["state_dict"], path)
    return content


def read_folder(path: str | Path, *, weights: bool = True, training: bool = False) -> dict[str, Any]:
    """The content of a checkpoint that is a folder, as one file has it.

    Without any of its tensors, their bytes are not compared with the checksums.

    Args:
        path: the folder.
        weights: whether to read the weights, which are otherwise left out.
        training: whether to read the states of the optimizers, which are otherwise left out.
    """
    check_checkpoint(path, files=False)
    try:
        folder = Folder(Path(path))
        if weights or training:
            folder.check_files()
        content = folder.content(folder.read, weights=weights, training=training)
    except Damage as wrong:
        raise damaged(Path(path), str(wrong)) from wrong
    if isinstance(named := content.get("state_dict"), dict):
        content["state_dict"] = with_head(named)
    return content


def merge(folder: Path, out: Path | None = None) -> Path:
    """Write a checkpoint that is a folder as the file that a run without `checkpoint.sharded` writes; return the file.

    The whole checkpoint is in memory meanwhile.

    Args:
        folder: the checkpoint.
        out: the file; by default NAME.merged.ckpt next to the folder.

    Raises:
        UserError: the checkpoint is no folder, or damaged, or `out` exists.
    """
    if not is_sharded(folder):
        check_checkpoint(folder)
        raise UserError(f"{folder} is one file already")
    out = out or folder.with_suffix(".merged.ckpt")
    check_new(out, "file")
    content = read_folder(folder, training=True)
    with atomic(out, durable=True) as partial:
        save(partial, content)
        seal(partial)
    return out


@typed
def export_weights(checkpoint: str | Path, out: str | Path) -> Path:
    """Write the weights of a checkpoint as one safetensors file, which `seqarch.load` reads; return its path.

    Raises:
        UserError: the file is not a checkpoint, or `out` exists or does not end in `.safetensors`.
    """
    out = Path(out)
    if out.suffix != SUFFIX:
        raise UserError(f"{out} must end in {SUFFIX}")
    check_new(out, "file")
    write_content(out, read_checkpoint(named_checkpoint(checkpoint)))
    return out


class Checkpoints(TorchCheckpointIO):
    """Lightning's reader of checkpoints for strategies whose processes have a whole model each; it reads folders too.

    Args:
        training: whether training goes on, which needs the states of the optimizers.
    """

    def __init__(self, *, training: bool) -> None:
        self.training = training

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        if is_sharded(path):
            return read_folder(path, training=self.training)
        return super().load_checkpoint(path, *args, **options)


def check_weights(weights: Any, path: str | Path) -> None:
    """Raise `UserError` for anything but tensors by name."""
    if not isinstance(weights, dict) or not all(isinstance(name, str) and _is_dense(weights[name]) for name in weights):
        raise UserError(f"{path} is not a checkpoint of seqarch: it does not hold tensors by name")


def check_entries(content: Any, path: str | Path) -> None:
    """Raise `UserError` unless there is in a checkpoint what every reader of it finds in it."""
    with refused(f"{path} is not a checkpoint of seqarch", TypeError, AttributeError, KeyError, why=_lacking):
        Entries(*(content.get(each.name) for each in fields(Entries)))
        Provenance.of_checkpoint(content)
        files = content["seqarch"].get("tokenizer_files", {})
        if not all(_is_dense(each) and each.dtype == torch.uint8 for each in files.values()):
            raise TypeError("its 'tokenizer_files' hold more than bytes")
    check_plain(f"{path}: 'hyper_parameters'", content["hyper_parameters"])


def _lacking(error: Exception) -> object:
    """What a checkpoint lacks: an error of ours says it, and Python's errors mean that an entry is not a mapping."""
    return error if isinstance(error, TypeError) else "it does not hold the entries of one by name"


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Tensor]]:
    """The entry of a checkpoint with the files of a tokenizer, if it has any; `tokenizer_of` reads it."""
    files = {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in tokenizer.files.items()}
    return {"tokenizer_files": files} if files else {}


def tokenizer_of(content: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a checkpoint, which needs no other file."""
    files = content["seqarch"].get("tokenizer_files", {})
    read = {name: bytes(each.numpy()) for name, each in files.items()}
    return tokenizer_from(content["seqarch"]["tokenizer"], read.__getitem__, "the checkpoint")


def holds_only_weights(content: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has no state of training at all, as that of an imported model."""
    return not any(content.get(entry) for entry in TRAINING)


def check_resumable(content: Mapping[str, Any], path: str | Path) -> None:
    """Raise `UserError` for a checkpoint from which no training can go on: without its state, or a strange one."""
    if not all(content.get(entry) for entry in TRAINING):
        raise UserError(f"{path} holds only weights, so no run resumes from it: begin a new run with them by --from")
    with refused(f"{path} is not a checkpoint of seqarch", TypeError, why=True):
        Training(*(content[name] for name in TRAINING))
    groups = [state.get("param_groups") for state in content["optimizer_states"] if isinstance(state, dict)]
    numbers = {"optimizer_states": _without_names(groups), **{name: content["seqarch"].get(name) for name in NOTED}}
    for name, state in {**numbers, "loops": content["loops"], "lr_schedulers": content["lr_schedulers"]}.items():
        check_plain(f"{path}: '{name}'", state)
        if not _holds_numbers(state):
            raise UserError(f"{path} is not a checkpoint of seqarch: its '{name}' hold more than numbers")
    sizes = [len(group) for group in groups if isinstance(group, list)]
    if not all(_is_schedule(state, sizes) for state in content["lr_schedulers"]):
        raise UserError(f"{path} is not a checkpoint of seqarch: its 'lr_schedulers' are not those of its optimizer")


def check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise `UserError` for a state unlike that of the recipe's own optimizer after one step.

    Its kernel would read past the end of other tensors, and other options would lead training elsewhere.

    Args:
        saved: the state in a checkpoint.
        optimizer: a new one, with the parameters of the model.
    """
    if unfit := next(_misfits(saved, optimizer), None):
        damaged = "the checkpoint's state of the optimizer is of another class or damaged"
        raise UserError(f"{damaged}: it does not fit {unfit}. Take the optimizer of its run's config.yaml")


def _misfits(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """What the state of an optimizer does not fit."""
    both = saved["param_groups"], optimizer.param_groups
    sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in both)
    if sizes != own_sizes:
        yield "the parameters"
    for options, group in zip(*both, strict=True):
        for name in options.keys() - {"params", *FOLLOWED}:
            if name not in group or options[name] != group[name]:
                yield f"the recipe: {one_line(name)} is {options[name]} there and {group.get(name, 'absent')} here"
        wanted: dict[Any, Any] = {}
        for key, parameter in zip(options["params"], group["params"], strict=True):
            kind = parameter.shape, parameter.dtype
            wanted[kind] = wanted.get(kind) or state_after_step(optimizer, group, torch.zeros(kind[0], dtype=kind[1]))
            if _form(saved["state"].get(key, wanted[kind]), parameter) != _form(wanted[kind], parameter):
                yield "the parameters"


def _form(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Shape and dtype of the tensors of a parameter's state, and whether they lie in memory as the parameter does."""

    def form(each: Any) -> Any:
        return _is_dense(each) and (each.shape, each.dtype, each.is_contiguous() or each.stride() == parameter.stride())

    return {name: form(each) for name, each in state.items()}


def _is_dense(value: Any) -> bool:
    """Whether this is a tensor as training saves them: not sparse, nested, quantized or without data."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return plain and not (value.is_nested or value.is_quantized or value.is_meta)


def _is_schedule(state: Any, sizes: list[int]) -> bool:
    """Whether the state of a learning rate schedule has an entry per group of parameters, and replaces no method."""
    lists = [state.get(name) for name in ("base_lrs", "lr_lambdas")] if isinstance(state, dict) else [None]
    sized = all(isinstance(each, list) and [len(each)] == sizes for each in lists)
    return sized and not any(callable(getattr(LambdaLR, str(name), None)) for name in state)


def _without_names(tree: Any) -> Any:
    """The options of groups without texts, such as a role, which `check_optimizer` compares."""
    if isinstance(tree, Mapping):
        kept = {key: each for key, each in tree.items() if key in FOLLOWED or not isinstance(each, str)}
        return {key: _without_names(each) for key, each in kept.items()}
    return [*map(_without_names, tree)] if isinstance(tree, list) else tree


def _holds_numbers(tree: Any) -> bool:
    """Whether nested mappings and lists hold nothing but numbers, and `None`."""
    if isinstance(tree, Mapping):
        return _holds_numbers(list(tree.values()))
    if isinstance(tree, list | tuple):
        return all(map(_holds_numbers, tree))
    return tree is None or (isinstance(tree, int | float) and abs(tree) < 2**53)


def model_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the model in a checkpoint, without what Lightning adds, and without classes that only train."""
    left_out = "optimizer", "schedule"
    options = ((str(key), value) for key, value in content["hyper_parameters"].items())
    return {key: value for key, value in options if not key.startswith("_") and key not in left_out}


def other_model(content: Mapping[str, Any], config: Mapping[str, Any], complete: Callable[[Any], Any]) -> str | None:
    """The difference between a checkpoint's model and that of a configuration, in words; `None` if they are the same.

    Fitting weights do not show this: the weights of attention fit Top-1 selection.

    Args:
        content: of the checkpoint.
        config: the configuration.
        complete: that of `difference`.
    """
    return difference({**config, "model": model_options(content)}, config, "checkpoint", complete)
