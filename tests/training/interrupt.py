"""Interruptions of test runs at a known step, and callbacks: a late end of the first process, a list of the samples."""

import itertools
import os
import signal
import sys
import time

import lightning as L

from seqarch.training.callbacks import RunCheckpoint
from seqarch.training.sharded import storage


class Interrupt(L.Callback):
    """Sends the signal INTERRUPT_SIGNAL after the step INTERRUPT_STEP, if both are set.

    A process may take a step several times, in branches: INTERRUPT_SKIP of these do not count.
    """

    done = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        before, self.done = self.done, trainer.global_step  # a step has several batches
        if before < self.done == int(os.environ.get("INTERRUPT_STEP", "-1")):
            if skip := int(os.environ.get("INTERRUPT_SKIP", "0")):
                os.environ["INTERRUPT_SKIP"] = str(skip - 1)
                return
            os.environ["INTERRUPT_STEP"] = "-1"
            number = getattr(signal, os.environ["INTERRUPT_SIGNAL"])
            if os.environ.get("INTERRUPT_GROUP"):
                os.killpg(0, number)
            else:
                os.kill(os.getpid(), number)


class EndsLate(L.Callback):
    """The first process ends each training half a second late. The others may write nothing into the run folder."""

    def setup(self, trainer, pl_module, stage):
        def refuse(event, args):
            if event == "open" and str(args[1])[0] in "wax" and str(args[0]).startswith(trainer.default_root_dir):
                raise PermissionError(f"another process than the first writes {args[0]}")

        if not trainer.is_global_zero:
            sys.addaudithook(refuse)

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            time.sleep(0.5)


class DiesWriting(L.Callback):
    """Kills this process within the write of the checkpoint whose name holds DIES_WRITING, if that is set."""

    def setup(self, trainer, pl_module, stage):
        def parts(header, tensors):
            written = original(header, tensors)
            yield from itertools.islice(written, 1 + len(tensors) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

        original = storage._parts
        if name := os.environ.get("DIES_WRITING"):
            write = storage.write_tensors

            def dying(path, tensors):
                if name in str(path):
                    storage._parts = parts
                return write(path, tensors)

            storage.write_tensors = dying


class Samples(L.Callback):
    """Appends to the file SAMPLES which sample of which domain each step takes."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with open(os.environ["SAMPLES"], "a") as file:
            file.writelines(f"{trainer.global_step} {domain} {index}\n" for domain, index in batch["sample"].tolist())


def stop_at(monkeypatch, step, stop):
    """Call `stop` once, when a run has done a step."""
    original, stops = RunCheckpoint.on_train_batch_end, [stop]

    def wrapped(self, trainer, *args):
        original(self, trainer, *args)
        if trainer.global_step == step and stops:
            stops.pop()()

    monkeypatch.setattr(RunCheckpoint, "on_train_batch_end", wrapped)


def kill():
    raise RuntimeError("killed")
