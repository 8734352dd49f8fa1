"""The training loader: an endless stream in a fixed order, cut into epochs, whose whole state is a position.

Shards that training needs now and next are in memory, those from object storage also on disk.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from seqarch.data.order import DomainOrder, SampleOrder
from seqarch.data.packing import DocumentSequences, as_documents
from seqarch.data.remote import origin
from seqarch.data.shards import PackedSequences, Shards
from seqarch.errors import UserError

GROUPS = 3
"""Groups of shards on disk: the one that is read, the next, and the last, which other processes may still read."""


class ShardCache:
    """Reads the shards of each group while the group before it is in use.

    Shards in object storage are fetched once for all processes of a machine. Shards that are no longer needed make room
    for the next, the longest unused first. Shards on a disk are brought into memory one after the other, which is
    faster than sample by sample. Local domains without windows are left as they are, as a run may need little of them.

    Args:
        sequences: the training splits.
        orders: the order of each.
        gigabytes: of all shards of the training splits from object storage; by default as few as can be.

    Raises:
        UserError: `gigabytes` is too small for three groups of each domain, or given for shards on a disk.
    """

    def __init__(
        self, sequences: Sequence[PackedSequences], orders: Sequence[DomainOrder], gigabytes: float | None
    ) -> None:
        self.shards = [each.shards for each in sequences]
        self.orders = orders
        needed = sum(
            max(shards.sizes) * min(GROUPS * order.window, len(shards.sizes)) if order.window else sum(shards.sizes)
            for shards, order in zip(self.shards, orders, strict=True)
        )
        self.remote = origin(self.shards[0].folder) is not None
        self.max_bytes = needed if gigabytes is None else 1e9 * gigabytes
        if gigabytes is not None and not self.remote:
            raise UserError("data.cache_gb is for shards in object storage, and these lie on a disk: leave it out")
        if not self.max_bytes >= needed:
            least = f"{needed / 1e9:.3g}, which holds {GROUPS} of data.shuffle_window"
            raise UserError(f"data.cache_gb must be at least {least}, not {gigabytes:g}")
        in_memory = needed < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
        self.reads_ahead = self.remote or (in_memory and all(order.window for order in orders))
        self._entered: dict[int, range] = {}
        self._kept: dict[int, set[Path]] = {}
        self._reader: threading.Thread | None = None

    def enter(self, domain: int, turn: int) -> None:
        """Say that this process now reads a domain's `turn`-th sample. If its group is new, read ahead."""
        shards, order = self.shards[domain], self.orders[domain]
        if not self.reads_ahead or turn in self._entered.get(domain, ()):
            return
        group = order.group(turn)
        self._entered[domain] = order.turns_of(group)
        groups = [order.shards_of(each) for each in range(max(0, group - 1), group + 2)]
        self._kept[domain] = {shards.paths[shard] for shards_of in groups for shard in shards_of}
        if self.remote:
            self._make_room()
        first = os.getpid() % len(groups[-1])  # processes that share a disk begin with different shards
        wanted = [shard for each in groups[-2:] for shard in (*each[first:], *each[:first])]
        self._reader = threading.Thread(target=_read_ahead, args=(shards, wanted, self._reader), daemon=True)
        self._reader.start()

    def _make_room(self) -> None:
        kept = set().union(*self._kept.values())
        all_sizes = {path: size for each in self.shards for path, size in zip(each.paths, each.sizes, strict=True)}
        sizes, used = {}, {}
        for path in all_sizes:
            with contextlib.suppress(FileNotFoundError):
                if path in kept:
                    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
                stat = path.stat()
                sizes[path], used[path] = stat.st_size, stat.st_atime_ns
        room = self.max_bytes - sum(sizes.values()) - sum(all_sizes[path] for path in kept - sizes.keys())
        for path in sorted(sizes.keys() - kept, key=used.__getitem__):
            if room >= 0:
                return
            path.unlink(missing_ok=True)
            room += sizes[path]


def _read_ahead(shards: Shards, wanted: Sequence[int], before: threading.Thread | None) -> None:
    if before is not None:
        before.join()
    for shard in wanted:
        with contextlib.suppress(UserError, OSError):  # the reader meets it too, and says so
            shards.verify(shard)
            if hasattr(os, "posix_fadvise"):
                with shards.paths[shard].open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


AT_ONCE = 8192
"""Samples whose order is computed at once, in 3 ms. With 1,024 at once, each sample would take three times as long."""


@dataclass(eq=False)
class MixtureDataset(Dataset[dict[str, Tensor]]):
    """The sequences of a training mixture: `tokens [T+1]` and `sample [2]` (domain, index in it).

    With a document mask also `segments [T+1]` and `step_targets`, the number of targets of the optimizer step.

    Args:
        sequences: the training splits.
        cache: reads shards ahead of use.
    """

    sequences: Sequence[PackedSequences]
    cache: ShardCache

    def __getitem__(self, sample: tuple[int, ...]) -> dict[str, Tensor]:
        domain, turn, index, *step_targets = sample
        self.cache.enter(domain, turn)
        sequences = self.sequences[domain]
        item = {"tokens": sequences[index], "sample": torch.from_numpy(np.array([domain, index]))}
        if isinstance(sequences, DocumentSequences):
            item |= {"segments": sequences.segments(index), "step_targets": torch.tensor(step_targets[0])}
        return item


@dataclass(frozen=True)
class DocumentCollate:
    """Makes a batch of sequences of documents: `tokens`, `sample` and what `as_documents` adds.

    `loss_scale` makes of the sum of the batch's losses its part of the mean over the step's targets. The trainer takes
    the mean over micro-batches and processes.

    Args:
        documents: number of documents to make room for.
        micro_batches: of an optimizer step, over all processes.
    """

    documents: int
    micro_batches: int

    def __call__(self, items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = default_collate(items)
        batch |= as_documents(batch["tokens"], batch.pop("segments"), self.documents)
        batch["loss_scale"] = self.micro_batches / batch.pop("step_targets")[0].clamp_min(1).float()
        return batch


@dataclass(frozen=True)
class BatchPlan:
    """Which positions of the stream make up each micro-batch of a process.

    Optimizer step `s` takes the positions from `s * sequences_per_step` on, whatever the number of processes; each
    micro-batch is dealt out to the processes in order of rank.
    """

    micro_batch_size: int
    world_size: int
    rank: int
    batches_per_epoch: int
    accumulation: int = 1

    @property
    def sequences_per_micro_step(self) -> int:
        return self.micro_batch_size * self.world_size

    def positions(self, batches: range) -> np.ndarray:
        """Positions `[n, b]` of this process's `batches`, counted from the start of training."""
        starts = (np.array(batches) * self.world_size + self.rank) * self.micro_batch_size
        return starts[:, None] + np.arange(self.micro_batch_size)


@dataclass(eq=False)
class TrainLoader:
    """Yields the batches of one epoch from `position` on; `position` counts batches over all epochs.

    The position moves when a batch is handed out, not when a worker prepares it, so it is what a checkpoint must keep.
    """

    dataset: MixtureDataset
    order: SampleOrder
    plan: BatchPlan
    num_workers: int
    collate: DocumentCollate | None = None
    """For rows of documents."""
    position: int = 0

    def __len__(self) -> int:
        return self.plan.batches_per_epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        stop = (self.position // len(self) + 1) * len(self)
        loader = DataLoader(
            self.dataset,
            batch_sampler=self._samples(range(self.position, stop)),
            num_workers=self.num_workers,
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_outlive_signals,
            # An iterator draws a seed for its workers; from the default generator that would shift the model's dropout.
            generator=torch.Generator(),
        )
        try:
            for batch in loader:
                self.position += 1
                yield batch
            return
        except UserError as error:
            message = str(error).strip().rpartition("UserError: ")[2]  # a worker's message follows a traceback
            error.with_traceback(None)  # which a frame of PyTorch holds: the two would wait for garbage collection
        # Here the frames of the error are gone, and with them the workers, for whom the process would wait for ever.
        raise UserError(message)

    def _samples(self, batches: range) -> Iterator[list[list[int]]]:
        """The samples of each batch, as the dataset takes them."""
        at_once = max(1, AT_ONCE // self.plan.micro_batch_size)
        for start in range(0, len(batches), at_once):
            now = batches[start : start + at_once]
            positions = self.plan.positions(now)
            samples = self.order.locate(positions.ravel()).reshape(*positions.shape, 3)
            if self.collate is not None:
                step_targets = np.repeat(self._step_targets(now)[:, None], positions.shape[1], axis=1)
                samples = np.concatenate([samples, step_targets[..., None]], axis=2)
            yield from samples.tolist()

    def _step_targets(self, batches: range) -> np.ndarray:
        """The number of targets of the optimizer step that each batch belongs to, over all its micro-batches.

        It follows from the positions, so that no process asks another.
        """
        steps = np.array(batches) // self.plan.accumulation
        first, size = int(steps[0]), self.plan.accumulation * self.plan.sequences_per_micro_step
        found = self.order.locate(np.arange(first * size, (int(steps[-1]) + 1) * size))
        targets = np.zeros(len(found), np.int64)
        for domain, sequences in enumerate(self.dataset.sequences):
            here = found[:, 0] == domain
            if isinstance(sequences, DocumentSequences):
                targets[here] = sequences.targets(found[here, 2])
        return targets.reshape(-1, size).sum(axis=1)[steps - first]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module keeps the position. With this method Lightning knows that the loader resumes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _outlive_signals(worker: int) -> None:
    """Schedulers and Ctrl-C signal every process: the training process decides when it and its workers stop."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """End workers that are left when the process ends; multiprocessing would send SIGTERM and wait for ever."""
    for process in multiprocessing.active_children():
        if process.daemon:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would report the end as an error
            process.kill()
