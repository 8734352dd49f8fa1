"""Two CPU processes train like one: the same samples a step, the same losses, one checkpoint."""

import csv
import json
import re
from pathlib import Path

import pytest

from seqarch import cli
from tests.conftest import MODEL, TINY, flags
from tests.training import processes

ROOT = Path(__file__).parents[2]


def losses(run_dir):
    with (run_dir / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["step"], tag): float(row[tag])
        for row in rows
        for tag in ("loss/train", "loss/in_domain", "loss/ood/code", "entropy/layer_00", "gradient_norm")
        if row.get(tag)
    }


def launch(args, logs):
    """As it is typed: Lightning starts the second process."""
    done = processes.fit(args, logs, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(args, logs):
    """Both processes are started here, which saves the seconds that each takes to import PyTorch."""
    ranks = processes.fit_in_two(args, logs)
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(rank.stderr for rank in ranks)
    return "".join(rank.stdout for rank in ranks)


RECURRENT = {"model.mixers": "{mamba: {class_path: Mamba1, init_args: {d_state: 4}}}"}
UNTIED = {"model.tie_embeddings": "false", "model.activation_checkpointing": "true"}


@pytest.mark.parametrize(("strategy", "model"), [("ddp", {}), ("fsdp2", RECURRENT), ("fsdp2", UNTIED)])
def test_two_processes_train_like_one(fit, shards, tmp_path, strategy, model, capsys):
    # rows of three steps and a checkpoint after two: what is summed up must survive the resume
    options = {"train_loss.every_n_steps": 3, **model}
    one_process = losses(fit("one", **options))
    options = {**TINY, **MODEL, **options, "trainer.devices": 2, "trainer.strategy": strategy}
    args = flags(**options, **{"data.root": shards, "run_dir": tmp_path / "run"})
    printed = (launch if strategy == "ddp" else train)(args, tmp_path / "logs")
    assert printed.count("parameters, steps 0 to 4") == 1
    found = losses(tmp_path / "run")
    assert found.keys() == one_process.keys()
    for key, value in one_process.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key

    # evaluated again by two processes, it has the numbers of the curves, each printed once
    checkpoint = tmp_path / "run/checkpoints/step_00000004.ckpt"
    ranks = processes.fit_in_two([*args, "--ckpt_path", str(checkpoint)], tmp_path / "logs", "validate")
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(rank.stderr for rank in ranks)
    printed = re.findall(r"loss/ood/code\D+([\d.]+)", "".join(rank.stdout for rank in ranks))
    assert [float(each) for each in printed] == pytest.approx([found["4", "loss/ood/code"]], rel=1e-6)

    # the checkpoint of two processes is that of one: it generates text, and training goes on from it
    checkpoint = tmp_path / "run/checkpoints/step_00000002.ckpt"
    capsys.readouterr()
    cli.run(["generate", "--checkpoint", str(checkpoint), "--prompt", "The", "--max_new_tokens", "4"])
    assert capsys.readouterr().out.startswith("The")
    (tmp_path / "run/checkpoints/step_00000004.ckpt").unlink()
    record = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps({**record, "status": "running"}))
    train(args, tmp_path / "logs")
    assert losses(tmp_path / "run") == found
