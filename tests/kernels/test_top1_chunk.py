"""Selection of chunks, and attention to a selection that is given."""

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import blocks, select_chunks, top1_chunk_attention
from tests.kernels import naive


@pytest.mark.parametrize("selection", ["exact", "approx"])
@pytest.mark.parametrize("T", [1, 63, 127, 128, 129, 300])
@pytest.mark.parametrize("chunk_size", [16, 128])
def test_selection(selection, T, chunk_size):
    q, k, _ = naive.draw(Tq=T, seed=T)
    options = {"chunk_size": chunk_size, "selection": selection}
    assert torch.equal(select_chunks(q, k, **options), naive.select_chunks(q, k, **options))


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_selection_in_blocks_and_with_shared_key_heads(selection, monkeypatch):
    monkeypatch.setattr(blocks, "SCORE_BYTES", 1)
    q, k, _ = naive.draw(Tq=130, HK=2)
    options = {"chunk_size": 16, "selection": selection}
    assert torch.equal(select_chunks(q, k, **options), naive.select_chunks(q, k, **options))


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_selection_of_the_last_queries(selection):
    q, k, _ = naive.draw(Tq=130)
    whole = select_chunks(q, k, chunk_size=16, selection=selection)
    assert torch.equal(select_chunks(q[:, -20:], k, chunk_size=16, selection=selection), whole[:, -20:])


@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_equal_masses_go_to_the_first_chunk(selection):
    q, _, _ = (t.detach().round() for t in naive.draw(Tq=64))
    k = naive.draw(Tq=16, seed=5)[1].detach().round().repeat(1, 4, 1, 1)
    chunks = select_chunks(q, k, chunk_size=16, selection=selection)
    assert (chunks[:, :16] == -1).all()
    assert (chunks[:, 16:] == 0).all()


def test_scores_far_apart_do_not_overflow():
    q, k, v = (50 * t.detach().float() for t in naive.draw(Tq=100))
    options = {"chunk_size": 16, "scale": 50.0}
    assert torch.equal(select_chunks(q, k, **options), _largest_score_chunk(q, k, 16))
    assert top1_chunk_attention(q, k, v, **options).isfinite().all()


def _largest_score_chunk(q, k, chunk_size):
    s, i, j = naive.scores(q.double(), k.double())
    s = s.masked_fill(j // chunk_size >= i // chunk_size, float("-inf"))
    best = torch.where(i.squeeze(1) < chunk_size, -1, s.argmax(-1) // chunk_size)
    return best.transpose(1, 2).to(torch.int32)


def test_masses_too_small_for_float32_are_compared():
    """Eligible chunks are ordered correctly even if a later chunk's scores are larger by thousands."""
    q = torch.ones(1, 48, 1, 1)
    k = torch.tensor([-3000.0, -2999.0, 5000.0]).repeat_interleave(16).view(1, 48, 1, 1)
    chunks = select_chunks(q, k, chunk_size=16, scale=1.0)
    assert chunks[0, 16:32].eq(0).all()
    assert chunks[0, 32:].eq(1).all()


def test_chunk_means_replace_those_of_the_keys():
    q, k, v = naive.draw(Tq=100)
    means = k[:, :96].view(2, 6, 16, 4, 16).mean(2)
    options = {"chunk_size": 16, "selection": "approx"}
    wanted = naive.select_chunks(q, k, **options)
    assert torch.equal(select_chunks(q, k, chunk_means=means, **options), wanted)
    more = torch.cat([means, torch.full_like(means, 1e9)], dim=1)
    assert torch.equal(select_chunks(q, k, chunk_means=more, **options), wanted)
    swapped = means.roll(1, dims=1)
    assert not torch.equal(select_chunks(q, k, chunk_means=swapped, **options), wanted)
    o = top1_chunk_attention(q[:, -3:], k, v, chunk_means=means, **options)
    naive.assert_close(o, naive.top1_chunk_attention(q, k, v, **options)[:, -3:])


def test_a_given_selection_is_used():
    q, k, v = draw = naive.draw(Tq=100)
    own = torch.arange(100).view(1, 100, 1) // 16
    chunks = (torch.randint(0, 10**6, (2, 100, 4)) % own.clamp_min(1)).where(own > 0, -1).to(torch.int32)
    p = naive.top1_chunk_probabilities(q, k, chunks, chunk_size=16)
    actual = top1_chunk_attention(q, k, v, chunk_size=16, chunks=chunks)
    naive.assert_same_gradients(actual, naive.weighted(p, v), draw)


def test_no_selection_shows_a_query_its_future():
    q, k, v = naive.draw(Tq=40)
    everything_last = torch.full((2, 40, 4), 2, dtype=torch.int32)
    nothing = torch.full((2, 40, 4), -1, dtype=torch.int32)
    actual = top1_chunk_attention(q, k, v, chunk_size=16, chunks=everything_last)
    naive.assert_close(actual, top1_chunk_attention(q, k, v, chunk_size=16, chunks=nothing))


def test_the_selection_has_no_gradient():
    q, k, _ = naive.draw(Tq=40)
    assert not select_chunks(q, k, chunk_size=16).requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1"),
        ({"selection": "exakt"}, "did you mean exact"),
        ({"chunk_means": torch.zeros(2, 6, 4, 16)}, "selection='approx'"),
        (
            {"selection": "approx", "chunk_means": torch.zeros(2, 1, 4, 16), "chunk_size": 16},
            r"N must be at least 6 in chunk_means",
        ),
        (
            {"selection": "approx", "chunk_means": torch.zeros(2, 6, 3, 16), "chunk_size": 16},
            "chunk_means must have shape",
        ),
        ({"chunks": torch.zeros(2, 99, 4, dtype=torch.int32)}, r"chunks must have shape .* = \[2, 100, 4, K\]"),
        ({"chunks": torch.zeros(2, 100, 4)}, "chunks must be of dtype torch.int32"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(UserError, match=message):
        top1_chunk_attention(*naive.draw(Tq=100), **options)
