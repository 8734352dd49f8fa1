"""Processes that share each sequence train like one process, which can continue the run."""

import copy
import json

import pytest
import torch

from seqarch.data.packing import as_documents
from seqarch.errors import UserError
from seqarch.mixers.attention import Attention
from seqarch.mixers.base import MixerState
from seqarch.mixers.pieces import Piece
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import RWKVChannelMix
from seqarch.testing.harness import Board, SharedPiece
from seqarch.training import LanguageModel
from seqarch.training.checks import check_pieces
from tests import processes
from tests.conftest import MODEL, TINY, flags
from tests.training.test_distributed import RECURRENT, assert_alike, losses, one_process, train  # noqa: F401

pytestmark = pytest.mark.commands

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


class Weighed(Attention):
    """Adds a loss that is a mean over tokens."""

    def forward(self, x, *, losses=None, **options):
        if losses is not None:
            losses["size"] = x.square().mean()
        return super().forward(x, **options)


def test_documents_in_pieces_have_the_training_loss_of_the_whole_row():
    """Four threads stand for processes, of which the trainer takes the mean."""
    torch.manual_seed(0)
    tokens = torch.randint(50, (2, 17))
    segments = torch.tensor([[1] * 5 + [2] * 12, [1] * 14 + [0] * 3], dtype=torch.int32)
    batch = {"tokens": tokens, **as_documents(tokens, segments, 8)}
    mixers = {"mixer": lambda d, i, n: Weighed(d, i, n, n_heads=2)}
    module = LanguageModel(vocab_size=50, d_model=16, n_layers=2, mixers=mixers, feed_forward=RWKVChannelMix)
    module.configure_model()
    module.double()

    def read(rank):
        own = copy.copy(module)
        own.piece = SharedPiece(rank, 4, 4, board=board)
        return own.loss(batch)

    board = Board(4)
    shared, whole = torch.stack(board.run(read)).mean(), module.loss(batch)
    torch.testing.assert_close(shared, whole)
    gradients = (torch.autograd.grad(loss, [*module.parameters()]) for loss in (shared, whole))
    torch.testing.assert_close(*gradients)


class InTurn(Weighed):
    def init_state(self, *like):
        return MixerState()


def test_what_pieces_cannot_do_is_refused():
    lm = SequenceLM(50, 16, 1, {"mixer": lambda d, i, n: InTurn(d, i, n, n_heads=2)})
    with pytest.raises(UserError, match=r"trainer.strategy.context=2 does not divide data.sequence_length=47"):
        check_pieces(lm, Piece(0, 2, 24), False, 47)
    with pytest.raises(UserError, match=r"InTurn has no rule that joins pieces \(MixerState.split\), which"):
        check_pieces(lm, Piece(0, 2, 24), True, 48)


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
