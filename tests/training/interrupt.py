"""Callbacks of test runs: an interruption at a known step, and a list of the samples."""

import os
import signal

import lightning as L


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


class Samples(L.Callback):
    """Appends to the file SAMPLES which sample of which domain each step takes."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with open(os.environ["SAMPLES"], "a") as file:
            file.writelines(f"{trainer.global_step} {domain} {index}\n" for domain, index in batch["sample"].tolist())
