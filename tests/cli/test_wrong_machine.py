"""If the machine or environment does not fit the command, it says so in one line on stderr and exits with 2."""

import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, StrategyRegistry

from seqarch import cli
from seqarch.errors import UserError
from seqarch.experiment.checks import strategies, user_errors_of_lightning
from tests.conftest import MODEL, TINY, flags

LARGE = Path(__file__).parents[2] / "recipes/top1_chunk_1b.yaml"


def test_process_says_for_whom_it_waits(fit, monkeypatch, capfd):
    def nobody_comes(*args, **kwargs):
        time.sleep(1)
        raise UserError("nobody came")

    monkeypatch.setattr("seqarch.experiment.checks.PATIENCE", 0.1)
    monkeypatch.setattr("torch.distributed.init_process_group", nobody_comes)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29123", "NODE_RANK": "0"}
    with mock.patch.dict(os.environ, here), pytest.raises(UserError, match="nobody came"):
        fit(**{"trainer.num_nodes": 2, "trainer.strategy": "ddp"})
    said = [line for line in capfd.readouterr().err.splitlines() if "waits" in line]
    assert said == [
        "seqarch: node 0 of 2 (trainer.num_nodes) waits at 127.0.0.1:29123 for the others. Start the same command on "
        "each of them, with MASTER_ADDR, MASTER_PORT and NODE_RANK in its environment"
    ]


def test_gpu_recipe_without_a_gpu_says_how_to_run_on_a_cpu(refuse, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = refuse("fit", "--config", LARGE)
    assert "trainer.accelerator is gpu, but PyTorch sees no GPU here; on a CPU add: " in said
    for flag in ("accelerator=cpu", "devices=1", "strategy=auto", "precision=32-true"):
        assert f"--trainer.{flag}" in said


def test_more_gpus_than_there_are(refuse, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = refuse("fit", "--config", LARGE)
    assert said == f"trainer.devices is 8, but there are 2 GPUs and {os.cpu_count()} cores: set 1 to 2"


@pytest.mark.parametrize("devices", [0, 1000])
def test_no_devices_and_too_many(refuse, monkeypatch, devices):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = refuse("fit", *flags(**{**TINY, **MODEL, "run_dir": "run", "trainer.devices": devices}))
    assert said == f"trainer.devices is {devices}, but there are 0 GPUs and 2 cores: set 1 to 16"


def test_each_note_of_an_error_has_a_line_of_its_own(monkeypatch, capsys):
    error = UserError("two models\nfail")
    for note in ("one: a\nb", "other: \x1b[2J"):
        error.add_note(note)
    monkeypatch.setattr("seqarch.cli.app.run", mock.Mock(side_effect=error))
    with pytest.raises(SystemExit):
        cli.main(["mixers"])
    assert capsys.readouterr().err == "seqarch: error: two models fail\n  one: a b\n  other: ?[2J\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory: choose smaller sizes"),
        (MemoryError("Unable to allocate 2.84 PiB for an array"), "there is not enough memory for 2.84 PiB: choose"),
        (RuntimeError("you tried to allocate 512 bytes."), "there is not enough memory for 512 bytes: choose"),
    ],
)
def test_too_little_memory_is_one_line(refuse, monkeypatch, error, said):
    monkeypatch.setattr("seqarch.cli.app.run", mock.Mock(side_effect=error))
    assert said in refuse("mixers")


def test_backend_that_pytorch_does_not_know():
    """Of a strategy in a recipe; PyTorch asserts it when the processes meet."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    with pytest.raises(UserError, match="trainer: Unknown backend type zz"), user_errors_of_lightning():
        torch.distributed.init_process_group("zz", store=store, rank=0, world_size=1)


def test_strategies_that_may_be_meant_are_named(monkeypatch):
    """Those that Lightning knows, unless they copy the process, need a TPU or read checkpoints unchecked."""
    known = {"mine": DDPStrategy, "mine_fork": DDPStrategy, "mine_xla": DDPStrategy, "mine_fsdp": FSDPStrategy}
    for name, strategy in known.items():
        monkeypatch.setitem(StrategyRegistry, name, {"strategy": strategy})
    named = set(strategies())
    assert {"auto", "ddp", "fsdp2", "mine"} <= named
    assert not {"ddp_fork", "fsdp", "deepspeed", "xla", "mine_fork", "mine_xla", "mine_fsdp"} & named


def test_endpoint_that_is_no_url(refuse, monkeypatch):
    pytest.importorskip("boto3")
    for name, value in {"ENDPOINT_URL": "5", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("seqarch.data.remote._clients", {})
    assert "manifest.json cannot be read (Invalid endpoint: 5)" in refuse("data", "show", "s3://bucket/folder")


def test_variables_of_slurm_that_do_not_fit(refuse, monkeypatch, tmp_path, shards):
    for name in ("NTASKS", "PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "4")
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run"}
    assert "trainer: You set `--ntasks=4` in your SLURM bash script" in refuse("fit", *flags(**options))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("MASTER_PORT", ("x", "", "99999", "-1")),
        ("RANK", ("x", "1.5", "-1")),
        ("LOCAL_RANK", ("x",)),
        ("NODE_RANK", ("",)),
        ("WORLD_SIZE", ("0", "two")),
        ("SLURM_PROCID", ("x",)),
        ("SLURM_NTASKS_PER_NODE", ("4(x2)",)),
        ("SLURM_JOB_ID", ("job",)),
    ],
)
def test_variables_that_are_no_numbers(refuse, monkeypatch, name, values):
    for value in values:
        monkeypatch.setenv(name, value)
        assert f"{name} is '{value}' in the environment: unset it, or set " in refuse("fit", "--config", LARGE)
        assert f"{name} is '{value}' in" in refuse("generate", "--checkpoint", "x", "--prompt", "a")


def test_more_processes_on_a_node_than_devices(refuse, monkeypatch, shards):
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # Lightning sets it for the whole process
    options = {**TINY, **MODEL, "trainer.strategy": "ddp", "data.root": shards, "run_dir": "run"}
    assert "LOCAL_RANK or SLURM_LOCALID is 7: start 1 per node (trainer.devices)" in refuse("fit", *flags(**options))


@pytest.mark.parametrize(("launcher", "missing"), [("SLURM_NTASKS", "SLURM_PROCID"), ("TORCHELASTIC_RUN_ID", "RANK")])
def test_variables_that_are_missing(refuse, monkeypatch, launcher, missing):
    monkeypatch.setenv(launcher, "1")
    said = f"{launcher} is in the environment and {missing} is not: set it, or unset {launcher}"
    assert refuse("fit", "--config", LARGE) == said
