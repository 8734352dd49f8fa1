"""How processes that share a model save it as a folder, each its own part, and read such a folder."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from seqarch.errors import UserError, one_line, refused
from seqarch.runs.files import remove
from seqarch.runs.folder import is_sharded
from seqarch.training.integrity import damaged
from seqarch.training.sharded.folder import OPTIMIZERS, WEIGHTS, Damage, Folder, split
from seqarch.training.sharded.storage import Reader, Writer

IN_BACKGROUND = "in background"
"""The option of a checkpoint that is written while training goes on."""


class ShardedCheckpoints(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` with checkpoints that are folders without a pickle, or one file.

    It reads both. `write_folders` decides what it writes.
    """

    _writers: Any = None
    _writing: tuple[Writer, Any] | None = None

    def write_folders(self) -> None:
        """Write folders from now on."""
        self._save_distributed_checkpoint = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        return self._named_weights()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        assert self.model is not None
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return get_optimizer_state_dict(self.model, inner)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder, which has its name once all processes have written; see the class for other checkpoints.

        Args:
            checkpoint: what to write.
            filepath: the folder.
            storage_options: `IN_BACKGROUND` to return after a copy in the CPU's memory; `finish_writing` waits for the
                folder.
        """
        if not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.finish_writing()
        tensors: dict[str, Tensor] = {}
        content = {name: split(each, name, tensors) for name, each in checkpoint.items()}
        if not self.is_global_zero:  # the first process writes what all have
            tensors = {name: each for name, each in tensors.items() if isinstance(each, DTensor)}
        writer = Writer(Path(self.broadcast(filepath)), content)
        if self.is_global_zero:
            remove(writer.partial)
        self.barrier()
        if storage_options == IN_BACKGROUND:
            self._writers = self._writers or dist.new_group(backend="gloo")  # training has the other groups meanwhile
            self._writing = writer, async_save(tensors, storage_writer=writer, process_group=self._writers)
        else:
            with self._errors_of_processes(writer):
                save(tensors, storage_writer=writer)

    def finish_writing(self) -> None:
        """Wait for the folder that is written in the background, if there is one.

        Raises:
            OSError: a process could not write.
        """
        if self._writing is not None:
            (writer, future), self._writing = self._writing, None
            with self._errors_of_processes(writer):
                future.result()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the model and the optimizers from a checkpoint; return the rest of it.

        Raises:
            UserError: a folder is damaged, or holds another model.
        """
        path = Path(self.broadcast(checkpoint_path))
        if not is_sharded(path):
            return self._load_file(path, weights_only)
        assert self.model is not None
        folder = _open_together(path)
        states: list[Any] = [get_optimizer_state_dict(self.model, each) for each in self.optimizers]
        tensors: dict[str, Tensor] = {}
        split(self._named_weights(), WEIGHTS, tensors)
        split(states, OPTIMIZERS, tensors)
        _check_fits(folder, tensors, states)
        with self._errors_of_processes():
            load(tensors, storage_reader=Reader(folder))
        for optimizer, state, groups in zip(self.optimizers, states, folder.optimizers, strict=False):
            set_optimizer_state_dict(self.model, optimizer, {"state": state["state"], "param_groups": groups})
        return folder.content(
            lambda name: tensors[name] if name in tensors else folder.read(name), weights=False, training=bool(states)
        )

    def _load_file(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Fill the model and the optimizers from a file, which holds the whole model.

        Parameters have numbers in the order of the optimizer's groups there. Lightning takes another order, that of the
        module, so their names are given here.
        """
        module = self.model
        assert module is not None
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(module, content.pop("state_dict"), options=options)
        names = {parameter: name for name, parameter in module.named_parameters()}
        for optimizer, state in zip(self.optimizers, content["optimizer_states"], strict=False):  # none evaluates
            pairs = zip(state["param_groups"], optimizer.param_groups, strict=True)
            with refused(f"{path}: the state of the optimizer does not fit the parameters", ValueError):
                params = [zip(saved["params"], own["params"], strict=True) for saved, own in pairs]
                named = {number: names[parameter] for number, parameter in itertools.chain(*params)}
            groups = [{**group, "params": [named[each] for each in group["params"]]} for group in state["param_groups"]]
            by_name = {named[number]: values for number, values in state["state"].items()}
            set_optimizer_state_dict(module, optimizer, {"state": by_name, "param_groups": groups}, options=options)
        return content

    @contextlib.contextmanager
    def _errors_of_processes(self, writer: Writer | None = None) -> Iterator[None]:
        """Raise what a process raised, and remove what was written.

        PyTorch raises one error with all of them, a `BaseException`.
        """
        try:
            yield
        except CheckpointException as errors:
            if writer and self.is_global_zero:
                remove(writer.partial)
            raise next(error for error, _ in errors.failures.values()) from None

    def _named_weights(self) -> dict[str, Any]:
        """The parts of the weights that this process has; weights with two names once."""
        assert self.model is not None
        once = {name for name, _ in self.model.named_parameters()}
        twice = {name for name, _ in self.model.named_parameters(remove_duplicate=False)} - once
        return {name: each for name, each in get_model_state_dict(self.model).items() if name not in twice}


def _open_together(path: Path) -> Folder:
    """The folder, whose files all processes compare with their checksums, each some of them.

    Raises:
        UserError: one of the processes finds damage.
    """
    folder, wrong = None, None
    try:
        folder = Folder(path)
        folder.check_files(slice(dist.get_rank(), None, dist.get_world_size()))
    except (Damage, UserError, OSError) as error:
        wrong = one_line(error)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    if told := next(filter(None, found), None):
        raise damaged(path, told)
    assert folder is not None
    return folder


def _check_fits(folder: Folder, tensors: dict[str, Tensor], states: Sequence[Any]) -> None:
    """Raise `UserError` for a folder with other tensors or parameters than the model and its optimizers have."""
    read = [name for name in folder.tensors if name.startswith((f"{WEIGHTS}/", *[f"{OPTIMIZERS}/"][: len(states)]))]
    saved = {name: (folder.shape(name), folder.tensors[name][0].dtype) for name in read}
    wanted = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
    if wrong := sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name)):
        found, own = saved.get(wrong[0], ("missing",))[0], wanted.get(wrong[0], ("none",))[0]
        other = f"{one_line(wrong[0])[:80]} is {found}, not {own}"
        raise UserError(f"{folder.path} holds another model or optimizer ({other}): use the config.yaml of its own run")
    for state, groups in zip(states, folder.optimizers, strict=False):
        both: Any = groups, state["param_groups"]
        named, own = ([sorted(group["params"]) for group in each] for each in both)
        if named != own:
            raise UserError(f"{folder.path} holds the state of another optimizer: use the config.yaml of its own run")
