"""`FlopCounterMode` counts our operators as `flops_per_token` of the mixers does, also without data."""

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from seqarch.kernels import (
    attention_entropy,
    flops,
    gated_rms_norm,
    linear_cross_entropy,
    qkv_convolution,
    select_chunks,
    selective_scan,
    short_convolution,
    ssd,
    top1_chunk_attention,
    top1_chunk_decode,
    top1_element_attention,
)
from seqarch.mixers.attention import Top1Chunk
from seqarch.mixers.cores import Top1ChunkCore, Top1ElementCore
from seqarch.model import SequenceLM


def counted(run, *, backward=False):
    with FlopCounterMode(display=False) as counter:
        out = run()
        if backward:
            torch.stack([t.sum() for t in (out if isinstance(out, tuple) else (out,))]).sum().backward()
    return counter.get_total_flops()


@pytest.fixture
def fake(interpreter):
    """Tensors without data, for which the op chooses Triton operators as on a GPU."""
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
    total = counted(lambda: top1_chunk_attention(*tensors, selection=selection, backend="triton"), backward=training)
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
    """Keys of the last queries are the keys of the whole sequence less the keys of its beginning."""

    def total(op, T, Tk, arguments):
        return counted(lambda: op(*draw(1, T, 2, 32, Tk)[:arguments], selection=selection, backend="triton"))

    for op, arguments in ((select_chunks, 2), (top1_chunk_attention, 3)):
        assert total(op, 700, 700, arguments) + total(op, 300, 1000, arguments) == total(op, 1000, 1000, arguments)


def test_pairs_are_those_of_a_count_by_query():
    for T in (1, 16, 17, 50):
        assert flops.chunks_before(T, 16) == sum(i // 16 for i in range(T))
        for window in (None, 1, 5, 100):
            assert flops.causal_keys(T, window) == sum(min(i + 1, window or T) for i in range(T))
        for several in (1, 2, 3):
            assert flops.chunks_before(T, 16, several) == sum(min(i // 16, several) for i in range(T))
            seen = sum(i % 16 + 1 + 16 * min(i // 16, several) for i in range(T))
            assert flops.chunk_keys(T, 16, several) == seen


def test_every_operator_has_a_formula():
    pytest.importorskip("triton")
    flops.register_all()
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("seqarch::")}
    without_products = {"rope_tables", "all_pieces", "exchange", "sum_of_pieces"}  # of mixers
    ours = {name.partition(".")[0] for name in names} - without_products
    assert {name for name in ours if getattr(torch.ops.seqarch, name) not in flop_registry} == set()


def empty(*shape):
    return torch.empty(shape, requires_grad=True)


def recurrence(x, B, C):
    """Products of a recurrence, `x [M, T, P]`, B and C `[M, T, N]`: each token writes to the state and reads it."""
    state = torch.zeros(x.shape[0], B.shape[2], x.shape[2])
    outputs = []
    for t in range(x.shape[1]):
        state = state + B[:, t, :, None] @ x[:, t, None, :]
        outputs.append(C[:, t, None, :] @ state)
    return torch.cat(outputs, dim=1)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("training", [False, True])
def test_recurrences_count_a_write_and_a_read_of_the_state_per_token(training):
    batch, T, H, P, N = 2, 5, 4, 8, 16
    want = counted(lambda: recurrence(empty(8, T, P), empty(8, T, N), empty(8, T, N)), backward=training)
    x, dt, B, C = empty(batch, T, H, P), empty(batch, T, H), empty(batch, T, 1, N), empty(batch, T, 1, N)
    assert counted(lambda: ssd(x, dt, empty(H), B, C, backend="triton"), backward=training) == want
    arguments = empty(batch, T, H * P), empty(batch, T, H * P), empty(H * P, N), empty(batch, T, N), empty(batch, T, N)
    for backend in ("triton", "reference"):
        found = counted(lambda backend=backend: selective_scan(*arguments, backend=backend), backward=training)
        assert found == want


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("training", [False, True])
def test_convolutions_count_as_those_of_pytorch(training):
    x, weight = empty(2, 33, 48), empty(48, 4)

    def plain():
        return torch.nn.functional.conv1d(torch.nn.functional.pad(x.mT, (3, 0)), weight[:, None], groups=48)

    # gradients of inputs and weights cost as much each; PyTorch's formula for these does not know groups
    want = counted(plain) * (3 if training else 1)
    assert counted(lambda: short_convolution(x, weight, backend="triton"), backward=training) == want
    assert counted(lambda: qkv_convolution(x, weight, 2, 6, backend="triton"), backward=training) == want


@pytest.mark.usefixtures("fake")
def test_elements_do_not_count_in_the_norm():
    arguments = empty(2, 5, 4, 8), empty(2, 5, 4, 8), empty(4), empty(2, 5, 32), empty(32)
    for backend in ("triton", "reference"):
        assert counted(lambda backend=backend: gated_rms_norm(*arguments, backend=backend), backward=True) == 0


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("Tq", "Tk"), [(50, 50), (7, 50), (1, 16)])
def test_entropy_counts_the_scores_of_the_keys_that_are_seen(Tq, Tk):
    q, k, _ = draw(2, Tq, 3, 32, Tk)
    rows = range(Tk - Tq, Tk)
    for window in (None, 9):
        found = counted(lambda window=window: attention_entropy(q, k, window=window, backend="triton"))
        assert found == sum(2 * 2 * 3 * 32 * min(i + 1, window or Tk) for i in rows)
    chunks = torch.empty(2, Tq, 3, dtype=torch.int32)
    found = counted(lambda: attention_entropy(q, k, chunk_size=16, chunks=chunks, backend="triton"))
    assert found == sum(2 * 2 * 3 * 32 * (i % 16 + 1 + 16 * min(i // 16, 1)) for i in rows)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("capacity", "own"), [(50, 2), (48, 16), (10, 10)])
@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize("remote_chunks", [1, 2])
def test_decoding_counts_a_full_cache(capacity, own, selection, remote_chunks):
    q, k, v = (t.detach() for t in draw(2, 1, 3, 32, capacity))
    earlier = (capacity - 1) // 16
    lengths, means = torch.empty(2, dtype=torch.int32), torch.empty(2, earlier, 3, 32)
    options: dict[str, Any] = {"chunk_means": means} if selection == "approx" else {}
    options["remote_chunks"] = remote_chunks
    found = counted(
        lambda: top1_chunk_decode(q, k, v, lengths, chunk_size=16, selection=selection, backend="triton", **options)
    )
    scores = earlier * (16 if selection == "exact" else 1)
    assert found == 2 * 3 * 32 * (2 * scores + 4 * (own + 16 * min(earlier, remote_chunks)))


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
    monkeypatch.setattr("seqarch.kernels.top1_chunk_attention", triton)
    lm = SequenceLM(100, 64, 2, {"a": lambda *place: Top1Chunk(*place, n_heads=2, position="none")})
    tokens = torch.zeros(2, 257, dtype=torch.int64)
    total = counted(lambda: lm(tokens[:, :-1], tokens[:, 1:]), backward=True)
    assert total == pytest.approx(2 * 256 * lm.flops_per_token(256, training=True), rel=1e-12)
