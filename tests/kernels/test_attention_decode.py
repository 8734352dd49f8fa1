"""Decoding with dense attention from a ring of keys, against the definition in float64, one sequence at a time.

The kernels run under Triton's interpreter, whose bf16 products are wrong, so float32 and float16 stand in.
"""

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import attention_decode
from tests.kernels import naive


def draw(lengths, capacity, H=2, HK=None, D=16, *, dtype=torch.float32):
    """Queries and rings of the last keys, and the keys in order `[B, length, HK, D]`. Free places of a ring are NaN."""
    q, k, v = naive.draw(len(lengths), 1, H, D, Tk=max(*lengths, 2), HK=HK)
    q, k, v = (t.detach().to(dtype) for t in (q, k, v))
    rings = []
    for t in (k, v):
        ring = t.new_full((len(lengths), capacity, *t.shape[2:]), float("nan"))
        for b, length in enumerate(lengths):
            for p in range(length):
                ring[b, p % capacity] = t[b, p]
        rings.append(ring)
    return (q, rings[0], rings[1], torch.tensor(lengths, dtype=torch.int32)), (k, v)


def expected(q, k, v, lengths, capacity, *, scale=None, alibi_slopes=None, hard=False):
    rows = []
    for b, length in enumerate(lengths):
        seen = slice(max(0, length - capacity), length)
        keys, values = (t[b, seen].double().repeat_interleave(q.shape[2] // t.shape[2], 1) for t in (k, v))
        s = torch.einsum("hd,thd->ht", q[b, 0].double(), keys) * (scale or q.shape[3] ** -0.5)
        if alibi_slopes is not None:
            s = s - alibi_slopes[:, None].double() * torch.arange(len(keys) - 1, -1, -1)
        p = torch.nn.functional.one_hot(s.argmax(-1), len(keys)).double() if hard else s.softmax(-1)
        rows.append(torch.einsum("ht,thd->hd", p, values)[None, None])
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("lengths", "capacity", "H", "HK", "D", "hard"),
    [
        ([1, 16, 17, 100, 300], 300, 2, 2, 16, True),
        ([70, 300], 321, 4, 2, 32, False),
        ([5, 64, 65, 200], 64, 2, 1, 24, False),
        ([5, 64, 65, 200], 64, 2, 1, 24, True),
        ([600, 40], 500, 1, 1, 128, False),
        ([3], 1, 1, 1, 16, True),
    ],
)
def test_definition(lengths, capacity, H, HK, D, hard, backend):
    tensors, (k, v) = draw(lengths, capacity, H, HK, D)
    o = attention_decode(*tensors, hard=hard, backend=backend)
    naive.assert_close(o, expected(tensors[0], k, v, lengths, capacity, hard=hard), 1e-5)


@pytest.mark.parametrize("scale", [None, 0.1, 300.0])
def test_distances_go_around_the_ring(scale, backend):
    lengths, slopes = [3, 40, 41, 150], torch.tensor([0.5, 0.01])
    tensors, (k, v) = draw(lengths, 40)
    o = attention_decode(*tensors, scale=scale, alibi_slopes=slopes, backend=backend)
    wanted = expected(tensors[0], k, v, lengths, 40, scale=scale, alibi_slopes=slopes)
    naive.assert_close(o, wanted, 1e-4 if scale == 300 else 1e-5)


def test_equal_scores_go_to_the_first_key(backend):
    (q, k, v, lengths), _ = draw([900], 900)
    k[:] = k[:, :1]
    o = attention_decode(q, k, v, lengths, hard=True, backend=backend)
    torch.testing.assert_close(o, v[:, :1])


def test_half_precision(backend):
    tensors, (k, v) = draw([100, 45], 100, 4, 2, dtype=torch.float16)
    o = attention_decode(*tensors, backend=backend)
    assert o.dtype == torch.float16
    naive.assert_close(o, expected(tensors[0], k, v, [100, 45], 100), 2e-3)


@pytest.mark.usefixtures("interpreter", "poison")
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_any_number_of_splits(splits, hard, monkeypatch):
    from seqarch.kernels.attention_decode import triton

    monkeypatch.setattr(triton, "exact_splits", lambda pairs, blocks: splits)
    monkeypatch.setattr(triton, "TILE", 256)
    tensors, (k, v) = draw([1, 17, 150, 131], 150)
    o = attention_decode(*tensors, hard=hard, backend="triton")
    naive.assert_close(o, expected(tensors[0], k, v, [1, 17, 150, 131], 150, hard=hard), 1e-5)


def test_caches_need_not_be_contiguous(backend):
    (q, k, v, lengths), (keys, values) = draw([50, 100], 100)
    wanted = expected(q, keys, values, [50, 100], 100)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    v = v.repeat_interleave(2, dim=-1)[..., ::2]
    naive.assert_close(attention_decode(q, k, v, lengths, backend=backend), wanted, 1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 2, 2, 16)}, r"q must have shape .* = \[B, 1, H, D\], not \[2, 2, 2, 16\]"),
        ({"lengths": torch.tensor([50, 50])}, "lengths must be of dtype torch.int32"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must have shape \[H\]"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"q": torch.zeros(2, 1, 2, 16).requires_grad_()}, "decoding has no gradient"),
    ],
)
def test_wrong_input_is_refused(change, message):
    (q, k, v, lengths), _ = draw([50, 100], 100)
    given = {"q": q, "k_cache": k, "v_cache": v, "lengths": lengths, **change}
    with pytest.raises(UserError, match=message):
        attention_decode(**given)
