"""Decoding with Top-1 chunk attention, against the dense definition in float64, one sequence at a time.

The kernels run under Triton's interpreter, whose bf16 products are wrong, so float32 and float16 stand in.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from seqarch.errors import UserError
from seqarch.kernels import top1_chunk_decode
from tests.kernels import naive


def draw(lengths, capacity, H=2, HK=None, D=16, C=16, *, dtype=torch.float32, selection="exact", seed=0):
    """Caches, NaN beyond the lengths, and mean keys, NaN beyond the complete chunks."""
    q, k, v = naive.draw(len(lengths), 1, H, D, Tk=capacity, HK=HK, seed=seed, normalised=True)
    q, k, v = (t.detach().to(dtype) for t in (q, k, v))
    for b, length in enumerate(lengths):
        k[b, length:] = v[b, length:] = float("nan")
    n = capacity // C
    means = k[:, : n * C].double().unflatten(1, (n, C)).mean(2)
    options = {"chunk_means": means.to(torch.promote_types(dtype, torch.float32))} if selection == "approx" else {}
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return (q, k, v, lengths), {"chunk_size": C, "selection": selection, **options}


def expected(q, k, v, lengths, *, chunk_size, selection, chunk_means=None, scale=None, remote_chunks=1):
    options = {"chunk_size": chunk_size, "selection": selection, "scale": scale, "remote_chunks": remote_chunks}
    rows = []
    for b, length in enumerate(lengths.tolist()):
        seen = (t[b : b + 1, :length].double() for t in (k, v))
        rows.append(naive.top1_chunk_attention(q[b : b + 1].double(), *seen, **options))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("lengths", "capacity", "H", "HK", "D", "C", "selection"),
    [
        ([1, 16, 17, 100, 33, 32], 100, 2, 2, 16, 16, "exact"),
        ([1, 16, 17, 100, 33, 32], 100, 2, 2, 16, 16, "approx"),
        ([70, 300], 321, 4, 2, 32, 32, "approx"),
        ([200], 200, 6, 2, 64, 64, "exact"),
        ([129, 500], 512, 1, 1, 96, 128, "approx"),
        ([300, 128], 300, 2, 1, 128, 128, "exact"),
        ([15], 15, 1, 1, 24, 16, "exact"),
        ([1], 1, 1, 1, 16, 16, "approx"),
    ],
)
def test_definition(lengths, capacity, H, HK, D, C, selection, backend):
    tensors, options = draw(lengths, capacity, H, HK, D, C, selection=selection)
    o = top1_chunk_decode(*tensors, backend=backend, **options)
    naive.assert_close(o, expected(*tensors, **options), 1e-5)


@pytest.mark.parametrize(
    ("remote_chunks", "H", "HK", "selection"), [(2, 2, 2, "exact"), (3, 4, 2, "approx"), (8, 2, 1, "exact")]
)
def test_several_remote_chunks(selection, remote_chunks, H, HK, backend):
    tensors, options = draw([1, 17, 40, 160, 144], 160, H, HK, selection=selection)
    options["remote_chunks"] = remote_chunks
    o = top1_chunk_decode(*tensors, backend=backend, **options)
    naive.assert_close(o, expected(*tensors, **options), 1e-5)
    short, options = draw([1, 7], 9, selection=selection)
    o = top1_chunk_decode(*short, remote_chunks=2, backend=backend, **options)
    naive.assert_close(o, expected(*short, **options), 1e-5)


def test_more_remote_chunks_than_the_kernels_take():
    tensors, options = draw([16, 300], 300)
    o = top1_chunk_decode(*tensors, remote_chunks=9, **options)
    naive.assert_close(o, expected(*tensors, remote_chunks=9, **options), 1e-5)
    with pytest.raises(UserError, match="at most 8 remote chunks per query, not 9"):
        top1_chunk_decode(*tensors, remote_chunks=9, backend="triton", **options)


def test_several_remote_chunks_ask_the_host_nothing():
    """Fake tensors have no numbers that the host could read."""
    tensors, options = draw([16, 100], 100)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(each) for each in tensors]
        assert top1_chunk_decode(*fake, remote_chunks=2, **options).shape == tensors[0].shape
        with pytest.raises(DataDependentOutputException):
            fake[3].tolist()


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_half_precision(selection, backend):
    tensors, options = draw([100, 45], 100, 4, 2, dtype=torch.float16, selection=selection)
    o = top1_chunk_decode(*tensors, backend=backend, **options)
    assert o.dtype == torch.float16
    naive.assert_close(o, expected(*tensors, **options), 2e-3)


@pytest.mark.parametrize("scale", [0.1, 60.0, 3000.0])
def test_scores_far_apart(scale, backend):
    """The heaviest chunk wins at scores whose exponentials are no float32."""
    tensors, options = draw([150, 90], 160)
    o = top1_chunk_decode(*tensors, scale=scale, backend=backend, **options)
    wanted = expected(*tensors, scale=scale, **options)
    if scale > 100:
        q, k, _, lengths = tensors
        chunks = [_chunk_of_largest_score(q[b], k[b], length) for b, length in enumerate(lengths.tolist())]
        wanted = torch.cat([_attend(*tensors, b, chunk, scale) for b, chunk in enumerate(chunks)])
    naive.assert_close(o, wanted, 1e-6 * max(scale, 10))


def _chunk_of_largest_score(q, k, length):
    candidates = (length - 1) // 16 * 16
    return torch.einsum("qhd,khd->qhk", q, k[:candidates]).argmax(-1).unsqueeze(0).int() // 16


def _attend(q, k, v, lengths, b, chunks, scale):
    q, k, v = q[b : b + 1].double(), k[b : b + 1, : lengths[b]].double(), v[b : b + 1, : lengths[b]].double()
    return naive.weighted(naive.top1_chunk_probabilities(q, k, chunks, chunk_size=16, scale=scale), v)


@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize("HK", [1, 2])
def test_equal_chunks_go_to_the_first(selection, HK, backend, monkeypatch):
    """Chunks 1 and later hold the same keys, which weigh more than chunk 0: only the values tell which one is read.

    Equals lie in one split and in others.
    """
    if backend == "triton":
        from seqarch.kernels.top1_chunk import triton_decode

        monkeypatch.setattr(triton_decode, "exact_splits", lambda pairs, chunks: 3)
    (q, k, v, lengths), options = draw([1300], 1300, 2, HK, selection=selection)
    q = (4 * q).round()
    heavy = q.unflatten(2, (HK, 2 // HK)).sum(3).expand(1, 16, HK, 16) + (4 * k[:, :16]).round()
    k[:, :1296] = torch.cat([-heavy, heavy.repeat(1, 80, 1, 1)], dim=1)
    if selection == "approx":
        options["chunk_means"] = k[:, :1296].unflatten(1, (81, 16)).mean(2)
    o = top1_chunk_decode(q, k, v, lengths, backend=backend, **options)
    chunks = torch.ones(1, 1, 2, dtype=torch.int32)
    naive.assert_close(o, _attend(q, k, v, lengths, 0, chunks, 0.25), 1e-5)


@pytest.mark.usefixtures("interpreter", "poison")
@pytest.mark.parametrize("splits", [1, 3, 20])
def test_any_number_of_splits(splits, monkeypatch):
    from seqarch.kernels.top1_chunk import triton_decode

    monkeypatch.setattr(triton_decode, "exact_splits", lambda pairs, chunks: splits)
    tensors, options = draw([1, 17, 150, 131], 150)
    naive.assert_close(top1_chunk_decode(*tensors, backend="triton", **options), expected(*tensors, **options), 1e-5)


def test_splits_fill_the_gpu_and_hold_chunks():
    pytest.importorskip("triton")
    from seqarch.kernels.top1_chunk.triton_decode import exact_splits

    assert exact_splits(64 * 12, 390) * 64 * 12 >= 2048
    assert 12 * exact_splits(12, 800) >= 528
    assert 800 // exact_splits(12, 800) >= 8
    assert exact_splits(12, 3) == 3
    assert exact_splits(12, 0) == exact_splits(10**6, 100) == 1


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_caches_need_not_be_contiguous(selection, backend):
    """Heads before positions, as other caches have them; columns apart; queries cut from a longer row."""
    (q, k, v, lengths), options = draw([50, 100], 100, selection=selection)
    wanted = expected(q, k, v, lengths, **options)
    q = q.repeat(1, 3, 1, 2)[:, 1:2, :, :16]
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    v = v.repeat_interleave(2, dim=-1)[..., ::2]
    if selection == "approx":
        options["chunk_means"] = options["chunk_means"].transpose(1, 3).contiguous().transpose(1, 3)
    o = top1_chunk_decode(q, k, v, lengths.repeat_interleave(2)[::2], backend=backend, **options)
    naive.assert_close(o, wanted, 1e-5)


def test_given_means_decide(backend):
    tensors, options = draw([100], 100, 1, selection="approx")
    means = options["chunk_means"]
    means[:, 3] = 100 * tensors[0][:, 0]
    o = top1_chunk_decode(*tensors, backend=backend, **options)
    naive.assert_close(o, _attend(*tensors, 0, torch.full((1, 1, 1), 3), 0.25), 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 2, 2, 16)}, r"q must have shape \[B, Tq, H, D\] = \[B, 1, H, D\], not \[2, 2, 2, 16\]"),
        ({"q": torch.zeros(2, 2, 16)}, r"q must have shape .*, not \[2, 2, 16\]"),
        ({"lengths": torch.tensor([50, 50])}, "lengths must be of dtype torch.int32"),
        ({"lengths": torch.tensor([50], dtype=torch.int32)}, r"shape \[B\] = \[2\]"),
        ({"lengths": torch.tensor([0, 50], dtype=torch.int32)}, "from 1 to the capacity 100"),
        ({"lengths": torch.tensor([5, 101], dtype=torch.int32)}, "from 1 to the capacity 100"),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1"),
        ({"selection": "exakt"}, "did you mean exact"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"chunk_means": torch.zeros(2, 6, 2, 16)}, "leave it out here"),
        ({"selection": "approx"}, "needs chunk_means"),
        ({"selection": "approx", "chunk_means": torch.zeros(2, 5, 2, 16)}, "N must be at least 6 in chunk_means"),
        (
            {"selection": "approx", "chunk_means": torch.zeros(2, 6, 2, 16, dtype=torch.int32)},
            "chunk_means must be of dtype floating-point",
        ),
        ({"k_cache": torch.zeros(2, 100, 2, 16, requires_grad=True)}, "decoding has no gradient"),
    ],
)
def test_wrong_arguments(change, message):
    (q, k, v, lengths), options = draw([50, 60], 100)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, **options, **change}
    with pytest.raises(UserError, match=message):
        top1_chunk_decode(**arguments)


@pytest.mark.usefixtures("interpreter")
def test_what_the_kernels_cannot_do():
    tensors, options = draw([50], 100, C=48)
    with pytest.raises(UserError, match="chunk_size 48 is not among"):
        top1_chunk_decode(*tensors, backend="triton", **options)
