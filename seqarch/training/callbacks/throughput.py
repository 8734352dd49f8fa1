"""Tokens per second, model FLOP utilisation and memory."""

from statistics import fmean
from typing import Any

import lightning as L
import torch

from seqarch.arguments import Positive
from seqarch.runs import tags
from seqarch.training.callbacks.base import EveryNSteps, clock, log

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
"""Dense bf16 matrix TFLOP/s with fp32 accumulation by NVIDIA's data sheets; the first name that fits counts.
(Lightning's own table holds the H200's figure with sparsity, twice as high, under a name that the driver does not use.)
"""


def peak_tflops(device_name: str) -> float | None:
    """The dense bf16 peak of a GPU in TFLOP/s, `None` for one that is not in the table."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device_name), None)


class Throughput(EveryNSteps):
    """Logs speed and memory between two measurements.

    * `throughput/tokens_per_second`: over all devices, without the time that evaluations and checkpoints took;
    * `throughput/mfu`: the model's own operations over the devices' dense bf16 peak, for GPUs in `PEAK_TFLOPS` or with
      `peak_tflops`. `flops_per_token` counts forward and backward, without what activation checkpointing repeats; with
      a document mask no token attends beyond its document;
    * `memory/peak_gib`: the most memory that tensors held on one GPU since the last measurement.

    Args:
        every_n_steps: distance between two measurements in optimizer steps; 0 for none.
        peak_tflops: peak of one device in TFLOP/s; by default from the table `PEAK_TFLOPS`.
    """

    def __init__(self, every_n_steps: int = 10, peak_tflops: Positive | None = None) -> None:
        super().__init__(every_n_steps)
        self.peak_tflops = peak_tflops
        self.tokens_per_second: float | None = None
        """The last measurement, for progress bars."""
        self._mark = (0, 0.0)
        self._flops_per_token = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        lengths = trainer.datamodule.document_lengths()
        self._flops_per_token = fmean(pl_module.lm.flops_per_token(length, training=True) for length in lengths)
        if pl_module.device.type == "cuda":
            self.peak_tflops = self.peak_tflops or peak_tflops(torch.cuda.get_device_name(pl_module.device))
            torch.cuda.reset_peak_memory_stats(pl_module.device)  # its process may have trained another model
        self._mark = (trainer.global_step, self._training_clock(trainer, pl_module))

    def measure(self, trainer: Any, pl_module: L.LightningModule) -> None:
        step, seconds = trainer.global_step, self._training_clock(trainer, pl_module)
        steps, elapsed = step - self._mark[0], seconds - self._mark[1]
        self._mark = (step, seconds)
        if not steps:
            return
        rate = steps * trainer.datamodule.sequences_per_step * trainer.datamodule.sequence_length / elapsed
        self.tokens_per_second = rate
        metrics = {tags.TOKENS_PER_SECOND: rate}
        if self.peak_tflops is not None:
            metrics[tags.MFU] = rate * self._flops_per_token / (self.peak_tflops * 1e12 * trainer.world_size)
        if pl_module.device.type == "cuda":
            metrics[tags.PEAK_MEMORY] = torch.cuda.max_memory_allocated(pl_module.device) / 2**30
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        log(trainer, metrics)

    def _training_clock(self, trainer: Any, pl_module: L.LightningModule) -> float:
        measuring = sum(each.seconds for each in trainer.callbacks if isinstance(each, EveryNSteps))
        return clock(pl_module.device) - measuring
