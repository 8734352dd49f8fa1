"""Processes that share each sequence train like one process, which can continue the run."""

import json

import pytest

from tests import processes
from tests.conftest import MODEL, TINY, flags
from tests.training.test_distributed import RECURRENT, assert_alike, losses, one_process, train  # noqa: F401

STRATEGY = "{class_path: seqarch.training.FSDP2, init_args: {context: 2}}"
SHARED = {"trainer.devices": 2, "trainer.strategy": STRATEGY}
ALONE = {"trainer.devices": 1, "trainer.strategy": "auto"}


def interrupted(run_dir):
    """The run as it was before its last two steps."""
    (run_dir / "checkpoints/step_00000004.ckpt").unlink()
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, "status": "running"}))


@pytest.fixture(scope="module")
def shared(shards, tmp_path_factory):
    """Arguments and run folder of a model that two processes trained, each with a half of every sequence."""
    folder = tmp_path_factory.mktemp("context")
    args = flags(**{**TINY, **MODEL, **RECURRENT, **SHARED, "data.root": shards, "run_dir": folder / "run"})
    assert train(args, folder / "logs").count("parameters, steps 0 to 4") == 1
    return args, folder / "run"


def test_two_processes_with_half_a_sequence_each_train_like_one(one_process, shared):  # noqa: F811
    assert_alike(losses(shared[1]), one_process(**RECURRENT))


def test_one_process_goes_on_with_whole_sequences(tmp_path, one_process, shared):  # noqa: F811
    args, run_dir = shared
    interrupted(run_dir)
    done = processes.fit([*args, *flags(**ALONE)], tmp_path / "logs")
    assert done.returncode == 0, done.stderr
    assert "steps 2 to 4" in done.stdout
    assert_alike(losses(run_dir), one_process(**RECURRENT))


@pytest.mark.slow  # below, two pairs go on from a checkpoint
def test_two_pairs_of_processes_train_like_one(shards, tmp_path, one_process):  # noqa: F811
    """The pairs read different sequences, with softmax attention."""
    options = {**TINY, **MODEL, **SHARED, "trainer.devices": 4, "data.root": shards, "run_dir": tmp_path / "run"}
    ranks = processes.fit_in_two(flags(**options), tmp_path / "logs", count=4)
    assert [rank.returncode for rank in ranks] == [0] * 4, "".join(rank.stderr for rank in ranks)
    assert_alike(losses(tmp_path / "run"), one_process())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data.sequence_length": 47}, "data.sequence_length is 47, and 2 processes"),
        ({"data.document_mask": "true"}, "data.document_mask does not go with context of fsdp2"),
    ],
)
def test_what_pieces_cannot_do_is_refused(shards, tmp_path, options, message):
    args = flags(**{**TINY, **MODEL, **SHARED, "data.root": shards, "run_dir": tmp_path / "run", **options})
    ranks = processes.fit_in_two(args, tmp_path / "logs")
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert message in ranks[0].stderr


@pytest.mark.parametrize(("count", "strategy"), [(2, "fsdp2"), (4, STRATEGY)])
def test_processes_go_on_from_a_checkpoint_of_one(shards, tmp_path, one_process, count, strategy):  # noqa: F811
    options = {**TINY, **MODEL, **ALONE, "data.root": shards, "run_dir": tmp_path / "run"}
    assert processes.fit(flags(**options), tmp_path / "logs").returncode == 0
    interrupted(tmp_path / "run")
    options |= {"trainer.devices": count, "trainer.strategy": strategy}
    ranks = processes.fit_in_two(flags(**options), tmp_path / "more", count=count)
    assert [rank.returncode for rank in ranks] == [0] * count, "".join(rank.stderr for rank in ranks)
    assert "steps 2 to 4" in ranks[0].stdout
    assert_alike(losses(tmp_path / "run"), one_process())
