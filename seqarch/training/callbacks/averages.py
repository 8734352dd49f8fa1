"""The weights that a measurement in training reads."""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import WeightAveraging


@contextlib.contextmanager
def averaged(trainer: Any, module: L.LightningModule) -> Iterator[None]:
    """The weights that a checkpoint has: their averages, where a callback of Lightning keeps these."""
    averages = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
    for each in averages:
        each.on_validation_epoch_start(trainer, module)
    try:
        yield
    finally:
        for each in averages:
            each.on_validation_epoch_end(trainer, module)
