"""Taylor linear attention's features, chunks, packing, states and backends against the weights written out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import taylor_linear_attention
from seqarch.kernels.taylor_attention import n_features, taylor_chunked, taylor_features, taylor_recurrent
from tests.kernels import inputs
from tests.kernels.naive import assert_close, assert_same, gradients
from tests.kernels.precision import TF32_TOLERANCE


def draw(T, *, B=2, H=3, K=8, V=6, states=2, **options) -> list[Any]:
    """q, k, v and the states after a few other tokens, which ask for gradients."""
    tensors = list(inputs.taylor(B, T, H, K, V, **options).values())
    if not states:
        return [*tensors, None]
    q, k, v = inputs.taylor(states, 3, H, K, V, seed=1).values()
    _, state = taylor_recurrent(q, k, v, None, 0.3)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return [*tensors, state.detach().to(tensors[0].device, wide).requires_grad_()]


def apply(tensors, **options):
    """Outputs, final state and the gradients of all inputs for a fixed random gradient of both."""
    q, k, v, state = tensors
    results = taylor_linear_attention(q, k, v, initial_state=state, **options)
    return results + gradients(results, tensors)


def dense(q, k, v, scale):
    """The weights written out, T x T."""
    s = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    weights = (1 + s + s**2 / 2).tril()
    return torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)


@pytest.mark.parametrize("K", [1, 2, 5, 16])
def test_features_give_the_expansion(K):
    x, y = torch.randn(2, 7, K, dtype=torch.float64)
    s = 0.3 * (x * y).sum(-1)
    features = taylor_features(x, 0.3)
    assert features.shape == (7, 1 + K + K * (K + 1) // 2) == (7, n_features(K))
    torch.testing.assert_close((features * taylor_features(y, 0.3)).sum(-1), 1 + s + s**2 / 2)


@pytest.mark.parametrize("T", [1, 5, 64, 150])
def test_outputs_are_those_of_the_weights(T):
    q, k, v, _ = draw(T, states=0)
    o, _ = taylor_linear_attention(q, k, v)
    expected = dense(q, k, v, 8**-0.5)
    assert_same((o, *gradients((o,), [q, k, v])), (expected, *gradients((expected,), [q, k, v])))


@pytest.mark.parametrize("T", [1, 5, 64, 150])
def test_chunks_equal_steps(T):
    tensors = draw(T)
    expected = taylor_recurrent(*tensors, scale=0.3)
    actual = taylor_chunked(*tensors, scale=0.3)
    assert_same(actual + gradients(actual, tensors), expected + gradients(expected, tensors))


def test_pieces_equal_the_whole():
    q, k, v, state = draw(100)
    whole, final = taylor_linear_attention(q, k, v, initial_state=state)
    outputs = []
    for piece in (slice(0, 70), slice(70, 71), slice(71, 100)):
        o, state = taylor_linear_attention(q[:, piece], k[:, piece], v[:, piece], initial_state=state)
        outputs.append(o)
    assert_close(torch.cat(outputs, dim=1), whole)
    assert_close(state, final)


@pytest.mark.parametrize("states", [0, 4])
def test_documents_are_apart(states):
    q, k, v, initial = draw(80, B=1, states=states)
    borders = [0, 1, 1, 68, 80]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    o, final = taylor_linear_attention(q, k, v, initial_state=initial, cu_seqlens=cu_seqlens)
    for n, (start, stop) in enumerate(itertools.pairwise(borders)):
        state = initial[n : n + 1] if states else None
        if start == stop:
            assert torch.equal(final[n : n + 1], torch.zeros_like(final[:1]) if state is None else state)
            continue
        piece = slice(start, stop)
        alone, last = taylor_linear_attention(q[:, piece], k[:, piece], v[:, piece], initial_state=state)
        assert_close(o[:, piece], alone)
        assert_close(final[n : n + 1], last)


def test_autocast_keeps_a_float32_state():
    q, k, v, state = draw(70, dtype=torch.float32)
    expected, last = taylor_linear_attention(q, k, v, initial_state=state)
    with torch.autocast("cpu", torch.bfloat16):
        o, final = taylor_linear_attention(q, k, v, initial_state=state)
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert_close(o, expected, 1e-2)
    assert_close(final, last, 1e-2)


def test_equals_the_naive_op_of_fla():
    pytest.importorskip("fla")
    from fla.ops.based.naive import naive_parallel_based

    q, k, v, _ = draw(70, states=0, dtype=torch.float32)
    expected = naive_parallel_based(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    assert_close(taylor_linear_attention(q, k, v)[0], expected, 1e-5)


def test_refusals():
    q, k, v, state = draw(5)
    with pytest.raises(UserError, match=r"\[B, T, H, K\]"):
        taylor_linear_attention(q, k[..., :4], v)
    with pytest.raises(UserError, match=r"must be of dtype torch.float"):
        taylor_linear_attention(q, k, v.float())
    with pytest.raises(UserError, match="initial_state must have shape"):
        taylor_linear_attention(q, k, v, initial_state=state[..., 1:])
    with pytest.raises(UserError, match="needs B = 1"):
        taylor_linear_attention(q, k, v, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(UserError, match="scale must be positive"):
        taylor_linear_attention(q, k, v, scale=-1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "dtype", "ratio"),
    [(63, torch.bfloat16, 2e-2), (300, torch.bfloat16, 2e-2), (300, torch.float32, TF32_TOLERANCE)],
)
def test_fla_equals_the_reference(T, dtype, ratio):
    pytest.importorskip("fla")
    tensors = draw(T, H=4, K=16, V=64, dtype=dtype, device="cuda")
    wide = [t.detach().double().requires_grad_() for t in tensors]
    assert_same(apply(tensors, backend="fla"), apply(wide, backend="reference"), ratio)


@pytest.mark.gpu
def test_fla_keeps_documents_apart():
    pytest.importorskip("fla")
    tensors = draw(300, B=1, H=4, K=16, V=64, states=3, dtype=torch.bfloat16, device="cuda")
    wide = [t.detach().double().requires_grad_() for t in tensors]
    cu_seqlens = torch.tensor([0, 1, 200, 300], dtype=torch.int32, device="cuda")
    actual = apply(tensors, backend="fla", cu_seqlens=cu_seqlens)
    assert_same(actual, apply(wide, backend="reference", cu_seqlens=cu_seqlens), 2e-2)


@pytest.mark.gpu
def test_fla_takes_100k_tokens():
    pytest.importorskip("fla")
    T = 102_400
    q, k, v, _ = tensors = draw(T, B=1, H=4, K=16, V=64, states=0, dtype=torch.bfloat16, device="cuda")
    o, final, *grads = apply(tensors)
    assert all(t.isfinite().all() for t in (o, final, *grads))
    state = None
    for half in (slice(0, T // 2), slice(T // 2, T)):
        _, state = taylor_linear_attention(q[:, half], k[:, half], v[:, half], initial_state=state)
    assert state is not None
    assert_close(state, final, 1e-2)
