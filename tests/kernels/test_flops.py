"""`FlopCounterMode` counts our operators as `flops_per_token` of the mixers does, also without data."""

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from seqarch.kernels import flops, linear_cross_entropy, select_chunks, top1_chunk_attention, top1_element_attention
from seqarch.mixers.attention import Top1Chunk
from seqarch.mixers.cores import Top1ChunkCore, Top1ElementCore
from seqarch.model import SequenceLM


def counted(run, *, backward=False):
    with FlopCounterMode(display=False) as counter:
        out = run()
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.fixture
def fake(interpreter):
    """Tensors without data, for which the Triton operators are chosen as for those of a GPU."""
    flops.register_all()
    with FakeTensorMode():
        yield


def draw(B, T, H, D, Tk=None):
    shapes = ((B, T, H, D), (B, Tk or T, H, D), (B, Tk or T, H, D))
    return [torch.empty(shape, requires_grad=True) for shape in shapes]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("T", [1, 127, 128, 1000])
@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize("training", [False, True])
def test_top1_chunk_counts_as_its_core_does(T, selection, training):
    B, H, D = 2, 3, 64
    tensors = draw(B, T, H, D)
    total = counted(
        lambda: top1_chunk_attention(*tensors, selection=selection, backend="triton"),
        backward=training,
    )
    core = Top1ChunkCore(chunk_size=128, selection=selection)
    assert total == pytest.approx(B * T * core.flops_per_token(T, H, D, training=training), rel=1e-12)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("training", [False, True])
def test_top1_element_counts_as_its_core_does(training):
    B, T, H, D = 2, 130, 3, 64
    tensors = draw(B, T, H, D)
    total = counted(lambda: top1_element_attention(*tensors, backend="triton"), backward=training)
    assert total == pytest.approx(B * T * Top1ElementCore().flops_per_token(T, H, D, training=training), rel=1e-12)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_pieces_add_up_to_the_whole(selection):
    """The last queries of a sequence see what the whole sequence sees less what its beginning does."""

    def total(op, T, Tk, arguments):
        return counted(lambda: op(*draw(1, T, 2, 32, Tk)[:arguments], selection=selection, backend="triton"))

    for op, arguments in ((select_chunks, 2), (top1_chunk_attention, 3)):
        assert total(op, 700, 700, arguments) + total(op, 300, 1000, arguments) == total(op, 1000, 1000, arguments)


def test_pairs_are_those_of_a_count_by_query():
    for T in (1, 16, 17, 50):
        assert flops.chunks_before(T, 16) == sum(i // 16 for i in range(T))
        assert flops.chunk_keys(T, 16) == sum(i % 16 + 1 + (16 if i >= 16 else 0) for i in range(T))


@pytest.mark.parametrize("chunk_tokens", [32, 50])
def test_the_loss_counts_three_products(chunk_tokens):
    hidden = torch.randn(100, 24, requires_grad=True)
    weight = torch.randn(80, 24, requires_grad=True)
    targets = torch.randint(0, 80, (100,))
    total = counted(lambda: linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens), backward=True)
    assert total == 6 * 100 * 24 * 80


@pytest.mark.usefixtures("fake")
def test_a_model_counts_what_it_says(monkeypatch):
    """Blocks, head and loss of a whole model in training."""
    triton = functools.partial(top1_chunk_attention, backend="triton")
    monkeypatch.setattr("seqarch.mixers.cores.top1_chunk_attention", triton)
    lm = SequenceLM(100, 64, 2, {"a": lambda *place: Top1Chunk(*place, n_heads=2, position="none")})
    tokens = torch.zeros(2, 257, dtype=torch.int64)
    total = counted(lambda: lm(tokens[:, :-1], tokens[:, 1:]), backward=True)
    assert total == pytest.approx(2 * 256 * lm.flops_per_token(256, training=True), rel=1e-12)
