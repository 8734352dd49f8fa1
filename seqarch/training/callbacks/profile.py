"""Records where a few steps of a run spend their time, with PyTorch's profiler."""

from pathlib import Path
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile, schedule

from seqarch.errors import UserError, say
from seqarch.tables import aligned

SKIPPED = 2
"""The first steps of a process, which compile and tune, and the second of which warms the profiler up."""
ROWS, WIDTH = 10, 70
"""Rows that are printed, and letters of a name in them."""


class Profile(L.Callback):
    """Writes a trace of `n_steps` steps from the third on, for Perfetto and TensorBoard, and prints the slowest.

    The rows are kernels on a GPU and operators on a CPU, by their own time. Each process of the run writes a trace.

    Args:
        folder: where the traces are written.
        n_steps: optimizer steps that are recorded.
    """

    def __init__(self, folder: Path, n_steps: int) -> None:
        self.folder = folder
        self.n_steps = n_steps
        self._profiler: profile | None = None
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if (left := trainer.max_steps - trainer.global_step) < self.n_steps + SKIPPED:
            raise UserError(f"profile is {self.n_steps}, but of the {left} steps left it can record {max(0, left - 2)}")
        self._step = trainer.global_step
        activities = [ProfilerActivity.CPU]
        if pl_module.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=SKIPPED - 1, warmup=1, active=self.n_steps, repeat=1)
        self._profiler = profile(activities=activities, schedule=plan)
        self._profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *batch: Any) -> None:
        if self._profiler is None or trainer.global_step == self._step:  # one of several batches of a step
            return
        self._step = trainer.global_step
        self._profiler.step()
        if self._profiler.step_num == SKIPPED + self.n_steps:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            steps = f"{self._step - self.n_steps + 1}-{self._step}"
            self.folder.mkdir(exist_ok=True)
            path = self.folder / f"steps_{steps}_process_{trainer.global_rank}.pt.trace.json.gz"
            profiler.export_chrome_trace(str(path))
            if trainer.is_global_zero:
                say(f"steps {steps} by their own time per step; https://ui.perfetto.dev shows {path}")
                say("\n".join(slowest_kernels(profiler, self.n_steps)))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._profiler is not None:  # the run ended before
            self._profiler.stop()


def slowest_kernels(profiler: profile, n_steps: int) -> list[str]:
    """The lines of a table of the kernels that take the most time of their own, the slowest first."""
    events = [event for event in profiler.key_averages() if not event.is_user_annotation and event.count]
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    times = [(event.self_device_time_total, event) for event in kernels]
    times = times or [(event.self_cpu_time_total, event) for event in events]
    times.sort(key=lambda pair: -pair[0])
    whole = sum(time for time, _ in times) or 1
    rows = [("ms", "share", "calls", "kernel" if kernels else "operator")]
    for time, event in times[:ROWS]:
        calls = event.count / n_steps
        rows.append((f"{time / n_steps / 1e3:.3f}", f"{time / whole:.1%}", f"{calls:.0f}", event.key[:WIDTH]))
    return aligned(rows, right=(0, 1, 2))
