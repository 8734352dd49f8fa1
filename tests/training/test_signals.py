"""What a run does if Ctrl-C is pressed or SIGTERM comes, and what it does with the processes that it started."""

import itertools
import json
import signal
import subprocess

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from seqarch import cli
from seqarch.cli import app
from seqarch.data.prepare import prepare
from seqarch.errors import UserError
from seqarch.runs.folder import checkpoints, status
from seqarch.training.callbacks import OODLoss, RunCheckpoint, TrainLoss
from tests.training.interrupt import kill, stop_at


@pytest.fixture
def launcher(monkeypatch):
    """Lightning's, which starts other processes on one machine; NCCL would have them wait for half an hour."""
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    launcher.procs = [subprocess.Popen(["sleep", "60"])]
    monkeypatch.setattr(Strategy, "launcher", launcher, raising=False)
    return launcher


def test_processes_that_this_one_started_end_with_it(fit, launcher, monkeypatch):
    monkeypatch.setattr(launcher, "launch", lambda function, *args, trainer, **options: function(*args, **options))
    stop_at(monkeypatch, 2, kill)
    with pytest.raises(RuntimeError, match="killed"):
        fit()
    assert launcher.procs[0].wait(timeout=5) == -signal.SIGKILL


@pytest.fixture
def sigterm():
    """A handler in place of the system's, which would end the tests; returns its signals."""
    signals = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_processes_that_this_one_has_just_started(fit, launcher, monkeypatch, sigterm):
    monkeypatch.setattr(launcher, "launch", lambda *args, **options: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as stop:
        fit()
    assert stop.value.code == 128 + signal.SIGTERM
    assert launcher.procs[0].wait(timeout=5) == -signal.SIGKILL
    signal.raise_signal(signal.SIGTERM)
    assert sigterm == [signal.SIGTERM], "the handler from before is back"


def test_sigterm_after_the_last_step_leaves_a_finished_run(fit, tmp_path, monkeypatch, sigterm):
    on_train_end = RunCheckpoint.on_train_end

    def signalled(*args):
        on_train_end(*args)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunCheckpoint, "on_train_end", signalled)
    with pytest.raises(SystemExit):
        fit()
    assert status(tmp_path / "run") == "finished"


def test_sigterm_before_the_first_step_says_that_nothing_is_saved(fit, tmp_path, monkeypatch, capfd):
    measure = OODLoss.measure

    def signalled(*args):
        signal.raise_signal(signal.SIGTERM)
        measure(*args)

    monkeypatch.setattr(OODLoss, "measure", signalled)
    with pytest.raises(SystemExit) as stop:
        fit()
    assert stop.value.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM while no step was running; the same command goes on" in capfd.readouterr().err
    assert status(tmp_path / "run") == "stopped"
    monkeypatch.setattr(OODLoss, "measure", measure)
    fit()
    assert status(tmp_path / "run") == "finished"


@pytest.fixture
def interruptible():
    """A shell's background job ignores SIGINT; Python in the foreground does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_writes_a_checkpoint(fit, tmp_path, monkeypatch, interruptible, capfd):
    stop_at(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fit(**{"checkpoint.every_n_steps": 10})
    shown = capfd.readouterr()
    assert "Ctrl-C again stops at once" in shown.err
    assert "the same command resumes from" in shown.out
    assert status(tmp_path / "run") == "stopped"
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_00000003.ckpt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def few(tmp_path):
    """Options of a run of 9 steps, whose epochs have 3 steps of two batches."""
    lines = [json.dumps({"text": f"{number:3} " * 30}) for number in range(8)]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    data = prepare([tmp_path / "few.jsonl"], tmp_path / "shards", "docs", "byte", holdout=0.5, workers=1)
    assert 3 <= data.splits["train"].tokens // 41 // 4 < 4
    options = {"data.root": tmp_path / "shards", "data.ood": "[]", "data.sequence_length": 40, "trainer.max_steps": 9}
    measured = {f"{name}.every_n_steps": 0 for name in ("attention_entropy", "throughput", "train_loss")}
    return {**options, **measured, "ood_loss.every_n_steps": 1, "checkpoint.every_n_steps": 20}


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_what_else_stops_a_run_leaves_a_checkpoint_of_a_whole_step(fit, few, tmp_path, monkeypatch, hook):
    """Such as `trainer.max_time`, within a step and at the end of an epoch."""
    whole = fit("whole", **few)
    with monkeypatch.context() as patch:
        calls = iter([False, False, True] if hook == "on_train_batch_end" else [False, True])

        def stop(self, trainer, *_):
            trainer.should_stop |= next(calls, False)

        patch.setattr(TrainLoss, hook, stop)
        fit(**few)
        assert status(tmp_path / "run") == "stopped"
        step = 2 if hook == "on_train_batch_end" else 7
        assert [path.name for path in checkpoints(tmp_path / "run")] == [f"step_{step:08d}.ckpt"]
    fit(**few)
    assert (tmp_path / "run/curves.csv").read_bytes() == (whole / "curves.csv").read_bytes()


def test_a_time_limit_counts_the_time_before_and_may_change(fit, few, tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("lightning.pytorch.callbacks.timer.time.monotonic", lambda: next(clock))
    few["trainer.max_time"] = "00:00:00:09"
    fit(**few)
    (saved,) = checkpoints(tmp_path / "run")
    with pytest.raises(UserError, match="such as max_time, which counts the time before"):
        fit(**few)
    assert checkpoints(tmp_path / "run") == [saved]
    fit(**few | {"trainer.max_time": "00:01:00:00"})
    assert status(tmp_path / "run") == "finished"


def test_a_checkpoint_between_two_epochs_is_one_of_a_whole_step(fit, few, tmp_path):
    """As Lightning's own callback writes them."""
    few["train_loss.every_n_steps"] = 1
    own = "[{class_path: ModelCheckpoint, init_args: {save_top_k: -1}}]"
    whole = fit("whole", **few, **{"trainer.callbacks": own})
    (between,) = whole.rglob("*step=6.ckpt")
    curves = [(run / "curves.csv").read_text().splitlines() for run in (whole, fit(**few, ckpt_path=between))]
    assert curves[0][-3:] == curves[1][-3:]


def test_a_second_ctrl_c_stops_at_once(fit, tmp_path, monkeypatch, interruptible, capsys):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    stop_at(monkeypatch, 2, twice)
    run = app.run

    def run_once(args):
        monkeypatch.setattr(app, "run", run)
        fit(**{"checkpoint.every_n_steps": 10})

    monkeypatch.setattr(app, "run", run_once)
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit"])
    assert stop.value.code == 130
    assert status(tmp_path / "run") == "stopped"
    assert not checkpoints(tmp_path / "run")


def test_a_process_that_ignores_ctrl_c_goes_on_doing_so(fit, tmp_path, monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_at(monkeypatch, 2, lambda: signal.raise_signal(signal.SIGINT))
    fit()
    signal.signal(signal.SIGINT, before)
    assert status(tmp_path / "run") == "finished"
