"""Checkpoints that are folders: two processes write them, any number resumes, and one file says the same."""

import errno
import json
import shutil
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as read_together
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from seqarch import cli, load
from seqarch.errors import UserError
from seqarch.runs.folder import checkpoints, is_finished
from seqarch.training import FSDP2
from seqarch.training.checkpoint import merge, read_folder, read_tensors
from seqarch.training.sharded import storage
from seqarch.training.sharded.folder import Folder
from seqarch.training.sharded_checkpoints import IN_BACKGROUND
from tests import processes
from tests.conftest import MODEL, TINY, flags

pytestmark = pytest.mark.commands

TWO = {"trainer.devices": 2, "trainer.strategy": "fsdp2", "checkpoint.keep": 9, "model.n_layers": 1}
SHARDED = {"checkpoint.sharded": "true"}
HYBRID = "{class_path: seqarch.training.FSDP2, init_args: {replicas: 2}}"


def args_of(shards, run, **options):
    return flags(**{**TINY, **MODEL, **TWO, "data.root": shards, "run_dir": run, **options})


def train(args, logs, count=2):
    ranks = processes.fit_in_two(args, logs, count=count)
    assert [rank.returncode for rank in ranks] == [0] * count, "".join(rank.stderr for rank in ranks)


@pytest.fixture(scope="module")
def run(shards, tmp_path_factory):
    """A run of two processes with folders at the steps 2 and 4."""
    folder = tmp_path_factory.mktemp("sharded")
    train(args_of(shards, folder / "run", **SHARDED), folder / "logs")
    return folder / "run"


@pytest.fixture
def stopped(run, tmp_path):
    """A copy of the run as it was after step 2."""
    shutil.copytree(run, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped/checkpoints/step_00000004.ckpt")
    record = tmp_path / "stopped/run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "status": "stopped"}))
    return tmp_path / "stopped"


def content(checkpoint):
    """A checkpoint without what differs from run to run, and with parameters numbered in the order of their groups."""
    found = read_folder(checkpoint, training=True) if checkpoint.is_dir() else read_tensors(checkpoint)
    del found["seqarch"]["curves"]  # a checksum of rows with times
    for state in found["optimizer_states"]:
        order = [each for group in state["param_groups"] for each in group["params"]]
        state["state"] = {order.index(each): value for each, value in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [order.index(each) for each in group["params"]]
    return found


def assert_same(found, expected, place="", bound=0.0):
    """Compare two checkpoints, tensors within `bound` and all else exactly, types included."""
    assert type(found) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, place
        torch.testing.assert_close(found, expected, rtol=0, atol=bound, msg=place)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, each in expected.items():
            assert_same(found[key], each, f"{place}/{key}", bound)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place}/{number}", bound)
    else:
        assert found == expected, place


def test_two_processes_resume_bit_for_bit_and_write_a_file_with_the_same_content(run, stopped, shards, tmp_path):
    train(args_of(shards, stopped), tmp_path / "logs")
    first, last = checkpoints(stopped)
    assert sorted(each.name for each in first.iterdir()) == [
        "index.json",
        "shard_00000.safetensors",
        "shard_00001.safetensors",
    ]
    assert last.is_file()
    assert_same(content(last), content(checkpoints(run)[-1]))


def test_no_process_writes_the_part_of_another(run):
    sizes = [each.stat().st_size for each in checkpoints(run)[-1].glob("*.safetensors")]
    assert max(sizes) < 0.52 * sum(sizes)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1, {"trainer.strategy": "auto", "trainer.devices": 1}),
        (4, {"trainer.strategy": HYBRID, "trainer.devices": 4, "data.micro_batch_size": 1, **SHARDED}),
    ],
    ids=["one whole", "two pairs"],
)
def test_other_processes_resume(run, stopped, shards, tmp_path, count, options):
    """Each of the pairs has the whole model. Sums of gradients have another order."""
    train(args_of(shards, stopped, **options), tmp_path / "logs", count)
    found, expected = (dict(content(checkpoints(each)[-1])["state_dict"]) for each in (stopped, run))
    assert_same(found, expected, bound=1e-5)


@pytest.mark.parametrize(("rank", "count"), [(1, 3), (4, 5)])
def test_a_process_reads_its_rows_from_the_files_of_two(run, rank, count):
    folder = Folder(checkpoints(run)[-1])
    whole = {name: folder.read(name) for name in folder.tensors if folder.shape(name)}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        mesh = init_device_mesh("cpu", (count,))
        zeros = (torch.zeros_like(each) for each in whole.values())
        parts = [distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for each in zeros]
        read_together(dict(zip(whole, parts, strict=True)), storage_reader=storage.Reader(folder), no_dist=True)
    finally:
        dist.destroy_process_group()
    for (name, each), part in zip(whole.items(), parts, strict=True):
        rows = (*each.chunk(count), *[each[:0]] * count)[rank]
        torch.testing.assert_close(part.to_local(), rows, rtol=0, atol=0, msg=name)


def test_merged_it_is_a_file_like_any_other(run, tmp_path, capsys):
    folder = checkpoints(run)[-1]
    cli.run(["checkpoint", "merge", str(folder), "--out", str(tmp_path / "one.ckpt")])
    for taken in (folder / "shard_00000.safetensors", tmp_path / "one.ckpt", tmp_path):
        with pytest.raises(UserError, match=f"{taken} exists: name a new file"):
            merge(folder, taken)
    assert_same(content(tmp_path / "one.ckpt"), content(folder))


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(run, shards, tmp_path):
    """The second process dies when half of its tensors of step 4 are written."""
    envs = [{"NODE_RANK": "0", "LOCAL_RANK": "0"}, {"NODE_RANK": "0", "LOCAL_RANK": "1", "DIES_WRITING": "0004.ckpt"}]
    options = {"trainer.callbacks": "tests.training.interrupt.DiesWriting", "checkpoint.in_background": "true"}
    args = args_of(shards, tmp_path / "run", **SHARDED, **options)
    args.append("--allow_code=tests")
    ranks = processes.fit_together(args, tmp_path / "logs", envs)
    assert ranks[1].returncode == -signal.SIGKILL
    assert "the connection to another process" in ranks[0].stderr
    assert [each.name for each in checkpoints(tmp_path / "run")] == ["step_00000002.ckpt"]
    train(args, tmp_path / "logs")
    assert_same(content(checkpoints(tmp_path / "run")[-1]), content(checkpoints(run)[-1]))
    assert not [*tmp_path.rglob("*.partial")]


@pytest.fixture
def strategy(tmp_path):
    """A strategy with one process, which writes folders."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    strategy = FSDP2()
    strategy.model = torch.nn.Linear(3, 2)
    fully_shard(strategy.model, mesh=init_device_mesh("cpu", (1,)))
    strategy.write_folders()
    yield strategy
    dist.destroy_process_group()


def save_in_background(strategy, path, change=None):
    """Save while writing waits for `change` of the model; return the weights that were saved."""
    go, write = threading.Event(), storage.write_tensors
    weights = {name: each.full_tensor().clone() for name, each in strategy.model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "write_tensors", lambda *args: go.wait(20) and (change or write)(*args))
        checkpoint = {"state_dict": strategy.lightning_module_state_dict()}
        strategy.save_checkpoint(checkpoint, path, IN_BACKGROUND)
        with torch.no_grad():
            strategy.model.weight.add_(1)
        assert not path.exists()
        go.set()
        strategy.finish_writing()
    return weights


def test_training_goes_on_while_a_folder_is_written(strategy, tmp_path):
    """The folder holds the weights as they were, and appears when it is whole."""
    weights = save_in_background(strategy, tmp_path / "one.ckpt")
    folder = Folder(tmp_path / "one.ckpt")
    for name, each in weights.items():
        torch.testing.assert_close(folder.read(f"state_dict/{name}"), each, rtol=0, atol=0)


def test_an_error_while_training_goes_on_is_raised_and_leaves_nothing(strategy, tmp_path):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_in_background(strategy, tmp_path / "one.ckpt", full)
    assert not [*tmp_path.iterdir()]


def test_one_file_needs_a_model_that_is_split(shards, tmp_path, capsys):
    options = {**TINY, **MODEL, **SHARDED, "data.root": shards, "run_dir": tmp_path / "run"}
    with pytest.raises(UserError, match=r"checkpoint.sharded is for models that are split: set trainer.strategy"):
        cli.run(["fit", *flags(**options)])


def test_the_commands_know_folders(run, tmp_path, capsys):
    newest = checkpoints(run)[-1]
    cli.run(["checkpoint", "show", str(run)])
    assert f"{newest}  folder of 2  " in capsys.readouterr().out
    cli.run(["checkpoint", "check", str(run)])
    assert f"{newest} is whole" in capsys.readouterr().out
    cli.run(["export", str(run), "--out", str(tmp_path / "one.safetensors"), "--weights"])
    cli.run(["eval", "--checkpoint", str(newest), "--tasks", "Copying", "--out", str(tmp_path / "results")])
    one, folder = load(tmp_path / "one.safetensors")[0], load(run)[0]
    torch.testing.assert_close(one.state_dict(), folder.state_dict(), rtol=0, atol=0)
    cli.run(
        [
            "validate",
            "--config",
            str(run / "config.yaml"),
            "--ckpt_path",
            str(newest),
            "--trainer.strategy=auto",
            "--trainer.devices=1",
        ]
    )
    assert "loss/ood/code" in capsys.readouterr().out


def test_a_new_run_goes_on_from_a_folder(run, tmp_path, without_figures):
    more = {"trainer.max_steps": 5, "trainer.devices": 1, "trainer.strategy": "auto", "checkpoint.sharded": "false"}
    cli.run(["fit", "--from", str(run), *flags(run_dir=tmp_path / "longer", **more)])
    assert [each.name for each in checkpoints(tmp_path / "longer")] == ["step_00000005.ckpt"]


def test_branches_take_folders_and_old_folders_go(shards, tmp_path):
    at = {"branches.at": "[0.5]", "model.decay_share": 0.5, "trainer.max_steps": 8, "ood_loss.at": "[1]"}
    more = {**SHARDED, **at, "ood_loss.every_n_steps": 0, "trainer.devices": 1, "checkpoint.keep": 1}
    train(args_of(shards, tmp_path / "run", **more), tmp_path / "logs", count=1)
    assert all(each.is_dir() for each in checkpoints(tmp_path / "run/branches/step_00000004"))
    assert is_finished(tmp_path / "run/branches/step_00000004")
    assert [each.name for each in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000008.ckpt"]
