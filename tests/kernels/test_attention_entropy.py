"""Entropy of attention distributions."""

import itertools
import math

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import attention_entropy, blocks, select_chunks
from tests.kernels import naive

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


@pytest.mark.parametrize("T", [1, 63, 127, 128, 129, 300])
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"alibi_slopes": SLOPES}, {"scale": 2.0}], ids=str)
def test_definition(T, options):
    q, k, _ = naive.draw(Tq=T)
    wanted = naive.entropy(naive.probabilities(q, k, **options))
    naive.assert_close(attention_entropy(q, k, **options), wanted)


@pytest.mark.parametrize("HK", [1, 4])
def test_blocks_and_last_queries(monkeypatch, HK):
    monkeypatch.setattr(blocks, "SCORE_BYTES", 1)
    q, k, _ = naive.draw(Tq=100, HK=HK)
    wanted = naive.entropy(naive.probabilities(q, k, window=30))
    naive.assert_close(attention_entropy(q, k, window=30), wanted)
    naive.assert_close(attention_entropy(q[:, -30:], k, window=30), wanted[:, -30:])


def test_top1_chunk_distribution():
    q, k, _ = naive.draw(Tq=100)
    chunks = select_chunks(q, k, chunk_size=16)
    wanted = naive.entropy(naive.top1_chunk_probabilities(q, k, chunks, chunk_size=16))
    naive.assert_close(attention_entropy(q, k, chunk_size=16, chunks=chunks), wanted)


def test_packed_documents():
    borders = [0, 10, 50, 100]
    q, k, _ = naive.draw(B=1, Tq=100)
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    pairs = list(itertools.pairwise(borders))
    wanted = torch.cat([naive.entropy(naive.probabilities(q[:, a:b], k[:, a:b])) for a, b in pairs], dim=1)
    naive.assert_close(attention_entropy(q, k, cu_seqlens=cu_seqlens), wanted)
    chunks = select_chunks(q, k, chunk_size=8, cu_seqlens=cu_seqlens)
    wanted = [
        attention_entropy(q[:, a:b], k[:, a:b], chunk_size=8, chunks=select_chunks(q[:, a:b], k[:, a:b], chunk_size=8))
        for a, b in pairs
    ]
    packed = attention_entropy(q, k, chunk_size=8, chunks=chunks, cu_seqlens=cu_seqlens)
    naive.assert_close(packed, torch.cat(wanted, dim=1))


def test_uniform_attention_has_the_logarithm_of_its_length():
    q, k, _ = (t.detach().bfloat16() for t in naive.draw(Tq=50))
    h = attention_entropy(torch.zeros_like(q), k)
    assert h.dtype == torch.float32
    wanted = torch.tensor([math.log(n) for n in range(1, 51)]).view(1, 50, 1).expand(2, 50, 4)
    torch.testing.assert_close(h, wanted)


def test_certain_attention_has_none():
    k = torch.eye(20, dtype=torch.float64).view(1, 20, 1, 20)
    assert attention_entropy(1e4 * k, k, scale=1.0).abs().max() == 0


def test_no_gradient():
    q, k, _ = naive.draw(Tq=20)
    assert not attention_entropy(q, k).requires_grad


@pytest.mark.parametrize("options", [{}, {"window": 37}, {"alibi_slopes": SLOPES.float()}, {"scale": 30.0}], ids=str)
@pytest.mark.parametrize(("Tq", "Tk", "HK"), [(1, 1, 4), (100, 100, 2), (20, 150, 4)])
@pytest.mark.usefixtures("interpreter", "poison")
def test_kernel(Tq, Tk, HK, options):
    q, k, _ = (t.detach().float() for t in naive.draw(Tq=Tq, Tk=Tk, HK=HK))
    wanted = naive.entropy(naive.probabilities(q.double(), k.double(), **options))
    torch.testing.assert_close(attention_entropy(q, k, backend="triton", **options).double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("interpreter", "poison")
def test_kernel_on_packed_documents():
    q, k, _ = (t.detach().float() for t in naive.draw(B=1, Tq=110, Tk=140))
    options = {"cu_seqlens": torch.tensor([0, 1, 40, 40, 140], dtype=torch.int32), "window": 50}
    naive.assert_close(attention_entropy(q, k, backend="triton", **options), attention_entropy(q, k, **options), 1e-5)


CHUNK_CASES = [
    # B, Tq, Tk, H, HK, D, chunk_size
    (1, 1, 1, 2, 1, 16, 16),
    (2, 70, 70, 2, 1, 16, 16),
    (1, 129, 129, 2, 2, 24, 64),
    (1, 20, 150, 2, 1, 16, 16),
    (1, 260, 260, 1, 1, 64, 128),
]


@pytest.mark.parametrize(
    ("B", "Tq", "Tk", "H", "HK", "D", "C", "scale"),
    [*((*case, None) for case in CHUNK_CASES), *((*CHUNK_CASES[1], scale) for scale in (1.0, 50.0))],
)
@pytest.mark.usefixtures("interpreter", "poison")
def test_kernel_with_chunks(B, Tq, Tk, H, HK, D, C, scale):
    q, k, _ = (t.detach().float() for t in naive.draw(B, Tq, H, D, Tk=Tk, HK=HK))
    chunks = naive.select_chunks(q.double(), k.double(), chunk_size=C)
    p = naive.top1_chunk_probabilities(q.double(), k.double(), chunks, chunk_size=C, scale=scale)
    actual = attention_entropy(q, k, chunk_size=C, chunks=chunks, scale=scale, backend="triton")
    torch.testing.assert_close(actual.double(), naive.entropy(p), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("interpreter", "poison")
def test_kernel_with_chunks_in_half_precision():
    """Normalised vectors of unit root mean square with scores up to 8, and a selection that all queries share."""
    q, k, _ = (t.detach() for t in naive.draw(1, 150, 2, 16, normalised=True))
    q, k = (4 * q).half().transpose(1, 2).contiguous().transpose(1, 2), (4 * k).half()
    chunks = torch.where(torch.arange(150) < 16, -1, 0).to(torch.int32).view(1, -1, 1).expand(1, -1, 2)
    p = naive.top1_chunk_probabilities(q.double(), k.double(), chunks, chunk_size=16, scale=0.5)
    actual = attention_entropy(q, k, chunk_size=16, chunks=chunks, scale=0.5, backend="triton")
    torch.testing.assert_close(actual.double(), naive.entropy(p), rtol=0, atol=1e-4)


@pytest.mark.usefixtures("interpreter", "poison")
def test_kernel_with_chunks_on_packed_documents():
    q, k, _ = (t.detach().float() for t in naive.draw(B=1, Tq=90, Tk=140, H=2))
    borders = torch.tensor([0, 1, 40, 40, 57, 140], dtype=torch.int32)
    chunks = select_chunks(q, k, chunk_size=16, cu_seqlens=borders, backend="reference")
    options = {"chunk_size": 16, "chunks": chunks, "cu_seqlens": borders}
    wanted = attention_entropy(q.double(), k.double(), **options)
    actual = attention_entropy(q, k, backend="triton", **options)
    torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("interpreter")
def test_what_the_kernel_cannot_do():
    q, k, _ = naive.draw(Tq=40)
    with pytest.raises(UserError, match="does not take float64"):
        attention_entropy(q, k, backend="triton")
    chunks = torch.zeros(2, 40, 4, dtype=torch.int32)
    with pytest.raises(UserError, match="chunk_size 24 is not among"):
        attention_entropy(q.float(), k.float(), chunk_size=24, chunks=chunks, backend="triton")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 16}, "belong together"),
        ({"chunks": torch.zeros(2, 40, 4, dtype=torch.int32)}, "belong together"),
        ({"chunks": torch.zeros(2, 40, 4, dtype=torch.int32), "chunk_size": 16, "window": 3}, "neither window"),
        (
            {"chunks": torch.zeros(2, 4, 4, dtype=torch.int32), "chunk_size": 16},
            "chunks must (have shape|be of dtype torch.int32)",
        ),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_wrong_options(options, message):
    q, k, _ = naive.draw(Tq=40)
    with pytest.raises(UserError, match=message):
        attention_entropy(q, k, **options)
