"""Two CPU processes train like one: the same samples per step, the same losses, one checkpoint."""

import contextlib
import csv
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqarch import cli
from tests import processes
from tests.conftest import MODEL, TINY, flags, wait_for

pytestmark = pytest.mark.commands

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
    """As users type it: Lightning starts the second process."""
    done = processes.fit(args, logs, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def train(args, logs):
    """Both processes are started here, which saves the seconds that each takes to import PyTorch."""
    ranks = processes.fit_in_two(args, logs)
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(rank.stderr for rank in ranks)
    return "".join(rank.stdout for rank in ranks)


RECURRENT = {
    "model.mixers": "{mamba: {class_path: Mamba1, init_args: {d_state: 4}}}",
    "model.tie_embeddings": "false",
    "model.activation_checkpointing": "true",
}
"""What `MODEL` is not."""


@pytest.fixture(scope="module")
def one_process(shards, tmp_path_factory):
    """Curves of a model trained by one process."""
    known = {}

    def train_once(**options):
        if (key := str(options)) not in known:
            folder = tmp_path_factory.mktemp("one")
            args = flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": folder / "run", **options})
            assert processes.fit(args, folder / "logs").returncode == 0
            known[key] = losses(folder / "run")
        return known[key]

    return train_once


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key


THREE = {"train_loss.every_n_steps": 3}
"""Rows cover three steps, checkpoints two. The sums of an unfinished row must survive the resume."""


def test_lightning_starts_the_second_process(shards, tmp_path, one_process):
    options = {**TINY, **MODEL, **THREE, "trainer.devices": 2, "trainer.strategy": "ddp"}
    printed = launch(flags(**options, **{"data.root": shards, "run_dir": tmp_path / "run"}), tmp_path / "logs")
    assert printed.count("parameters, steps 0 to 4") == 1
    assert_alike(losses(tmp_path / "run"), one_process(**THREE))


@pytest.fixture(scope="module")
def two_processes(shards, tmp_path_factory):
    """Arguments and run folder of a model that two processes trained, each with a part of it."""
    folder = tmp_path_factory.mktemp("two")
    options = {**TINY, **MODEL, **THREE, **RECURRENT, "trainer.devices": 2, "trainer.strategy": "fsdp2"}
    args = flags(**options, **{"data.root": shards, "run_dir": folder / "run"})
    assert train(args, folder / "logs").count("parameters, steps 0 to 4") == 1
    return args, folder / "run"


def test_two_processes_train_like_one(one_process, two_processes):
    assert_alike(losses(two_processes[1]), one_process(**THREE, **RECURRENT))


def test_two_groups_of_two_processes_train_like_one(shards, tmp_path, one_process):
    """Hybrid sharding, with the optimizer that gathers matrices; the checkpoint continues in one process."""
    muon = {**THREE, "model.optimizer": "Muon"}
    hybrid = "{class_path: seqarch.training.FSDP2, init_args: {replicas: 2}}"
    options = {**TINY, **MODEL, **muon, "trainer.devices": 4, "trainer.strategy": hybrid, "data.micro_batch_size": 1}
    args = flags(**{**options, "data.root": shards, "run_dir": tmp_path / "run"})
    ranks = processes.fit_in_two(args, tmp_path / "logs", count=4)
    assert [rank.returncode for rank in ranks] == [0] * 4, "".join(rank.stderr for rank in ranks)
    assert_alike(losses(tmp_path / "run"), one_process(**muon))
    (tmp_path / "run/checkpoints/step_00000004.ckpt").unlink()
    alone = {"trainer.devices": 1, "trainer.strategy": "auto"}
    done = processes.fit([*args, *flags(**alone)], tmp_path / "logs")
    assert done.returncode == 0, done.stderr
    assert_alike(losses(tmp_path / "run"), one_process(**muon))


def test_two_processes_evaluate_what_they_trained(tmp_path, two_processes):
    """With the numbers of the curves, each printed once."""
    args, run_dir = two_processes
    checkpoint = run_dir / "checkpoints/step_00000004.ckpt"
    ranks = processes.fit_in_two([*args, "--ckpt_path", str(checkpoint)], tmp_path / "logs", "validate")
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(rank.stderr for rank in ranks)
    printed = re.findall(r"loss/ood/code\D+([\d.]+)", "".join(rank.stdout for rank in ranks))
    assert [float(each) for each in printed] == pytest.approx([losses(run_dir)["4", "loss/ood/code"]], rel=1e-6)


def test_the_checkpoint_of_two_processes_is_that_of_one(tmp_path, two_processes, capsys):
    """It generates text, and training goes on from it."""
    args, run_dir = two_processes
    before = losses(run_dir)
    checkpoint = run_dir / "checkpoints/step_00000002.ckpt"
    capsys.readouterr()
    cli.run(["generate", "--checkpoint", str(checkpoint), "--prompt", "The", "--max_new_tokens", "4"])
    assert capsys.readouterr().out.startswith("The")
    (run_dir / "checkpoints/step_00000004.ckpt").unlink()
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, "status": "running"}))
    assert "steps 2 to 4" in train(args, tmp_path / "logs")
    assert losses(run_dir) == before


def test_processes_that_hang_start_once_more_from_the_same_folder(tmp_path, monkeypatch):
    run, seen = tmp_path / "run", []
    run.mkdir()
    (run / "kept").touch()

    def start(args, logs, env):
        seen.append(sorted(path.name for path in run.iterdir()))
        (run / f"rank_{env['LOCAL_RANK']}").touch()
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "stdout").write_text(f"start {len(seen)}")
        (logs / "stderr").touch()
        process = processes.SERVER.Process(target=time.sleep, args=(0 if len(seen) != 2 else 600,))
        process.start()
        return process

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "HANG", 2.0)
    ranks = processes.fit_in_two([f"--run_dir={run}"], tmp_path / "logs")
    assert [rank.stdout for rank in ranks] == ["start 3", "start 4"]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert seen == [["kept"], ["kept", "rank_0"]] * 2


STEPS = {**THREE, "trainer.max_steps": 8, "checkpoint.every_n_steps": 3}


def node_args(shards, run_dir, nodes, **options):
    options = {**TINY, **MODEL, **STEPS, "trainer.num_nodes": nodes, "trainer.strategy": "ddp", **options}
    callbacks = "[tests.training.interrupt.Interrupt, tests.training.interrupt.Samples]"
    options |= {"data.root": shards, "run_dir": run_dir, "trainer.callbacks": callbacks}
    return [*flags(**options), "--allow_code=tests"]


@pytest.fixture(scope="module")
def two_nodes(shards, tmp_path_factory):
    """Curves and samples of a run of two nodes, as torchrun starts them, to its end."""
    folder = tmp_path_factory.mktemp("nodes")
    env = {"SAMPLES": str(folder / "samples")}
    ranks = processes.fit_on_nodes(node_args(shards, folder / "run", 2), folder / "logs", env, env)
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(rank.stderr for rank in ranks)
    return losses(folder / "run"), sorted((folder / "samples").read_text().splitlines())


def test_a_node_is_killed_and_both_go_on(shards, tmp_path, two_nodes):
    """The other process stops too. Started again together, they end as if there had been no kill."""
    env = {"SAMPLES": str(tmp_path / "samples")}
    kill = {**env, "INTERRUPT_STEP": "5", "INTERRUPT_SIGNAL": "SIGKILL"}
    args = node_args(shards, tmp_path / "run", 2)
    killed = processes.fit_on_nodes(args, tmp_path / "logs", env, kill)
    assert killed[1].returncode == -9
    assert killed[0].returncode not in (0, None)
    resumed = processes.fit_on_nodes(args, tmp_path / "logs", env, env)
    assert [rank.returncode for rank in resumed] == [0, 0], "".join(rank.stderr for rank in resumed)
    assert resumed[0].stdout.count("parameters, steps 3 to 8") == 1
    assert losses(tmp_path / "run") == two_nodes[0]


def test_a_run_moves_to_other_numbers_of_processes(shards, tmp_path, two_nodes):
    """Two nodes, then one process, then four with other micro-batches: each step has the same samples."""
    env = {"SAMPLES": str(tmp_path / "samples"), "INTERRUPT_SIGNAL": "SIGTERM"}
    for nodes, stop in ((2, "3"), (1, "6"), (4, "-1")):
        args = node_args(shards, tmp_path / "run", nodes, **{"data.micro_batch_size": 1})
        ranks = processes.fit_on_nodes(args, tmp_path / "logs", *[{**env, "INTERRUPT_STEP": stop}] * nodes)
        assert [rank.returncode for rank in ranks] == [0] * nodes, "".join(rank.stderr for rank in ranks)
    assert len(two_nodes[1]) == 8 * 4
    assert sorted((tmp_path / "samples").read_text().splitlines()) == two_nodes[1]
    assert_alike(losses(tmp_path / "run"), two_nodes[0])


def steps_logged(run_dir):
    return [step for step, tag in losses(run_dir) if tag == "gradient_norm"]


@pytest.mark.slow
def test_torchrun_on_two_nodes(shards, tmp_path):
    """As docs/cluster.md says: torchrun on each node, the process of one is killed, the same commands go on."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SAMPLES": str(tmp_path / "samples")}
    kill = {"INTERRUPT_STEP": "5", "INTERRUPT_SIGNAL": "SIGKILL"}

    def torchrun(run_dir, interruption):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = ["--master_addr", "127.0.0.1", "--master_port", str(port), "--nproc_per_node", "1", "--nnodes", "2"]
        command = [sys.executable, "-m", "torch.distributed.run", *place, "--node_rank"]
        rest = ["-m", "seqarch", "fit", *node_args(shards, run_dir, 2)]
        envs = [env, {**env, **interruption}]
        nodes = [subprocess.Popen([*command, str(node), *rest], env=envs[node]) for node in range(2)]
        return [node.wait(timeout=240) for node in nodes]

    assert torchrun(tmp_path / "whole", {}) == [0, 0]
    assert 0 not in torchrun(tmp_path / "run", kill)
    assert torchrun(tmp_path / "run", {}) == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_the_script_for_slurm(shards, tmp_path):
    """The script of docs/cluster.md with stand-ins for srun and scontrol. It is requeued once, then ends by itself."""
    script = re.search(
        r"```bash\n(#!/bin/bash\n#SBATCH[^`]*?\nsrun .*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL
    )
    assert script is not None
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    given = " ".join(shlex.quote(flag) for flag in node_args(shards, tmp_path / "run", 2, **{"trainer.devices": 1}))
    tasks = "SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_NNODES=2 SLURM_NODELIST=127.0.0.1 SLURM_LOCALID=0"
    for name, body in {
        "srun": f'for n in 0 1; do {tasks} SLURM_PROCID=$n SLURM_NODEID=$n "$@" & done; wait',
        "scontrol": f'echo "$@" >> {tmp_path}/requeued',
        "seqarch": f'exec {sys.executable} -m seqarch "$@" {given}',
    }.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "4711"}
    env |= {"SAMPLES": str(tmp_path / "samples"), "INTERRUPT_SIGNAL": "SIGUSR1", "INTERRUPT_STEP": "5"}
    subprocess.run(["bash", "-c", script[1]], env=env, check=True, timeout=240)
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert steps_logged(tmp_path / "run") == ["3"]
    env["INTERRUPT_STEP"] = "-1"
    subprocess.run(["bash", "-c", script[1]], env=env, check=True, timeout=240)
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    assert steps_logged(tmp_path / "run") == ["3", "6", "8"]
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"


def second_of(first):
    """The process that this one started as its second, in `/proc`, once it imports PyTorch."""
    for child in (first / "task" / first.name / "children").read_text().split():
        second = first.parent / child
        with contextlib.suppress(OSError):  # it has ended
            if b"LOCAL_RANK=1" in (second / "environ").read_bytes() and "libtorch" in (second / "maps").read_text():
                return second
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that the one above it has ended")
def test_a_process_ends_with_the_one_that_started_it(shards, tmp_path):
    options = {**TINY, **MODEL, "trainer.devices": 2, "trainer.strategy": "ddp", "data.root": shards}
    args = ["fit", *flags(**options, run_dir=tmp_path / "run")]
    first = processes._start(args, tmp_path / "logs", {"PYTHONPATH": str(ROOT)})
    try:
        second = wait_for(lambda: second_of(Path("/proc", str(first.pid))))
    finally:
        first.kill()
        first.join()
    wait_for(lambda: not second.exists() or ") Z " in (second / "stat").read_text(), seconds=10)
