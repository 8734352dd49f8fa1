"""The training loader: an endless stream in a fixed order, cut into epochs, whose whole state is a position."""

import atexit
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from seqarch.data.cache import ShardCache
from seqarch.data.order import SampleOrder
from seqarch.data.packing import DocumentSequences, as_documents
from seqarch.data.shards import PackedSequences
from seqarch.errors import UserError

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
        except GeneratorExit:  # of a process that ends, which has lost the name of the next class
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
