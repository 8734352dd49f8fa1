"""Losses of a model on fixed rows, whatever the batch size and the number of processes."""

import os
import socket
import threading

import pytest
import torch

from seqarch.data.tokenizers import ByteTokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer, Scores, Task, evaluate
from seqarch.mixers.attention import Attention
from seqarch.model import GELUMLP, SequenceLM
from seqarch.model.lm import MixerFactory
from seqarch.testing.harness import Board, SharedPiece
from tests.processes import SERVER

T, VOCAB = 12, 31
ROWS = torch.randint(VOCAB, (7, T + 1), generator=torch.Generator().manual_seed(3))


def small_lm(seed=0, vocab=VOCAB):
    torch.manual_seed(seed)
    mixers: dict[str, MixerFactory] = {"attention": lambda d, i, n: Attention(d, i, n, n_heads=2)}
    return SequenceLM(vocab, 16, 2, mixers, feed_forward=GELUMLP)


def spread(losses, tokens):
    return torch.stack([losses.double().mean(dim=1), tokens[:, 0].double()], dim=1)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 16])
def test_losses_are_those_of_the_model(batch_size):
    lm = small_lm()
    shapes = []
    lm.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    losses = Scorer(lm, batch_size=batch_size).losses(ROWS)
    with torch.no_grad():
        expected = lm(ROWS[:, :-1], ROWS[:, 1:], reduction="none")
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)
    assert set(shapes[:-1]) == {(batch_size, T)}, "a compiled model meets one shape"


def test_pairs_that_share_a_row_keep_their_own_answers():
    text, scorer = list(b"a report on iron"), Scorer(small_lm(vocab=257), ByteTokenizer())
    borders = (9, 3, 12)
    together = scorer.log_likelihood([(text[:at], text[at:]) for at in borders])
    torch.testing.assert_close(together, torch.cat([scorer.log_likelihood([(text[:at], text[at:])]) for at in borders]))


def test_rows_may_be_read_one_at_a_time():
    class Reader:
        def __len__(self):
            return len(ROWS)

        def __getitem__(self, index):
            return ROWS[index]

    lm = small_lm()
    assert torch.equal(Scorer(lm, batch_size=4).losses(Reader()), Scorer(lm, batch_size=4).losses(ROWS))


def test_two_pairs_of_processes_share_the_tokens_of_each_row(monkeypatch):
    """They are threads here. Each pair takes other batches, and each process half of their tokens."""
    models, shapes, own = [small_lm() for _ in range(4)], [[] for _ in range(4)], threading.local()
    all_four, pairs = Board(4), (Board(2), Board(2))

    def losses(rank):
        own.rank = rank
        models[rank].register_forward_pre_hook(lambda module, args: shapes[rank].append(tuple(args[0].shape)))
        piece = SharedPiece(rank % 2, 2, 1, board=pairs[rank // 2])
        return Scorer(models[rank], batch_size=2, rank=rank, world_size=4, shared=piece).losses(ROWS)

    def all_reduce(table):
        table.copy_(torch.stack(all_four.shown(own.rank, table.clone())).sum(0))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    for found in all_four.run(losses):
        torch.testing.assert_close(found, Scorer(small_lm()).losses(ROWS))
    assert shapes == [[(2, T // 2)] * 2] * 4


def test_single_row_keeps_its_shape():
    assert Scorer(small_lm()).measure(ROWS[:1], lambda losses, tokens: losses.mean(dim=1)).shape == (1,)


def test_measuring_leaves_model_and_generator_alone():
    lm = small_lm().train()
    before = torch.get_rng_state()
    Scorer(lm).losses(ROWS)
    assert lm.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in lm.parameters())


def test_forward_passes_run_in_the_given_context():
    lm = small_lm()
    exact = Scorer(lm).losses(ROWS)
    rounded = Scorer(lm, context=lambda: torch.autocast("cpu", dtype=torch.bfloat16)).losses(ROWS)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.02, atol=0.02)


def measure_as(rank, world_size):
    """What a scorer finds, and how many rows it read."""
    lm = small_lm()
    read = []
    lm.register_forward_pre_hook(lambda module, args: read.append(len(args[0])))
    scorer = Scorer(lm, batch_size=2, rank=rank, world_size=world_size)
    rows = scorer.measure(ROWS, spread).tolist(), scorer.losses(ROWS).tolist()
    text = Scorer(small_lm(vocab=257), ByteTokenizer(), max_tokens=20, rank=rank, world_size=world_size)
    texts = text.log_likelihood([(b"abc" * n, b"de") for n in range(5)]).tolist(), text.generate([b"a", b"bc", b"d"], 4)
    return *rows, *texts, sum(read)


def put_measured(rank, world_size, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    queue.put((rank, *measure_as(rank, world_size)))
    torch.distributed.destroy_process_group()


def in_processes(world_size):
    """What `measure_as` found in each of these processes, by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = SERVER.Queue()
    started = [SERVER.Process(target=put_measured, args=(rank, world_size, port, queue)) for rank in range(world_size)]
    for process in started:
        process.start()
    results = sorted(queue.get(timeout=120) for _ in started)
    for process in started:
        process.join()
    return results


@pytest.mark.commands
def test_two_processes_share_the_rows_and_get_the_numbers_of_one():
    *expected, all_rows = measure_as(0, 1)
    assert all_rows == 2 * 8, "four batches of two for each of the two calls"
    for rank, *found, rows in in_processes(2):
        assert found == expected, f"process {rank}, bit for bit"
        assert rows == all_rows / 2


class Counting(Task):
    """A task that counts its calls."""

    def __init__(self, tag="count"):
        self.tag = tag
        self.prepared = 0

    def prepare(self, data):
        self.prepared += 1

    def score(self, scorer):
        return Scores({self.tag: float(self.prepared)})


def test_a_task_is_prepared_once_per_data_module():
    task, scorer = Counting(), Scorer(small_lm())
    data, other = object(), object()
    found = [evaluate([task], scorer, each).metrics["count"] for each in (data, data, other)]  # pyright: ignore
    assert found == [1, 1, 2]


def test_two_tasks_with_one_tag_are_refused():
    with pytest.raises(UserError, match="two evaluation tasks give 'count', the second is Counting: remove one"):
        evaluate([Counting(), Counting()], Scorer(small_lm()), object())  # pyright: ignore
    assert evaluate([Counting(), Counting("other")], Scorer(small_lm()), object()).metrics.keys() == {"count", "other"}  # pyright: ignore
