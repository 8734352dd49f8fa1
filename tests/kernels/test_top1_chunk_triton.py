"""The Triton kernels of Top-1 chunk attention under Triton's interpreter; `pytest -m gpu` is for the GPU.

The interpreter's bf16 products are wrong, so float32 and float16 stand in.
"""

import functools
import itertools
import os
from typing import Any

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import attention_entropy, select_chunks, top1_chunk_attention
from tests.kernels import naive

pytestmark = pytest.mark.usefixtures("interpreter", "poison")


@pytest.fixture
def kernels(interpreter):
    """The module of the kernels, which is imported with the interpreter on."""
    from seqarch.kernels.top1_chunk import triton

    return triton


CASES = [
    # B, Tq, Tk, H, HK, D, chunk_size
    (1, 1, 1, 2, 1, 16, 16),
    (2, 40, 40, 4, 2, 16, 16),
    (1, 129, 129, 2, 1, 24, 64),
    (1, 20, 150, 2, 2, 16, 16),
    (1, 1, 129, 2, 1, 16, 32),
    (1, 30, 300, 1, 1, 64, 256),
]


@pytest.mark.parametrize(
    ("B", "Tq", "Tk", "H", "HK", "D", "C", "selection"),
    [*((*case, "exact") for case in CASES[1:4]), *((*CASES[case], "approx") for case in (0, 1, 4, 5))],
)
def test_definition(B, Tq, Tk, H, HK, D, C, selection):
    tensors = [t.detach().float().requires_grad_() for t in naive.draw(B, Tq, H, D, Tk=Tk, HK=HK, normalised=True)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    options = {"chunk_size": C, "selection": selection}
    assert torch.equal(
        select_chunks(*tensors[:2], backend="triton", **options), naive.select_chunks(*wide[:2], **options)
    )
    _assert_same(top1_chunk_attention(*tensors, backend="triton", **options), tensors, wide, options, 1e-5)


@pytest.mark.parametrize(
    ("remote_chunks", "B", "Tq", "Tk", "H", "HK", "D", "C", "short", "selection"),
    [
        (2, 2, 50, 50, 2, 1, 16, 16, 0, "exact"),
        (3, 1, 10, 90, 2, 2, 24, 16, 80, "approx"),
        (8, 1, 20, 150, 1, 1, 16, 16, 0, "approx"),
    ],
)
def test_several_remote_chunks(remote_chunks, B, Tq, Tk, H, HK, D, C, short, selection, monkeypatch, kernels):
    monkeypatch.setattr(kernels, "SHORT", short)
    tensors = [t.detach().float().requires_grad_() for t in naive.draw(B, Tq, H, D, Tk=Tk, HK=HK, normalised=True)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    options = {"chunk_size": C, "selection": selection, "remote_chunks": remote_chunks}
    q, k, _ = tensors
    chunks = select_chunks(q, k, backend="triton", **options)
    assert torch.equal(chunks, naive.select_chunks(*wide[:2], **options))
    _assert_same(top1_chunk_attention(*tensors, backend="triton", **options), tensors, wide, options, 1e-5)
    found = attention_entropy(q, k, chunk_size=C, chunks=chunks, backend="triton")
    wanted = naive.entropy(naive.top1_chunk_probabilities(wide[0], wide[1], chunks, chunk_size=C))
    naive.assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_every_way_to_compare_masses_of_several(scale, monkeypatch, kernels):
    monkeypatch.setattr(kernels, "SHORT", 0)
    q, k, _ = (t.detach().float() for t in naive.draw(1, 200, 2, 16, normalised=True))
    options = {"chunk_size": 16, "scale": scale, "remote_chunks": 3}
    wanted = naive.select_chunks(q.double(), k.double(), **options)
    assert torch.equal(select_chunks(q, k, backend="triton", **options), wanted)


def _assert_same(o, tensors, wide, options, ratio):
    expected = naive.top1_chunk_attention(*wide, **options)
    naive.assert_close(o, expected, ratio)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).to(o.dtype)
    got = torch.autograd.grad(o, tensors, do)
    for name, a, b in zip("qkv", got, torch.autograd.grad(expected, wide, do.double()), strict=True):
        naive.assert_close(a, b, ratio, name=f"d{name}")


def test_half_precision():
    tensors = [t.detach().half().requires_grad_() for t in naive.draw(1, 70, 2, 16)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    options = {"chunk_size": 32}
    assert torch.equal(
        select_chunks(*tensors[:2], backend="triton", **options), naive.select_chunks(*wide[:2], **options)
    )
    _assert_same(top1_chunk_attention(*tensors, backend="triton", **options), tensors, wide, options, 5e-3)


@pytest.mark.parametrize("short", [0, 1000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 60.0, 200.0])
def test_every_way_to_compare_masses(scale, short, monkeypatch, kernels):
    """Small scores go through a polynomial, large ones through logarithms, long sequences through a list of candidates;
    all agree with the definition."""
    monkeypatch.setattr(kernels, "SHORT", short)
    q, k, _ = (t.detach().float() for t in naive.draw(1, 100, 2, 16, normalised=True))
    chunks = select_chunks(q, k, chunk_size=16, scale=scale, backend="triton")
    assert torch.equal(chunks, naive.select_chunks(q.double(), k.double(), chunk_size=16, scale=scale))


def test_full_lists_beside_short_ones(monkeypatch, kernels):
    """Queries of small length need few chunks, long ones all. Neighbours of both kinds go through either kernel."""
    monkeypatch.setattr(kernels, "SHORT", 0)
    q, k, _ = (t.detach().float() for t in naive.draw(1, 500, 2, 16, normalised=True))
    q = torch.nn.functional.normalize(q + q[:, :1], dim=-1)
    q *= torch.tensor([0.1, 100.0, 0.1, 0.1, 100.0, 100.0, 100.0, 100.0]).repeat_interleave(64)[:500, None, None]
    cu_seqlens = torch.tensor([0, 1, 250, 250, 420, 500], dtype=torch.int32)
    layout = kernels.chunk_layout(500, 16, cu_seqlens)
    groups = kernels.candidates(q, k, layout, 16, 1.0)[2].view(2, 4, 2).all(2)
    assert groups.any()
    assert not groups.all()
    options = {"chunk_size": 16, "scale": 1.0, "cu_seqlens": cu_seqlens}
    wanted = select_chunks(q.double(), k.double(), backend="reference", **options)
    assert torch.equal(select_chunks(q, k, backend="triton", **options), wanted)


@pytest.mark.parametrize(
    ("scale", "remote_chunks", "borders"),
    [(1.0, 1, None), (1.0, 3, [0, 1, 60, 60, 100]), (200.0, 1, [0, 1, 60, 60, 100]), (200.0, 3, None)],
)
def test_parts_of_chunks(scale, remote_chunks, borders, monkeypatch, kernels):
    launch = kernels._all_launch
    monkeypatch.setattr(kernels, "_all_launch", lambda q, chunk_size: (*launch(q, chunk_size)[:3], 4))
    q, k, _ = (t.detach().float() for t in naive.draw(1, 100, 2, 16, normalised=True))
    cu_seqlens = None if borders is None else torch.tensor(borders, dtype=torch.int32)
    options = {"chunk_size": 16, "scale": scale, "remote_chunks": remote_chunks, "cu_seqlens": cu_seqlens}
    wanted = select_chunks(q.double(), k.double(), backend="reference", **options)
    assert torch.equal(select_chunks(q, k, backend="triton", **options), wanted)


@pytest.mark.parametrize("remote_chunks", [1, 3])
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_equal_masses_go_to_the_first_chunks(selection, remote_chunks):
    q = naive.draw(1, 80, 2)[0].detach().round().float()
    k = naive.draw(1, 16, 2, seed=5)[1].detach().round().float().repeat(1, 5, 1, 1)
    options = {"chunk_size": 16, "selection": selection, "remote_chunks": remote_chunks}
    chunks = select_chunks(q, k, backend="triton", **options).view(1, 80, 2, remote_chunks)
    for own, wanted in enumerate([[-1, -1, -1], [0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 2]]):
        assert (chunks[:, 16 * own : 16 * own + 16] == torch.tensor(wanted[:remote_chunks])).all()


def test_chunk_means_replace_those_of_the_keys():
    q, k, _ = (t.detach().float() for t in naive.draw(Tq=40, Tk=100))
    means = k[:, :96].view(2, 6, 16, 4, 16).mean(2).roll(1, dims=1)
    options = {"chunk_size": 16, "selection": "approx", "chunk_means": means}
    wanted = select_chunks(q, k, backend="reference", **options)
    assert torch.equal(select_chunks(q, k, backend="triton", **options), wanted)


@pytest.mark.parametrize("long", [0, 1000])
def test_chunk_means_in_a_larger_buffer(long, monkeypatch, kernels):
    """Neither the buffer's strides nor what lies after the means of earlier chunks plays a part."""
    monkeypatch.setattr(kernels, "LONG", long)
    q, k, _ = (t.detach().half() for t in naive.draw(Tq=40, Tk=100))
    buffer = torch.full((2, 9, 4, 16), float("nan"), dtype=torch.half)
    buffer[:, :6] = k[:, :96].view(2, 6, 16, 4, 16).float().mean(2).half()
    options = {"chunk_size": 16, "selection": "approx"}
    means = buffer[:, :6].float()
    wanted = select_chunks(q.float(), k.float(), chunk_means=means, backend="reference", **options)
    found = [select_chunks(q, k, chunk_means=each, backend="triton", **options) for each in (buffer, buffer[:, :7])]
    assert [torch.equal(each, wanted) for each in found] == [True, True]


@pytest.mark.parametrize(
    ("selection", "short", "remote_chunks", "Tq"),
    [("exact", 0, 2, 55), pytest.param("exact", 128, 1, 100, marks=pytest.mark.no_cover), ("approx", 128, 3, 55)],
)
def test_packed_documents(selection, short, remote_chunks, Tq, monkeypatch, kernels):
    monkeypatch.setattr(kernels, "SHORT", short)
    borders = torch.tensor([0, 1, 40, 40, 57, 100], dtype=torch.int32)
    tensors = [t.detach().float().requires_grad_() for t in naive.draw(1, Tq, 2, 16, Tk=100, HK=1)]
    options = {"chunk_size": 16, "selection": selection, "cu_seqlens": borders, "remote_chunks": remote_chunks}
    packed = top1_chunk_attention(*tensors, backend="triton", **options)
    expected = top1_chunk_attention(*tensors, backend="reference", **options)
    naive.assert_same_gradients(packed, expected, tensors, 1e-5)


@pytest.mark.parametrize(
    ("takes", "unit"), [("one", 32), ("twice", 30), pytest.param("reversed", 32, marks=pytest.mark.no_cover)]
)
def test_any_selection(takes, unit, monkeypatch, kernels):
    """A chunk that takes all queries is split into units, whose sums are added up. A chunk named twice counts once."""
    monkeypatch.setattr(kernels, "UNIT", unit)
    tensors = [t.detach().float().requires_grad_() for t in naive.draw(1, 60, 4, 16, HK=2)]
    own = torch.arange(60).view(1, 60, 1).expand(1, 60, 4) // 16
    one = own.clamp_max(1) - 1
    twice = torch.stack([one, own - 1, one, torch.full_like(one, 60)], dim=-1)
    chunks = {"one": one, "twice": twice, "reversed": (3 - own).clamp_max(own - 1)}[takes]
    options = {"chunk_size": 16, "chunks": chunks.to(torch.int32)}
    actual = top1_chunk_attention(*tensors, backend="triton", **options)
    expected = top1_chunk_attention(*tensors, backend="reference", **options)
    naive.assert_same_gradients(actual, expected, tensors, 1e-5)


def test_groups_of_heads_change_no_bit(monkeypatch, kernels):
    monkeypatch.setattr(kernels, "UNIT", 20)
    cu_seqlens = torch.tensor([0, 1, 70], dtype=torch.int32)
    tensors = [t.detach().float().requires_grad_() for t in naive.draw(1, 70, 4, 24, HK=2)]
    options = {"chunk_size": 16, "remote_chunks": 3, "cu_seqlens": cu_seqlens, "selection": "approx"}
    do = torch.randn_like(tensors[0])
    found, calls = [], []
    attend, differentiate = kernels._attend, kernels._differentiate
    monkeypatch.setattr(kernels, "_attend", lambda *args: (calls.append(args[0].shape[2]), attend(*args))[1])
    monkeypatch.setattr(
        kernels, "_differentiate", lambda *args: (calls.append(args[0].shape[2]), differentiate(*args))[1]
    )
    for most in (0, 2**26):
        monkeypatch.setattr(kernels, "GROUP_BYTES", most)
        o = top1_chunk_attention(*tensors, backend="triton", **options)
        found.append([o, *torch.autograd.grad(o, tensors, do)])
        chunks = select_chunks(*tensors[:2], **options)
        inputs: Any = [*(t.detach() for t in tensors), chunks, 16, 0.2, cu_seqlens]
        wanted = [(t.shape, t.dtype) for t in kernels._empty(*inputs)]
        assert [(t.shape, t.dtype) for t in kernels.forward(*inputs)] == wanted
    assert calls == [2] * 6 + [4] * 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = top1_chunk_attention(*wide, backend="reference", **options)
    naive.assert_close(found[0][0], expected, 1e-5)
    for got, each in zip(found[0][1:], torch.autograd.grad(expected, wide, do.double()), strict=True):
        naive.assert_close(got, each, 1e-5)


@pytest.mark.parametrize("K", range(2, 9))
@pytest.mark.parametrize(("HK", "D"), [(12, 64), (16, 128), (1, 64), (7, 64)])
def test_size_of_a_group(HK, D, K, kernels):
    """Its buffers are at most 4/3 of q, if there are enough key heads."""
    q, k = (torch.empty(1, 102400, heads, D, dtype=torch.bfloat16, device="meta") for heads in (2 * HK, HK))
    groups = kernels._groups(q, k, torch.empty(1, 102400, 2 * HK, K, device="meta"))
    assert HK % groups == 0
    assert groups == HK or 4 * groups >= 3 * (K - 1)
    assert kernels._groups(q[:, :200], k[:, :200], torch.empty(1, 200, 2 * HK, K, device="meta")) == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_breaks_for_any_length(monkeypatch, kernels):
    """With several groups of heads; `test_ops.py` compiles one group, one remote chunk and a fixed length."""
    monkeypatch.setattr(kernels, "GROUP_BYTES", 0)
    tensors = [t.detach().float().requires_grad_() for t in naive.draw(1, 70, 2, 16)]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    options = {"chunk_size": 16, "remote_chunks": 3}
    ours = functools.partial(top1_chunk_attention, backend="triton", **options)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    _assert_same(compiled(*tensors), tensors, wide, options, 1e-5)


def _near_ties(T):
    """q and k in half precision whose sums are exact: mean keys share few high parts, and low parts often decide."""
    generator = torch.Generator().manual_seed(0)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    q = draw(-3, 4, 1, T, 2, 16)
    signs = (2 * draw(0, 2, 4, 16) - 1)[draw(0, 4, -(-T // 16))].repeat_interleave(16, 0)[:T]
    k = signs.view(1, T, 1, 16) * (1 + 2.0**-10 * (draw(0, 8, 1, T, 1, 16) == 0))
    return q.half(), k.half()


@pytest.mark.parametrize(("tied", "borders"), [(True, [0, 1, 1300, 1300, 1317, 1400]), (False, None)])
def test_high_parts_of_mean_keys_first(tied, borders, monkeypatch, kernels):
    """Long sequences compare high parts first, and both parts only for the queries for which they may change that."""
    found = []
    undecided = kernels.undecided
    monkeypatch.setattr(kernels, "LONG", 0)
    monkeypatch.setattr(kernels, "undecided", lambda *args: found.append(undecided(*args)) or found[-1])
    q, k = _near_ties(1400) if tied else (t.detach().half() for t in naive.draw(1, 1400, 2, 16, HK=1)[:2])
    options = {"chunk_size": 16, "selection": "approx"}
    if borders:
        options["cu_seqlens"] = torch.tensor(borders, dtype=torch.int32)
    chunks = select_chunks(q, k, backend="triton", **options)
    wanted = select_chunks(q, k, backend="reference", **options)
    assert torch.equal(chunks, wanted)
    ((lists, counts),) = found
    share = counts.sum() / chunks.numel()
    assert share > 0.2 if tied else share < 0.05
    for listed, count in zip(lists, counts, strict=True):
        assert listed[:count].unique().numel() == count
    monkeypatch.setattr(kernels, "LONG", 1000)
    assert torch.equal(select_chunks(q, k, backend="triton", **options), wanted)
    assert len(found) == 1


@pytest.mark.parametrize(("first", "second"), [(3, 5), (3, 67), (5, 67), (67, 129)])
def test_low_parts_decide_wherever_the_two_best_chunks_lie(first, second, monkeypatch, kernels):
    """In one step of 64 mean keys, in the same place of two steps, or neither."""
    monkeypatch.setattr(kernels, "LONG", 0)
    q = torch.ones(1, 3, 1, 16, dtype=torch.half)
    k = torch.zeros(1, 130, 16, 1, 16, dtype=torch.half)
    k[:, [first, second]] = 1.5
    k[:, first, :, :, :5] += 2.0**-10  # the high parts prefer the first by 5 * 2^-10, the low parts the second by 8
    k[:, first, 0] -= 2.0**-8
    k[:, second, 0] += 2.0**-8
    k = torch.cat([k.flatten(1, 2), q], 1)
    assert (select_chunks(q, k, chunk_size=16, selection="approx", backend="triton") == second).all()


@pytest.mark.parametrize(("scale", "some"), [(0.05, True), (50.0, False)])
def test_bounds_rule_chunks_out(scale, some, kernels):
    """With small scores most chunks need no product; with large ones the bounds tell nothing, and every chunk stays."""
    q, k, _ = (t.detach().float() for t in naive.draw(1, 320, 1, 16, normalised=True))
    q = torch.nn.functional.normalize(q + q[:, :1], dim=-1)
    layout = kernels.chunk_layout(320, 16, None)
    lists, counts, full, longest = kernels.candidates(q, k, layout, 16, scale)
    assert longest.item() == pytest.approx(k.norm(dim=-1).max().item(), rel=1e-5)
    everything = [min(own, 19) for own in (3, 7, 11, 15, 19)]
    assert (counts[0].tolist() != everything) == some
    assert full[0].tolist() == [count >= 0.6 * most for count, most in zip(counts[0].tolist(), everything, strict=True)]
    wanted = naive.select_chunks(q.double(), k.double(), chunk_size=16, scale=scale)
    for block, count in enumerate(counts[0].tolist()):
        listed = lists[0, block, :count].tolist()
        assert listed == sorted(set(listed))
        assert set(wanted[0, block * 64 : (block + 1) * 64, 0].tolist()) - {-1} <= set(listed)


@pytest.mark.parametrize(("C", "D"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("scale", [0.05, 3.0, 50.0])
def test_covariances_are_bounded_where_they_may_rule_a_chunk_out(scale, C, D, kernels):
    """The bound lies between the largest eigenvalue and the trace, and is the trace where the mean eigenvalue is
    enough to keep a chunk for the shortest query."""
    q, k, _ = (t.detach().float() for t in naive.draw(1, 6 * C, 1, D, normalised=True))
    q = 2 * q
    k[:, : 3 * C] = torch.nn.functional.normalize(k[:, :1] + 0.1 * k[:, : 3 * C], dim=-1)  # three narrow chunks
    chunks = k.view(6, C, D).double()
    centred = chunks - chunks.mean(1, keepdim=True)
    eigenvalues = torch.linalg.eigvalsh(centred.mT @ centred / C)
    trace, largest = eigenvalues.sum(1), eigenvalues[:, -1]
    R = 2 * scale * centred.norm(dim=-1).amax(1)
    kept = 2 * scale * (R.exp() - 1 - R) / R**2 * trace / min(C, D) > 2 * chunks.norm(dim=-1).amax(1)
    bound = kernels._chunk_stats(k, kernels.chunk_layout(6 * C, C, None), C, q, scale)[2][2, 0].double()
    wanted = torch.where(kept, trace, eigenvalues.pow(8).sum(1) ** (1 / 8))
    torch.testing.assert_close(bound, 1.01 * wanted, rtol=1e-3, atol=0)
    assert (bound > largest).all()
    assert kept.tolist() == {0.05: [False] * 6, 3.0: [False] * 3 + [True] * 3, 50.0: [True] * 6}[scale]


def test_room_for_partial_sums(kernels):
    """It is at most 8 bytes per query, head and selected chunk."""
    sizes = itertools.product((24, 64, 100, 128, 256), (16, 64, 128, 256), (torch.float32, torch.bfloat16))
    for D, chunk_size, dtype in sizes:
        keys, unit = kernels._unit(torch.empty(1, 1, 1, D, dtype=dtype), chunk_size)
        assert chunk_size % keys == 0, (D, chunk_size, dtype)
        assert 2 * 4 * keys * max(16, 1 << (D - 1).bit_length()) <= 8 * unit, (D, chunk_size, dtype)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"chunk_size": 48}, "chunk_size 48 is not among"), ({"chunk_size": 256}, "is more than it holds")],
)
def test_what_the_kernels_cannot_do(options, message):
    tensors = [t.detach().float() for t in naive.draw(1, 100, 1, 256)]
    with pytest.raises(UserError, match=message):
        top1_chunk_attention(*tensors, backend="triton", **options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter was asked for")
def test_no_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="not on a CUDA device"):
        select_chunks(*naive.draw(1, 10, 1, 16, dtype=torch.float32)[:2], backend="triton")
