"""A callback that sends its own process, or process group, a signal: an interruption at a known step."""

import os
import signal

import lightning as L


class Interrupt(L.Callback):
    """Sends the signal named by INTERRUPT_SIGNAL when the step INTERRUPT_STEP is done; without them nothing."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == int(os.environ.get("INTERRUPT_STEP", "-1")):
            os.environ["INTERRUPT_STEP"] = "-1"
            number = getattr(signal, os.environ["INTERRUPT_SIGNAL"])
            if os.environ.get("INTERRUPT_GROUP"):
                os.killpg(0, number)
            else:
                os.kill(os.getpid(), number)
