"""Two processes with a half of each sequence have the losses and gradients of one process with the whole."""

import dataclasses
import functools
import inspect
import os
import socket
from typing import Any

import filelock
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from seqarch.errors import UserError
from seqarch.mixers import Mixer
from seqarch.mixers.base import MixerState
from seqarch.mixers.canon import Canon
from seqarch.mixers.pieces import GROUPS, Piece, numbers_of, state_before
from seqarch.mixers.registry import load_mixer
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import RWKVChannelMix
from tests import processes

LENGTH = 36
SECONDS = 120
"""After which the processes have hung. They take 20."""


@dataclasses.dataclass
class Sums(MixerState):
    """The sum of all tokens, their number, and the token before."""

    total: tuple[torch.Tensor, ...]
    last: torch.Tensor
    count: int = 0


class RunningMean(Mixer):
    """The mean of the tokens so far: a mixer with a state that has no rule for pieces."""

    capabilities = frozenset({"decode"})

    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, *, state=None):
        state = self.init_state(x.shape[0], 0, x.device, x.dtype) if state is None else state
        sums = state.total[0][:, None] + x.cumsum(1)
        counts = state.count + torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        before = torch.cat((state.last, x[:, :-1]), 1)[:, -x.shape[1] :]
        state.total, state.last, state.count = (sums[:, -1],), x[:, -1:], state.count + x.shape[1]
        return self.out(
            sums / counts[:, None] + torch.nn.functional.pad(before, (0, 0, x.shape[1] - before.shape[1], 0))
        )

    def init_state(self, batch_size, max_length, device, dtype):
        zeros = functools.partial(torch.zeros, device=device, dtype=dtype)
        # without a token before there is none: the state's tensors change their shapes
        return Sums((zeros(batch_size, self.d_model),), zeros(batch_size, 0, self.d_model))


CASES: dict[str, tuple[str, dict]] = {
    "Attention": ("Attention", {}),
    "window": ("Attention", {"window": 5}),
    "long window": ("Attention", {"window": 25, "position": "alibi"}),
    "Top1Chunk": ("Top1Chunk", {"chunk_size": 4, "key_conv": 3}),
    "NSA": ("NSA", {"chunk_size": 4, "selected_chunks": 3, "window": 6}),
    "Mamba2": ("Mamba2", {"head_dim": 8}),
    "DeltaNet": ("DeltaNet", {}),
    "RWKV7": ("RWKV7", {}),
    "in turn": ("in turn", {}),
}
"""A case for each kind of exchange between processes. `MixerSuite` compares all mixers, in threads."""


PACKED = ("Mamba2", "RWKV7", "window")
"""Cases that read documents too."""
DOCUMENTS = torch.tensor([0, 10, 40, 40, 72], dtype=torch.int32)


def build(case):
    name, options = CASES[case]
    mixer = RunningMean if name == "in turn" else load_mixer(name)
    heads = {"n_heads": 2} if "n_heads" in inspect.signature(mixer).parameters else {}
    torch.manual_seed(0)
    mixers = {"mixer": functools.partial(mixer, **heads, **options)}
    around = {"canon": Canon("AC"), "learned_positions": LENGTH} if case == "window" else {}
    lm = SequenceLM(50, 32, 2, mixers, feed_forward=RWKVChannelMix, **around).double()
    for parameter in lm.blocks.parameters():  # no output starts at zero, so all parameters have gradients
        parameter.data += 0.05 * torch.randn_like(parameter)
    return lm


def rows():
    tokens = torch.randint(0, 50, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def row():
    """Both rows as one of documents, of which one crosses the middle."""
    return [each.reshape(1, -1) for each in rows()]


def loss_and_gradients(lm, inputs, targets, **options):
    loss = lm(inputs, targets, **options)
    loss.backward()
    return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in lm.named_parameters()}}


def run(rank, port, path):
    """One of two processes: the mean over both of the loss and gradients, of each case."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    GROUPS["both"] = dist.group.WORLD
    piece = Piece(rank, 2, LENGTH // 2, "both")
    results = {}
    for case in CASES:
        lm = build(case)
        if case in ("RWKV7", "in turn"):
            lm.checkpoint_activations()
        results[case] = loss_and_gradients(lm, *map(piece.cut, rows()), piece=piece)
        with torch.no_grad():
            results[case]["loss without gradients"] = lm(*map(piece.cut, rows()), piece=piece)
        if case in PACKED:
            lm.zero_grad()
            own = piece.of_row(2 * LENGTH)
            found = loss_and_gradients(lm, *map(own.cut, row()), cu_seqlens=DOCUMENTS, piece=own)
            results[case] |= {f"documents: {name}": value for name, value in found.items()}
        for value in results[case].values():
            dist.all_reduce(value.div_(2))
    dist.destroy_process_group()
    if rank == 0:
        torch.save(results, path)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What two processes find, once for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "pieces"
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            path.touch()  # the tests of another process fail at once if these processes fail
            assert run_both(path) == [0, 0] or run_both(path) == [0, 0]  # gloo hangs once in some hundred runs
    return torch.load(path)


def run_both(path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [processes.SERVER.Process(target=run, args=(rank, port, path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(SECONDS)
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


@pytest.fixture
def one_thread():
    """As in the processes: orthogonal initial values depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.commands
@pytest.mark.parametrize("case", CASES)
def test_two_processes_with_a_half_each_are_one(case, results, one_thread):
    expected = loss_and_gradients(build(case), *rows())
    expected["loss without gradients"] = expected["loss"]
    if case in PACKED:
        found = loss_and_gradients(build(case), *row(), cu_seqlens=DOCUMENTS)
        expected |= {f"documents: {name}": value for name, value in found.items()}
    assert results[case].keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(results[case][name], value, rtol=0, atol=1e-13, msg=f"{case}: {name}")


def test_compiled_blocks_exchange_outside_of_their_graphs():
    """A compiler drops what gives a process nothing, as the halo of the first process, and the others wait forever."""
    operators = set()

    def keep(graph, inputs):
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert dist.group.WORLD is not None
        GROUPS["both"] = dist.group.WORLD
        block: Any = build("Attention").blocks[0]
        x = torch.ones(2, 18, 32).double()
        for layer in (block.mixer, block.feed_forward):  # the whole block traces again at each exchange
            state = state_before(layer, Piece(0, 2, 18, "both"), 2, "cpu", x.dtype)
            torch.compile(layer, backend=keep)(x, state=state)
    finally:
        dist.destroy_process_group()
    assert operators
    assert not [name for name in operators if name.startswith(("seqarch.all_pieces", "seqarch.exchange"))]


def test_a_state_that_cannot_be_sent_is_refused():
    @dataclasses.dataclass
    class Cached(MixerState):
        cache: object

    with pytest.raises(UserError, match=r"Cached.cache is a object: no process can send it"):
        numbers_of(Cached(object()))
