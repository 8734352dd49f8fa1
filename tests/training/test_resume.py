"""An interrupted run, started again, ends as if it had never been interrupted."""

import csv
import json
import os
import warnings

import pytest
import torch

from seqarch.errors import SeqarchWarning
from tests import processes
from tests.conftest import MODEL, TINY, flags

pytestmark = pytest.mark.commands

MEASURED_TIME = ("throughput/tokens_per_second",)
STEPS = 12


def start(shards, run_dir, workers=0, **interruption):
    options = {
        **TINY,
        **MODEL,
        "data.root": shards,
        "data.num_workers": workers,
        "run_dir": run_dir,
        "trainer.max_steps": STEPS,
        "train_loss.every_n_steps": 3,
        "checkpoint.every_n_steps": 5,
        "trainer.callbacks": "[tests.training.interrupt.Interrupt]",
    }
    return processes.fit([*flags(**options), "--allow_code=tests"], run_dir.parent / "logs", interruption)


def curves(run_dir):
    with (run_dir / "curves.csv").open(newline="") as file:
        return [{key: row[key] for key in row if key not in MEASURED_TIME} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def uninterrupted(shards, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = start(shards, run_dir)
    assert done.returncode == 0, done.stderr
    assert len(curves(run_dir)) > STEPS / 2
    return curves(run_dir)


def test_killed_run_goes_on_bit_for_bit(shards, tmp_path, uninterrupted):
    """Killed before the first checkpoint and after it, with and without loader workers."""
    for workers, step in ((0, 3), (0, 8), (2, 8)):
        killed = start(shards, tmp_path / "run", workers, INTERRUPT_STEP=str(step), INTERRUPT_SIGNAL="SIGKILL")
        assert killed.returncode == -9
        assert curves(tmp_path / "run") != uninterrupted
    resumed = start(shards, tmp_path / "run", 2)
    assert resumed.returncode == 0, resumed.stderr
    assert curves(tmp_path / "run") == uninterrupted


def test_ctrl_c_and_sigterm_save_and_the_run_goes_on(shards, tmp_path, uninterrupted):
    stopped = start(shards, tmp_path / "run", 2, INTERRUPT_STEP="7", INTERRUPT_SIGNAL="SIGINT", INTERRUPT_GROUP="1")
    assert stopped.returncode == 130, stopped.stderr
    assert "the same command resumes from" in stopped.stdout
    assert "step_00000007.ckpt" in stopped.stdout
    stopped = start(shards, tmp_path / "run", 2, INTERRUPT_STEP="9", INTERRUPT_SIGNAL="SIGTERM", INTERRUPT_GROUP="1")
    assert stopped.returncode == 0, stopped.stderr
    assert "step_00000009.ckpt" in stopped.stdout
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "stopped"
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == [
        "step_00000007.ckpt",
        "step_00000009.ckpt",
    ]
    resumed = start(shards, tmp_path / "run", 2)
    assert resumed.returncode == 0, resumed.stderr
    assert curves(tmp_path / "run") == uninterrupted


def test_slurm_is_asked_to_requeue_before_the_time_is_up(shards, tmp_path, uninterrupted):
    """SIGUSR1 from `#SBATCH --signal=USR1@120`: a checkpoint, then `scontrol requeue`; the job goes on as one."""
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued; ls {tmp_path}/run/checkpoints >> {tmp_path}/requeued'
    )
    scontrol.chmod(0o755)
    job = {"JOB_ID": 77, "NTASKS": 1, "NTASKS_PER_NODE": 1, "NNODES": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    env = {f"SLURM_{name}": str(value) for name, value in job.items()}
    env["PATH"] = f"{scontrol.parent}:{os.environ['PATH']}"
    signalled = {"INTERRUPT_STEP": "7", "INTERRUPT_SIGNAL": "SIGUSR1", "INTERRUPT_GROUP": "1"}
    stopped = start(shards, tmp_path / "run", 2, **env, **signalled)
    assert stopped.returncode == 0, stopped.stderr
    requeued = (tmp_path / "requeued").read_text().split()
    assert requeued == ["requeue", "77", "step_00000005.ckpt", "step_00000007.ckpt"]
    resumed = start(shards, tmp_path / "run", 2, **env, SLURM_RESTART_COUNT="1")
    assert resumed.returncode == 0, resumed.stderr
    assert curves(tmp_path / "run") == uninterrupted
    assert len((tmp_path / "requeued").read_text().split()) == len(requeued)
    assert not list((tmp_path / "run").glob("hpc_*"))


def test_a_run_from_the_checkpoint_of_another_follows_its_own_options(fit):
    """The other run ended with a rate of 0, which a step with that rate would show."""
    before = fit("before")
    optimizer = {"model.learning_rate": 2e-4, "model.weight_decay": 0.3, "model.betas": "[0.8, 0.9]"}
    schedule = {"model.decay_share": 0, "trainer.max_steps": 6, "checkpoint.every_n_steps": 1}
    with warnings.catch_warnings(action="error", category=SeqarchWarning):  # it lacks no row of the other run
        run = fit("after", **optimizer, **schedule, ckpt_path=before)
    old, new = (
        torch.load(path, weights_only=True)
        for path in (before / "checkpoints/step_00000004.ckpt", run / "checkpoints/step_00000005.ckpt")
    )
    groups = new["optimizer_states"][0]["param_groups"]
    assert [(group["lr"], group["betas"]) for group in groups] == [(2e-4, (0.8, 0.9))] * 2
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert not torch.equal(new["state_dict"]["lm.embedding.weight"], old["state_dict"]["lm.embedding.weight"])
