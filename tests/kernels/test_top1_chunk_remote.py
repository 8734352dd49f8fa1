"""Top-1 chunk attention to several remote chunks: selection, attention and entropy, and FlexAttention on the CPU."""

import dataclasses
import importlib
import itertools

import pytest
import torch
from torch.nn.attention import flex_attention

from seqarch.errors import UserError
from seqarch.kernels import attention_entropy, blocks, select_chunks, softmax_attention, top1_chunk_attention
from seqarch.kernels.top1_chunk import op
from seqarch.kernels.top1_chunk.flex import flex_top1_chunk_attention
from seqarch.kernels.top1_chunk.op import top1_chunk_attention_reference
from tests.kernels import naive

softmax_flex = importlib.import_module("seqarch.kernels.softmax_attention")  # a function has its name


def brute_force(q, k, v, *, chunk_size, remote_chunks, selection="exact", scale=None):
    """One query and head at a time, the selected chunks by sorting their masses."""
    B, Tq, H, D = q.shape
    Tk, HK = k.shape[1], k.shape[2]
    outputs = []
    for b, i, h in itertools.product(range(B), range(Tq), range(H)):
        position, head = Tk - Tq + i, h * HK // H
        s = (D**-0.5 if scale is None else scale) * k[b, :, head] @ q[b, i, h]
        own = position // chunk_size
        chunks = [list(range(c * chunk_size, (c + 1) * chunk_size)) for c in range(own)]
        masses = [(s[c].exp().sum() if selection == "exact" else s[c].mean()).item() for c in chunks]
        best = sorted(range(own), key=lambda c: -masses[c])[:remote_chunks]
        seen = list(range(own * chunk_size, position + 1))
        for c in best:
            seen += chunks[c]
        outputs.append(s[seen].softmax(0) @ v[b, seen, head])
    return torch.stack(outputs).view(B, Tq, H, D)


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention without compilation, which evaluates the mask densely, and has gradients if they are not refused.

    FlexAttention refuses gradients on a CPU because its compiled form has none there.
    """
    monkeypatch.setattr(softmax_flex, "_compiled_flex_attention", lambda: flex_attention.flex_attention)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize(
    ("remote_chunks", "Tq", "Tk", "H", "HK", "chunk_size"),
    [(2, 53, 53, 2, 2, 8), (3, 45, 45, 4, 2, 7), (2, 9, 50, 2, 1, 8), (3, 1, 31, 2, 2, 5), (3, 6, 6, 2, 2, 8)],
)
def test_definition(selection, remote_chunks, Tq, Tk, H, HK, chunk_size):
    q, k, v = draw = naive.draw(B=1, Tq=Tq, Tk=Tk, H=H, HK=HK, D=8)
    options = {"chunk_size": chunk_size, "remote_chunks": remote_chunks, "selection": selection, "scale": 0.7}
    naive.assert_same_gradients(top1_chunk_attention(q, k, v, **options), brute_force(q, k, v, **options), draw)


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_packed_documents(selection):
    borders = [0, 1, 20, 20, 61]
    q, k, v = draw = naive.draw(B=1, Tq=61, H=2, D=8)
    options = {"chunk_size": 6, "remote_chunks": 2, "selection": selection}
    pairs = [(a, b) for a, b in itertools.pairwise(borders) if a < b]
    separate = torch.cat([brute_force(*(t[:, a:b] for t in draw), **options) for a, b in pairs], dim=1)
    packed = top1_chunk_attention(q, k, v, cu_seqlens=torch.tensor(borders, dtype=torch.int32), **options)
    naive.assert_same_gradients(packed, separate, draw)


@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize("remote_chunks", [7, 50])
def test_all_chunks_are_causal_attention(selection, remote_chunks):
    q, k, v = draw = naive.draw(Tq=120, HK=2)
    actual = top1_chunk_attention(q, k, v, chunk_size=16, remote_chunks=remote_chunks, selection=selection)
    naive.assert_same_gradients(actual, softmax_attention(q, k, v), draw)


@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize("T", [1, 63, 130])
def test_selection_in_blocks_and_of_the_last_queries(selection, T, monkeypatch):
    monkeypatch.setattr(blocks, "SCORE_BYTES", 1)
    q, k, _ = naive.draw(Tq=T, HK=2)
    options = {"chunk_size": 16, "selection": selection, "remote_chunks": 3}
    chunks = select_chunks(q, k, **options)
    assert chunks.shape == (2, T, 4, 3)
    assert chunks.dtype == torch.int32
    assert torch.equal(chunks, naive.select_chunks(q, k, **options))
    assert torch.equal(select_chunks(q[:, -20:], k, **options), chunks[:, -20:])


def test_queries_with_fewer_earlier_chunks_select_those():
    q, k, _ = naive.draw(Tq=40)
    chunks = select_chunks(q, k, chunk_size=8, remote_chunks=3)
    own = torch.arange(40).view(1, 40, 1) // 8
    assert torch.equal((chunks >= 0).sum(-1), own.clamp_max(3).expand(2, 40, 4))
    assert (chunks < own.unsqueeze(-1)).all()
    assert (chunks[:, :24].sort(-1, descending=True).values[:, 8:16] == torch.tensor([0, -1, -1])).all()


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_the_first_is_that_of_one_remote_chunk(selection):
    q, k, _ = naive.draw(Tq=100)
    options = {"chunk_size": 16, "selection": selection}
    assert torch.equal(select_chunks(q, k, remote_chunks=2, **options)[..., 0], select_chunks(q, k, **options))


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_equal_masses_go_to_the_first_chunks(selection):
    q = naive.draw(Tq=80)[0].detach().round()
    k = naive.draw(Tq=16, seed=5)[1].detach().round().repeat(1, 5, 1, 1)
    chunks = select_chunks(q, k, chunk_size=16, selection=selection, remote_chunks=3)
    for own, wanted in enumerate([[-1, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 2]]):
        assert (chunks[:, 16 * own : 16 * own + 16] == torch.tensor(wanted)).all()


def test_chunk_means_replace_those_of_the_keys():
    q, k, v = naive.draw(Tq=100)
    means = k[:, :96].view(2, 6, 16, 4, 16).mean(2)
    options = {"chunk_size": 16, "selection": "approx", "remote_chunks": 2}
    actual = top1_chunk_attention(q[:, -3:], k, v, chunk_means=means, **options)
    naive.assert_close(actual, naive.top1_chunk_attention(q, k, v, **options)[:, -3:])


def test_one_of_several_is_one():
    q, k, v = draw = naive.draw(Tq=70)
    chunks = select_chunks(q, k, chunk_size=16)
    wanted = top1_chunk_attention(q, k, v, chunk_size=16)
    naive.assert_close(top1_chunk_attention(q, k, v, chunk_size=16, chunks=chunks.unsqueeze(-1)), wanted)
    actual = top1_chunk_attention_reference(q, k, v, chunks.unsqueeze(-1), 16, 0.25)
    naive.assert_same_gradients(actual, wanted, draw)


@pytest.mark.usefixtures("uncompiled")
def test_no_selection_shows_a_query_its_future():
    q, k, v = naive.draw(Tq=40)
    hidden = torch.tensor([2, -1, 7], dtype=torch.int32).expand(2, 40, 4, 3)
    nothing = torch.full((2, 40, 4), -1, dtype=torch.int32)
    wanted = top1_chunk_attention(q, k, v, chunk_size=16, chunks=nothing)
    naive.assert_close(top1_chunk_attention(q, k, v, chunk_size=16, chunks=hidden), wanted)
    naive.assert_close(flex_top1_chunk_attention(q, k, v, hidden, 16, 0.25), wanted, 1e-6)


def test_entropy():
    q, k, _ = naive.draw(Tq=100, HK=2)
    chunks = select_chunks(q, k, chunk_size=16, remote_chunks=2)
    wanted = naive.entropy(naive.top1_chunk_probabilities(q, k, chunks, chunk_size=16))
    naive.assert_close(attention_entropy(q, k, chunk_size=16, chunks=chunks), wanted)


def test_entropy_of_packed_documents():
    q, k, _ = naive.draw(B=1, Tq=100)
    borders = [0, 10, 50, 100]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    chunks = select_chunks(q, k, chunk_size=8, remote_chunks=2, cu_seqlens=cu_seqlens)
    pieces = [(q[:, a:b], k[:, a:b], chunks[:, a:b]) for a, b in itertools.pairwise(borders)]
    wanted = [naive.entropy(naive.top1_chunk_probabilities(*piece, chunk_size=8)) for piece in pieces]
    actual = attention_entropy(q, k, chunk_size=8, chunks=chunks, cu_seqlens=cu_seqlens)
    naive.assert_close(actual, torch.cat(wanted, dim=1))


@pytest.mark.parametrize(
    ("remote_chunks", "B", "Tq", "Tk", "HK", "chunk_size"),
    [
        (1, 2, 63, 63, 2, 24),
        (2, 2, 63, 63, 4, 8),
        (3, 1, 150, 150, 2, 20),
        (4, 2, 20, 140, 1, 16),
        (2, 1, 300, 300, 4, 130),
    ],
)
@pytest.mark.usefixtures("uncompiled")
def test_flex_is_the_reference(remote_chunks, B, Tq, Tk, HK, chunk_size):
    q, k, v = draw = naive.draw(B, Tq, Tk=Tk, HK=HK)
    chunks = select_chunks(q, k, chunk_size=chunk_size, remote_chunks=remote_chunks)
    actual = flex_top1_chunk_attention(q, k, v, chunks, chunk_size, 0.5)
    wanted = top1_chunk_attention_reference(q, k, v, chunks, chunk_size, 0.5)
    naive.assert_same_gradients(actual, wanted, draw, 1e-6)


@pytest.mark.usefixtures("uncompiled")
def test_flex_on_packed_documents():
    q, k, v = draw = naive.draw(B=1, Tq=100, Tk=150, HK=2)
    cu_seqlens = torch.tensor([0, 1, 40, 40, 57, 150], dtype=torch.int32)
    chunks = select_chunks(q, k, chunk_size=8, remote_chunks=2, cu_seqlens=cu_seqlens)
    actual = flex_top1_chunk_attention(q, k, v, chunks, 8, 0.5, cu_seqlens)
    wanted = top1_chunk_attention_reference(q, k, v, chunks, 8, 0.5, cu_seqlens)
    naive.assert_same_gradients(actual, wanted, draw, 1e-6)


@pytest.mark.usefixtures("uncompiled", "fresh_compiler")
def test_flex_is_a_part_of_a_compiled_graph(monkeypatch):
    """Selection and attention compile to one graph, forward and backward, with "auto" on a GPU."""
    calls = []

    def attend(*args):
        calls.append(args)
        return flex_top1_chunk_attention(*args)

    monkeypatch.setattr(op, "TOP1_CHUNK_ATTENTION", dataclasses.replace(op.TOP1_CHUNK_ATTENTION, reference=attend))
    q, k, v = draw = naive.draw(1, 140, HK=2)
    compiled = torch.compile(op.top1_chunk_attention, fullgraph=True, backend="aot_eager")
    actual = compiled(q, k, v, chunk_size=16, remote_chunks=2)
    assert calls
    naive.assert_same_gradients(actual, naive.top1_chunk_attention(q, k, v, chunk_size=16, remote_chunks=2), draw, 1e-6)


@pytest.mark.parametrize(("Tq", "Tk"), [(1, 1), (129, 129), (300, 700)])
@pytest.mark.parametrize("borders", [None, [0, 1, 128, 300, 700]])
def test_flex_visits_the_blocks_with_visible_keys_once(Tq, Tk, borders):
    size = softmax_flex.MASK_BLOCK
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    first = softmax_flex.first_visible(Tk, Tk, None, cu_seqlens, torch.device("cpu"))[Tk - Tq :]
    mask = softmax_flex.partial_block_mask(first, Tk, lambda b, h, i, j: j <= i)
    assert mask.full_kv_indices is None
    for row in range(-(-Tq // size)):
        queries = range(row * size, min(Tq, (row + 1) * size))
        wanted = range(int(first[queries[0]]) // size, (queries[-1] + Tk - Tq) // size + 1)
        assert mask.kv_indices[0, 0, row, : mask.kv_num_blocks[0, 0, row]].tolist() == list(wanted)


def test_triton_takes_up_to_eight_remote_chunks():
    q, k, v = (t.detach().float() for t in naive.draw(Tq=200))
    chunks = select_chunks(q, k, chunk_size=16, remote_chunks=9)
    for run in (
        lambda: select_chunks(q, k, chunk_size=16, remote_chunks=9, backend="triton"),
        lambda: top1_chunk_attention(q, k, v, chunk_size=16, remote_chunks=9, backend="triton"),
        lambda: top1_chunk_attention(q, k, v, chunk_size=16, chunks=chunks, backend="triton"),
        lambda: attention_entropy(q, k, chunk_size=16, chunks=chunks, backend="triton"),
    ):
        with pytest.raises(UserError, match="at most 8 remote chunks per query, not 9"):
            run()


@pytest.mark.parametrize("remote_chunks", [0, -1, True, 2.0, "2", None])
def test_wrong_numbers_of_chunks(remote_chunks):
    q, k, v = naive.draw(Tq=40)
    with pytest.raises(UserError, match="remote_chunks must be a whole number of at least 1"):
        select_chunks(q, k, remote_chunks=remote_chunks)
    with pytest.raises(UserError, match="remote_chunks must be a whole number of at least 1"):
        top1_chunk_attention(q, k, v, remote_chunks=remote_chunks)


@pytest.mark.parametrize("shape", [(2, 40, 4, 0), (2, 39, 4, 2), (2, 40, 4, 2, 1), (2, 40)])
def test_wrong_selections(shape):
    q, k, v = naive.draw(Tq=40)
    chunks = torch.zeros(shape, dtype=torch.int32)
    with pytest.raises(UserError, match=r"K .*in chunks|chunks must have shape"):
        top1_chunk_attention(q, k, v, chunks=chunks)
    with pytest.raises(UserError, match=r"K .*in chunks|chunks must have shape"):
        attention_entropy(q, k, chunk_size=16, chunks=chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize(("B", "T", "HK"), [(4, 1024, 8), (2, 1000, 2)])
@pytest.mark.usefixtures("fresh_compiler")
def test_on_cuda(compiled, selection, B, T, HK):
    """Under autocast to bf16, with values that bf16 holds, against the reference in float64."""
    drawn = [t.detach().bfloat16().cuda() for t in naive.draw(B, T, 8, 64, HK=HK, normalised=True)]
    inputs = [t.float().requires_grad_() for t in drawn]
    wide = [t.double().requires_grad_() for t in drawn]
    options = {"chunk_size": 64, "selection": selection, "remote_chunks": 2, "scale": 8.0}
    attend = torch.compile(top1_chunk_attention, fullgraph=True) if compiled else top1_chunk_attention
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = attend(*inputs, **options)
    wanted = top1_chunk_attention(*wide, backend="reference", **options)
    assert actual.dtype == torch.bfloat16
    naive.assert_close(actual, wanted, 1e-2)
    do = torch.randn_like(wanted)
    gradients = zip(
        torch.autograd.grad(actual, inputs, do.to(actual.dtype)), torch.autograd.grad(wanted, wide, do), strict=True
    )
    for index, (got, expected) in enumerate(gradients):
        naive.assert_close(got, expected, 2e-2, name=f"gradient {index}")


@pytest.mark.gpu
@pytest.mark.usefixtures("most_gpu_memory")
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_heads_more_than_two_billion_elements_apart_on_cuda(selection, K):
    """A head's offset is no 32-bit number, though its stride is one."""
    T, H, D, stride = 300, 3, 64, 2**30
    far = [torch.zeros(2 * stride + T * D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    q, k = (t.as_strided((1, T, H, D), (T * D, D, stride, 1)) for t in far)
    drawn = [t.detach().bfloat16().cuda() for t in naive.draw(1, T, H, D, normalised=True)]
    q.copy_(drawn[0])
    k.copy_(drawn[1])
    options = {"chunk_size": 32, "selection": selection, "remote_chunks": K, "scale": 8.0}
    near, strided = ([t.requires_grad_() for t in tensors] for tensors in (drawn, (q, k, drawn[2].clone())))
    found, wanted = (top1_chunk_attention(*tensors, **options) for tensors in (strided, near))
    assert torch.equal(found, wanted)
    do = torch.randn_like(wanted)
    for got, expected in zip(
        torch.autograd.grad(found, strided, do), torch.autograd.grad(wanted, near, do), strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.gpu
def test_packed_documents_on_cuda():
    drawn = [t.detach().bfloat16().cuda() for t in naive.draw(1, 700, 4, 64)]
    cu_seqlens = torch.tensor([0, 5, 300, 300, 700], dtype=torch.int32, device="cuda")
    options = {"chunk_size": 32, "remote_chunks": 3, "cu_seqlens": cu_seqlens}
    wanted = top1_chunk_attention(*(t.double() for t in drawn), backend="reference", **options)
    naive.assert_close(top1_chunk_attention(*drawn, **options), wanted, 1e-2)


@pytest.mark.gpu
def test_a_chunk_size_without_kernels_takes_flex_on_cuda():
    """`auto` warns that it is slower, and gives the reference's result."""
    q, k, v = (t.detach().bfloat16().cuda() for t in naive.draw(1, 500, 4, 64, normalised=True))
    options = {"chunk_size": 24, "scale": 8.0}
    chunks = select_chunks(q.double(), k.double(), backend="reference", **options)
    wanted = top1_chunk_attention(*(t.double() for t in (q, k, v)), chunks=chunks, backend="reference", **options)
    found = top1_chunk_attention(q, k, v, chunks=chunks, **options)
    naive.assert_close(found, wanted, 1e-2)
    assert torch.equal(found, top1_chunk_attention(q, k, v, chunks=chunks, backend="flex", **options))
