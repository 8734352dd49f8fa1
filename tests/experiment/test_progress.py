"""The line about the steps of a run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar

from seqarch.experiment import run


@pytest.fixture
def made(monkeypatch, capsys):
    """Lines, and how often the bar read the metrics, when 40 of 1,000 steps are made in so many seconds each."""

    def make(seconds, **console):
        progress, reads = run.Progress(), []
        monkeypatch.setattr(run, "get_console", lambda: SimpleNamespace(**console))
        monkeypatch.setattr(progress, "get_metrics", lambda *_: {"loss": 3.24963, "tokens/s": "800"})
        monkeypatch.setattr(RichProgressBar, "_update_metrics", lambda *_: reads.append(1))
        for step in range(1, 41):
            monkeypatch.setattr(run.time, "monotonic", lambda step=step: seconds * step)
            trainer: Any = SimpleNamespace(global_step=step, max_steps=1000)
            progress._update_metrics(trainer, None)
        return capsys.readouterr().out.splitlines(), len(reads)

    return make


def test_a_log_gets_a_line_whenever_the_time_has_doubled(made):
    lines, reads = made(2.0, is_terminal=False, is_jupyter=False)
    assert lines[0] == "step 6 of 1,000, loss 3.250, tokens/s 800, about 33 minutes left"
    assert [int(line.split()[1]) for line in lines] == [6, 11, 21]
    assert reads == 3


@pytest.mark.parametrize("kind", ["is_terminal", "is_jupyter"])
def test_a_bar_reads_the_loss_twice_a_second(made, kind):
    lines, reads = made(0.125, **{"is_terminal": False, "is_jupyter": False, kind: True})
    assert not lines
    assert reads == 10


def test_no_training_step_waits_for_its_loss(fit, monkeypatch):
    marked = []
    reading = "lightning.pytorch.trainer.connectors.logger_connector.result.convert_tensors_to_scalars"
    monkeypatch.setattr(reading, marked.append)  # Lightning does it in each batch for what is marked for its bar
    fit(**{"trainer.max_steps": 2})
    assert not marked
    trainer: Any = SimpleNamespace(
        callback_metrics={"loss": torch.tensor(2.5)}, progress_bar_metrics={}, callbacks=[], loggers=[]
    )
    assert run.Progress().get_metrics(trainer, None) == {"loss": 2.5}
