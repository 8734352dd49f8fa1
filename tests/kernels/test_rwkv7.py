"""RWKV-7's recurrence: chunked against step by step and published code, fla's kernels, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import rwkv7
from seqarch.kernels.rwkv import rwkv7_chunked, rwkv7_recurrent
from seqarch.testing.compare import relative_error
from tests.kernels import inputs
from tests.kernels.precision import TF32_TOLERANCE, DroppedBits
from tests.kernels.test_rwkv6 import assert_same, assert_scale_is_a_factor, state_for, with_gradients

BOUND = -math.exp(-0.5)


def draw(B: int = 2, T: int = 70, *sizes: int, **options: Any) -> dict[str, Any]:
    return {name: t.detach() for name, t in inputs.rwkv7(B, T, *sizes, seed=T, **options).items()}


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("strength", [None, 3.0])
def test_chunks_are_the_recurrence(length: int, strength: float | None) -> None:
    arguments = draw(T=length, strength=strength)
    arguments["initial_state"] = state_for(arguments)
    results = [with_gradients(op, arguments) for op in (rwkv7_recurrent, rwkv7_chunked)]
    assert_same(results[1], results[0])


@pytest.mark.parametrize("strength", [None, 5.0])
def test_float32_is_close(strength: float | None) -> None:
    arguments = draw(T=100, K=32, V=32, strength=strength)
    exact = with_gradients(lambda **tensors: rwkv7_recurrent(**tensors, initial_state=None), arguments)
    assert_same(with_gradients(rwkv7, {n: t.float() for n, t in arguments.items()}), exact, 1e-5)


def test_is_the_state_equation_of_the_paper() -> None:
    """The transposed state of arXiv 2503.14456, as in github.com/BlinkDL/RWKV-LM, RWKV-v7/rwkv_v7_numpy.py."""
    arguments = draw(B=1, T=5)
    o, state = rwkv7(**arguments)
    for h in range(2):
        r, w, k, v, a, b = (arguments[n][0, :, h] for n in ("r", "log_decay", "k", "v", "a", "b"))
        S = torch.zeros(6, 8, dtype=torch.float64)
        for t in range(5):
            S = S @ (torch.diag(w[t].exp()) + torch.outer(a[t], b[t])) + torch.outer(v[t], k[t])
            torch.testing.assert_close(o[0, t, h], S @ r[t])
        torch.testing.assert_close(state[0, h], S.T)


def test_is_flas_naive_recurrence() -> None:
    naive = pytest.importorskip("fla.ops.generalized_delta_rule.dplr.naive")
    arguments = draw()
    q, k, v, g, a, b = (t.float().transpose(1, 2) for t in arguments.values())
    expected, final = naive.dplr_recurrence(q, k, v, a, b, g)
    o, state = rwkv7(**{n: t.float() for n, t in arguments.items()}, scale=8**-0.5)
    torch.testing.assert_close(o, expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 70])
def test_the_scale_is_a_factor_on_the_outputs(length: int) -> None:
    assert_scale_is_a_factor(rwkv7, draw(T=length))


def test_packed_documents_are_alone() -> None:
    arguments = draw(B=1, T=60)
    borders = torch.tensor([0, 7, 8, 60], dtype=torch.int32)
    states = state_for(arguments, 3)

    def packed(initial_state: Tensor, **tensors: Any) -> tuple[Tensor, Tensor]:
        return rwkv7(**tensors, initial_state=initial_state, cu_seqlens=borders)

    def alone(initial_state: Tensor, **tensors: Any) -> tuple[Tensor, Tensor]:
        results = []
        for n, (start, stop) in enumerate(((0, 7), (7, 8), (8, 60))):
            piece = {name: t[:, start:stop] for name, t in tensors.items()}
            results.append(rwkv7_recurrent(**piece, initial_state=initial_state[n : n + 1]))
        return torch.cat([o for o, _ in results], 1), torch.cat([state for _, state in results])

    arguments["initial_state"] = states
    assert_same(with_gradients(packed, arguments), with_gradients(alone, arguments))


def test_halves_through_the_state_are_the_whole() -> None:
    arguments = draw()
    o, state = rwkv7(**arguments)
    before, middle = rwkv7(**{n: t[:, :33] for n, t in arguments.items()})
    after, last = rwkv7(**{n: t[:, 33:] for n, t in arguments.items()}, initial_state=middle)
    torch.testing.assert_close(torch.cat((before, after), 1), o)
    torch.testing.assert_close(last, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    arguments = {n: t.to(torch.float32 if n == "log_decay" else dtype) for n, t in draw().items()}
    o, state = rwkv7(**arguments)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    o, state = rwkv7(**{n: t[:, :1] for n, t in arguments.items()}, initial_state=state)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(2, 70, 2, 7, dtype=torch.float64)}, r"a must have shape \[B, T, H, K\] = \[2, 70, 2, 8\]"),
        ({"b": torch.zeros(2, 70, 2, 8)}, "must be of dtype torch.float"),
        ({"log_decay": torch.zeros(2, 70, 2, 8)}, "log_decay must be of dtype torch.float64"),
        ({"initial_state": torch.zeros(1, 2, 8, 6)}, r"\[rows, H, K, V\] = \[2, 2, 8, 6\]"),
        ({"cu_seqlens": torch.tensor([0, 70])}, "int32"),
        ({"lower_bound": 0.5}, "lower_bound"),
        ({"backend": "triton"}, "backend"),
        ({"backend": "fla"}, "fla"),
    ],
)
def test_refusals(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rwkv7(**(draw() | change))


def test_fla_refuses_float64() -> None:
    with pytest.raises(UserError, match="it does not take float64"):
        rwkv7(**draw(), backend="fla")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance", "packed", "bound"),
    [
        (torch.bfloat16, 1e-2, False, BOUND),
        (torch.bfloat16, 1e-2, True, BOUND),
        (torch.float32, TF32_TOLERANCE, False, BOUND),
        (torch.float32, TF32_TOLERANCE, False, None),
    ],
)
def test_fla_is_the_recurrence(dtype: torch.dtype, tolerance: float, packed: bool, bound: float | None) -> None:
    pytest.importorskip("fla")
    arguments = draw(B=1 if packed else 2, T=200, K=64, V=64, device="cuda")
    borders = torch.tensor([0, 77, 200], dtype=torch.int32, device="cuda") if packed else None
    arguments["initial_state"] = state_for(arguments, 2)
    half = ("r", "k", "v", "a", "b")
    # Both take the same rounded numbers.
    arguments = {n: t.to(dtype).double() if n in half else t.float().double() for n, t in arguments.items()}

    def run(backend: str, narrow: bool) -> dict[str, Any]:
        def op(**tensors: Any) -> tuple[Tensor, Tensor]:
            if narrow:
                tensors = {n: t.to(dtype if n in half else torch.float32) for n, t in tensors.items()}
            return rwkv7(**tensors, lower_bound=bound, cu_seqlens=borders, backend=backend)

        return with_gradients(op, arguments)

    def in_tf32() -> dict[str, Any]:
        with DroppedBits():
            return run("reference", narrow=True)

    plain = in_tf32 if dtype == torch.float32 else None
    assert_same(run("fla", narrow=True), run("reference", narrow=False), tolerance, plain)


@pytest.mark.gpu
def test_fla_decodes() -> None:
    pytest.importorskip("fla")
    arguments = draw(T=9, K=64, V=64, device="cuda")
    expected, final = rwkv7(**arguments, backend="reference")
    single = {n: t.to(torch.float32 if n == "log_decay" else torch.bfloat16) for n, t in arguments.items()}
    state, outputs = None, []
    with torch.no_grad():
        for t in range(9):
            step = {n: tensor[:, t : t + 1] for n, tensor in single.items()}
            o, state = rwkv7(**step, initial_state=state, lower_bound=BOUND)
            outputs.append(o)
    assert state is not None
    assert relative_error(torch.cat(outputs, 1), expected) < 1e-2
    assert relative_error(state, final) < 1e-2


@pytest.mark.gpu
def test_fla_takes_long_sequences() -> None:
    pytest.importorskip("fla")
    T = 100_000
    arguments = draw(B=1, T=T, K=64, V=64, device="cuda")
    arguments = {n: t.to(torch.float32 if n == "log_decay" else torch.bfloat16) for n, t in arguments.items()}

    def run(**tensors: Any) -> tuple[Tensor, Tensor]:
        return rwkv7(**tensors, lower_bound=BOUND)

    found = with_gradients(run, arguments)
    assert all(t.isfinite().all() for t in found.values())
    with torch.no_grad():
        _, middle = run(**{n: t[:, : T // 2] for n, t in arguments.items()})
        o, last = run(**{n: t[:, T // 2 :] for n, t in arguments.items()}, initial_state=middle)
    assert relative_error(last, found["state"]) < 1e-2
    assert relative_error(o, found["o"][:, T // 2 :]) < 1e-2
