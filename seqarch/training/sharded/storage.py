"""What `torch.distributed.checkpoint` writes to and reads from: a folder of `seqarch.training.sharded.folder`.

PyTorch's own storage of safetensors files has no index, no checksums and no check. Its other storage pickles the index.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from seqarch.runs.files import remove, sync
from seqarch.runs.folder import INDEX
from seqarch.training.sharded.folder import DTYPES, Folder, index_text, shard_name


class Writer(StorageWriter):
    """Writes a folder next to its place. The folder gets its name when all processes have written.

    Args:
        path: the folder.
        content: the checkpoint without its tensors, as of `folder.split`.
    """

    def __init__(self, path: Path, content: Any) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.content = content

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.partial.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=shard_name(number)) for number, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        found: dict[str, tuple[WriteItem, Any]] = {
            item.index.fqn: (item, planner.resolve_data(item)) for item in plan.items if not _is_empty(item)
        }
        assert len(found) == sum(not _is_empty(item) for item in plan.items)
        results = []
        if found:
            tensors = {name: tensor for name, (_, tensor) in found.items()}
            digest = write_tensors(self.partial / plan.storage_data, tensors)
            for item, tensor in found.values():
                results.append(WriteResult(item.index, tensor.nbytes, (plan.storage_data, digest)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [each for of_process in results for each in of_process]
        rows: dict[str, dict[int, str]] = {}
        for each in written:
            rows.setdefault(each.index.fqn, {})[next(iter(each.index.offset or ()), 0)] = each.storage_data[0]
        tensors = {name: [files[start] for start in sorted(files)] for name, files in sorted(rows.items())}
        files = dict(sorted(each.storage_data for each in written))
        (self.partial / INDEX).write_text(index_text(files, tensors, self.content), encoding="utf-8")
        sync(self.partial / INDEX)
        sync(self.partial)
        remove(self.path)
        os.replace(self.partial, self.path)
        sync(self.path.parent)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _is_empty(item: WriteItem) -> bool:
    """Whether a process has no row of a tensor that is split, which must be split along its first dimension."""
    assert item.tensor_data is not None
    offsets, sizes, whole = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes, item.tensor_data.size
    assert (sizes[1:], sum(offsets[1:])) == (whole[1:], 0)
    return sizes.numel() == 0 < whole.numel()


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file, one tensor at a time, so that one of them is in memory; return the file's SHA-256."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each begins at its alignment
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        shape, dtype = [*tensors[name].shape], DTYPES[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in _parts(text, [tensors[name] for name in names]):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _parts(header: bytes, tensors: Sequence[Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file. A tensor is copied from the device when its turn comes."""
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class Reader(StorageReader):
    """Reads the tensors of a folder, each process the rows that it needs."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, rows in self.folder.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.shape)) for each in rows]
            properties = TensorProperties(dtype=rows[0].dtype)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(self.folder.shape(name)), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, first = item.storage_index.fqn, next(iter(item.storage_index.offset or ()), 0)
            rows = next(each for each in self.folder.tensors[name] if each.start == first and 0 not in each.shape)
            target = planner.resolve_tensor(item).detach()
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            target.copy_(self.folder.slice(name, rows, tuple(slice(begin, begin + length) for begin, length in ends)))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
