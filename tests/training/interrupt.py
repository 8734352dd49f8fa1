"""A callback that sends its own process a signal: an interruption at a known step, without waiting or guessing."""

import os
import signal

import lightning as L


class Interrupt(L.Callback):
    """Sends the signal named by INTERRUPT_SIGNAL when the step INTERRUPT_STEP is done; without them nothing."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == int(os.environ.get("INTERRUPT_STEP", "-1")):
            os.environ["INTERRUPT_STEP"] = "-1"
            os.kill(os.getpid(), getattr(signal, os.environ["INTERRUPT_SIGNAL"]))
