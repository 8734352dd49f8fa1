"""The delta rule's chunked form, packing, states and backends against the recurrence, one step per token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from seqarch.errors import UserError
from seqarch.kernels import delta_rule
from seqarch.kernels.delta_rule import delta_rule_chunked, delta_rule_recurrent
from tests.kernels import inputs
from tests.kernels.naive import assert_close, assert_same, gradients
from tests.kernels.precision import TF32_TOLERANCE


def draw(T, *, B=2, states=2, **options) -> list[Any]:
    """q, k, v, beta, log decay (of about `-decay`) and initial states that ask for gradients."""
    return list(inputs.delta_rule(B, T, states=states, **options).values())


def each(tensors, function) -> list[Any]:
    return [None if t is None else function(t) for t in tensors]


def apply(tensors, **options):
    """Outputs, final state and the gradients of all inputs for a fixed random gradient of both."""
    q, k, v, beta, log_decay, state = tensors
    results = delta_rule(q, k, v, beta, log_decay=log_decay, initial_state=state, **options)
    return results + gradients(results, tensors)


@pytest.mark.parametrize("decay", [None, 0.1, 30.0])
@pytest.mark.parametrize("T", [1, 5, 64, 150])
def test_chunks_equal_steps(T, decay):
    tensors = draw(T, decay=decay)
    expected = delta_rule_recurrent(*tensors)
    actual = delta_rule_chunked(*tensors)
    assert_same(actual + gradients(actual, tensors), expected + gradients(expected, tensors))


def test_a_strong_decay_does_not_blur_weak_ones():
    tensors = draw(64, decay=0.01, dtype=torch.float32)
    with torch.no_grad():
        tensors[4][:, 10] = -1e6
    wide = each(tensors, torch.Tensor.double)
    assert_same(delta_rule_chunked(*tensors), delta_rule_recurrent(*wide), 1e-6)


def test_definition_written_out():
    q, k, v, beta, log_decay, _ = draw(4, B=1, H=1, decay=0.5, states=0)
    state = torch.zeros(8, 6, dtype=torch.float64)
    for t in range(4):
        erase = torch.eye(8, dtype=torch.float64) - beta[0, t, 0] * torch.outer(k[0, t, 0], k[0, t, 0])
        state = log_decay[0, t, 0].exp() * erase @ state + beta[0, t, 0] * torch.outer(k[0, t, 0], v[0, t, 0])
    o, final = delta_rule(q, k, v, beta, log_decay=log_decay)
    torch.testing.assert_close(final[0, 0], state)
    torch.testing.assert_close(o[0, -1, 0], 8**-0.5 * q[0, -1, 0] @ state)


@pytest.mark.parametrize("decay", [None, 0.5])
def test_pieces_equal_the_whole(decay):
    tensors = draw(100, decay=decay)
    whole, final = delta_rule(*tensors[:4], log_decay=tensors[4], initial_state=tensors[5])
    state, outputs = tensors[5], []
    for start, stop in ((0, 70), (70, 71), (71, 100)):
        q, k, v, beta, log_decay = each(tensors[:5], lambda t, a=start, b=stop: t[:, a:b])
        o, state = delta_rule(q, k, v, beta, log_decay=log_decay, initial_state=state)
        outputs.append(o)
    assert_close(torch.cat(outputs, dim=1), whole)
    assert_close(state, final)


@pytest.mark.parametrize("states", [0, 4])
def test_documents_are_apart(states):
    tensors = draw(80, B=1, decay=0.5, states=states)
    borders = [0, 1, 1, 68, 80]
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    o, final, *grads = apply(tensors, cu_seqlens=cu_seqlens)
    assert o.shape == (1, 80, 3, 6)
    assert final.shape == (4, 3, 8, 6)
    for n, (start, stop) in enumerate(itertools.pairwise(borders)):
        if start == stop:
            assert torch.equal(final[n], tensors[5][n] if states else torch.zeros_like(final[n]))
            continue
        q, k, v, beta, log_decay = (t[:, start:stop] for t in tensors[:5])
        state = tensors[5][n : n + 1] if states else None
        alone, last = delta_rule(q, k, v, beta, log_decay=log_decay, initial_state=state)
        assert_close(o[:, start:stop], alone)
        assert_close(final[n : n + 1], last)
    assert all(grad.isfinite().all() for grad in grads)


def test_half_precision_and_autocast_keep_a_float32_state():
    tensors = draw(70, decay=0.5, dtype=torch.float32)
    expected, state = delta_rule(*tensors[:4], log_decay=tensors[4], initial_state=tensors[5])
    with torch.autocast("cpu", torch.bfloat16):
        o, final = delta_rule(*tensors[:4], log_decay=tensors[4], initial_state=tensors[5])
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert_close(o, expected, 1e-2)
    assert_close(final, state, 1e-2)


def test_equals_the_naive_ops_of_fla():
    pytest.importorskip("fla")
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    q, k, v, beta, log_decay, state = draw(70, decay=0.5, dtype=torch.float32)
    first = (t.transpose(1, 2) for t in (q, k, v, beta))
    expected, final = delta_rule_recurrence(*first, initial_state=state)
    o, last = delta_rule(q, k, v, beta, initial_state=state)
    assert_close(o, expected.transpose(1, 2), 1e-5)
    assert_close(last, final, 1e-5)
    expected, final = naive_recurrent_gated_delta_rule(
        q, k, v, beta, log_decay, initial_state=state, output_final_state=True
    )
    o, last = delta_rule(q, k, v, beta, log_decay=log_decay, initial_state=state)
    assert_close(o, expected, 1e-5)
    assert_close(last, final, 1e-5)


def test_refusals():
    q, k, v, beta, log_decay, state = draw(5, decay=0.5)
    with pytest.raises(UserError, match=r"\[B, T, H, K\]"):
        delta_rule(q, k[..., :4], v, beta)
    with pytest.raises(UserError, match=r"must be of dtype torch.float"):
        delta_rule(q, k, v.float(), beta)
    with pytest.raises(UserError, match=r"beta must have shape \[B, T, H\]"):
        delta_rule(q, k, v, beta[..., None])
    with pytest.raises(UserError, match=r"log_decay must be of dtype torch\.float64"):
        delta_rule(q, k, v, beta, log_decay=log_decay.bfloat16())
    with pytest.raises(UserError, match="initial_state must have shape"):
        delta_rule(q, k, v, beta, initial_state=state[:1])
    with pytest.raises(UserError, match="needs B = 1"):
        delta_rule(q, k, v, beta, cu_seqlens=torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(UserError, match="unknown backend"):
        delta_rule(q, k, v, beta, backend="cuda")  # pyright: ignore[reportArgumentType]


def test_sizes_with_which_the_kernels_of_fla_fail_are_refused():
    q, k, v, beta, log_decay, _ = draw(5, K=32, V=64, states=0, dtype=torch.bfloat16)
    with pytest.raises(UserError, match="illegal memory with keys of 32 and values of 64"):
        delta_rule(q, k, v, beta, log_decay=log_decay, backend="fla")


GPU_CASES = [
    pytest.param(torch.bfloat16, None, 2e-2, id="bfloat16"),
    pytest.param(torch.bfloat16, 0.1, 2e-2, id="bfloat16-decay"),
    pytest.param(torch.float32, None, 1e-3, id="float32"),
    pytest.param(torch.float32, 0.1, TF32_TOLERANCE, id="float32-decay"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "dtype", "decay", "ratio"),
    [
        pytest.param(T, *case.values, id=f"{T}-{case.id}")
        for case in GPU_CASES
        for T in ((300,) if torch.float32 in case.values else (1, 63, 300))
    ],
)
def test_fla_equals_the_reference(T, dtype, decay, ratio):
    pytest.importorskip("fla")
    tensors = draw(T, B=8, H=4, K=96, V=192, decay=decay, states=8, dtype=dtype, device="cuda")
    wide = each(tensors, lambda t: t.detach().double().requires_grad_())
    assert_same(apply(tensors, backend="fla"), apply(wide, backend="reference"), ratio)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [None, 0.1])
def test_fla_keeps_documents_apart(decay):
    pytest.importorskip("fla")
    tensors = draw(300, B=1, H=4, K=64, V=64, decay=decay, states=3, dtype=torch.bfloat16, device="cuda")
    wide = each(tensors, lambda t: t.detach().double().requires_grad_())
    cu_seqlens = torch.tensor([0, 1, 200, 300], dtype=torch.int32, device="cuda")
    actual = apply(tensors, backend="fla", cu_seqlens=cu_seqlens)
    assert_same(actual, apply(wide, backend="reference", cu_seqlens=cu_seqlens), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [None, 0.1])
def test_fla_steps_equal_the_reference(decay):
    pytest.importorskip("fla")
    tensors = each(draw(20, decay=decay, dtype=torch.bfloat16, device="cuda"), torch.Tensor.detach)
    q, k, v, beta, log_decay, state = tensors
    wide = each(tensors, torch.Tensor.double)
    expected, final = delta_rule(*wide[:4], log_decay=wide[4], initial_state=wide[5], backend="reference")
    outputs = []
    for t in range(20):
        step = each((q, k, v, beta, log_decay), lambda x, at=t: x[:, at : at + 1])
        o, state = delta_rule(*step[:4], log_decay=step[4], initial_state=state, backend="fla")
        outputs.append(o)
    assert_close(torch.cat(outputs, dim=1), expected, 1e-2)
    assert_close(state, final, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [None, 0.01])
def test_fla_takes_100k_tokens(decay):
    pytest.importorskip("fla")
    T = 102_400
    tensors = draw(T, B=1, H=6, K=96, V=192, decay=decay, states=0, dtype=torch.bfloat16, device="cuda")
    o, final, *grads = apply(tensors)
    assert all(t.isfinite().all() for t in (o, final, *grads))
    state = None
    for half in (slice(0, T // 2), slice(T // 2, T)):
        q, k, v, beta, log_decay = each(tensors[:5], lambda t, part=half: t[:, part])
        _, state = delta_rule(q, k, v, beta, log_decay=log_decay, initial_state=state)
    assert_close(state, final, 1e-2)
