"""RWKV-6's recurrence: chunked against step by step, fla's kernels against both, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import rwkv6
from seqarch.kernels.rwkv import rwkv6_chunked, rwkv6_recurrent
from seqarch.testing.compare import relative_error
from tests.kernels import inputs
from tests.kernels.precision import TF32_TOLERANCE, assert_near_float64


def draw(B: int = 2, T: int = 70, *sizes: int, **options: Any) -> dict[str, Any]:
    return {name: t.detach() for name, t in inputs.rwkv6(B, T, *sizes, seed=T, **options).items()}


def state_for(arguments: dict[str, Any], documents: int | None = None) -> Tensor:
    B, _, H, K = arguments["k"].shape
    shape = (documents or B, H, K, arguments["v"].shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(arguments["k"])


def with_gradients(run, leaves: dict[str, Any]) -> dict[str, Any]:
    """Outputs of `run(**leaves)`, and the gradients of a fixed random sum of them."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    o, state = run(**leaves)
    generator = torch.Generator().manual_seed(9)
    loss = torch.zeros((), dtype=torch.float64, device=o.device)
    for t in (o, state):
        weights = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)
        loss = loss + (t.double() * weights).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "state": state, **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


def assert_same(
    actual: dict[str, Any],
    expected: dict[str, Any],
    tolerance: float = 1e-12,
    plain: Callable[[], dict[str, Any]] | None = None,
) -> None:
    assert all(actual[name].shape == value.shape for name, value in expected.items())
    assert_near_float64(actual, expected, tolerance, plain)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("strength", [0.5, 3.0])
def test_chunks_are_the_recurrence(length: int, strength: float) -> None:
    arguments = draw(T=length, strength=strength)
    arguments["initial_state"] = state_for(arguments)
    results = [with_gradients(op, arguments) for op in (rwkv6_recurrent, rwkv6_chunked)]
    assert_same(results[1], results[0])


def test_strong_decays_underflow_to_nothing_in_float32() -> None:
    arguments = {name: t.float() for name, t in draw().items()}
    arguments["log_decay"] = arguments["log_decay"].new_full((2, 70, 2, 8), -200.0)
    arguments["log_decay"][..., ::2] = -1e-4
    arguments["log_decay"][:, 30] = -1e30
    found = with_gradients(rwkv6, arguments)
    assert all(t.isfinite().all() for t in found.values())
    exact, _ = rwkv6_recurrent(**{n: t.double() for n, t in arguments.items()}, initial_state=None)
    assert relative_error(found["o"], exact) < 1e-6


def assert_scale_is_a_factor(op: Callable[..., tuple[Tensor, Tensor]], arguments: dict[str, Any]) -> None:
    o, state = op(**arguments)
    scaled, same = op(**arguments, scale=0.7)
    torch.testing.assert_close(scaled, 0.7 * o)
    torch.testing.assert_close(same, state)


@pytest.mark.parametrize("length", [1, 70])
def test_the_scale_is_a_factor_on_the_outputs(length: int) -> None:
    assert_scale_is_a_factor(rwkv6, draw(T=length))


def test_packed_documents_are_alone() -> None:
    arguments = draw(B=1, T=60)
    borders, lengths = torch.tensor([0, 7, 7, 8, 60], dtype=torch.int32), [7, 0, 1, 52]
    states = state_for(arguments, 4)

    def packed(initial_state: Tensor, **tensors: Any) -> tuple[Tensor, Tensor]:
        return rwkv6(**tensors, initial_state=initial_state, cu_seqlens=borders)

    def alone(initial_state: Tensor, bonus: Tensor, **tensors: Any) -> tuple[Tensor, Tensor]:
        pieces = [
            dict(zip(tensors, each, strict=True))
            for each in zip(*(t.split(lengths, 1) for t in tensors.values()), strict=True)
        ]
        outputs, finals = [], []
        for n, piece in enumerate(pieces):
            state = initial_state[n : n + 1]
            if lengths[n]:
                o, state = rwkv6_recurrent(**piece, bonus=bonus, initial_state=state)
                outputs.append(o)
            finals.append(state)
        return torch.cat(outputs, 1), torch.cat(finals)

    arguments["initial_state"] = states
    assert_same(with_gradients(packed, arguments), with_gradients(alone, arguments))


def test_halves_through_the_state_are_the_whole() -> None:
    arguments = draw()
    bonus = arguments.pop("bonus")
    first, second = (
        {n: part[i] for n, part in ((n, t.split([33, 37], 1)) for n, t in arguments.items())} for i in (0, 1)
    )
    o, state = rwkv6(**arguments, bonus=bonus)
    before, middle = rwkv6(**first, bonus=bonus)
    after, last = rwkv6(**second, bonus=bonus, initial_state=middle)
    torch.testing.assert_close(torch.cat((before, after), 1), o)
    torch.testing.assert_close(last, state)


def test_rwkv5_has_one_decay_for_all_positions() -> None:
    arguments = draw()
    decay = -torch.rand(2, 8, dtype=torch.float64)
    arguments["log_decay"] = decay.expand(2, 70, 2, 8)
    o, _ = rwkv6(**arguments)
    r, k, v, u = (arguments[name] for name in ("r", "k", "v", "bonus"))
    t = 40
    powers = torch.stack([torch.exp(decay * (t - 1 - j)) for j in range(t)] + [u])
    weights = torch.einsum("bhk,bjhk,jhk->bjh", r[:, t], k[:, : t + 1], powers)
    torch.testing.assert_close(o[:, t], torch.einsum("bjh,bjhv->bhv", weights, v[:, : t + 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    arguments = {n: t.to(torch.float32 if n in ("log_decay", "bonus") else dtype) for n, t in draw().items()}
    o, state = rwkv6(**arguments)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    step = {n: t if n == "bonus" else t[:, :1] for n, t in arguments.items()}
    o, state = rwkv6(**step, initial_state=state)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        o, state = rwkv6(**{n: t.float() for n, t in arguments.items()})
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 70, 2, 7, dtype=torch.float64)}, r"k must have shape \[B, T, H, K\] = \[2, 70, 2, 8\]"),
        ({"v": torch.zeros(2, 69, 2, 6, dtype=torch.float64)}, r"v must have shape \[B, T, H, V\] = \[2, 70, 2, V\]"),
        ({"r": torch.zeros(2, 70, 2, 8)}, "must be of dtype torch.float"),
        ({"log_decay": torch.zeros(2, 70, 2, 8)}, "log_decay must be of dtype torch.float64"),
        ({"bonus": torch.zeros(2, 7, dtype=torch.float64)}, r"bonus must have shape \[H, K\] = \[2, 8\]"),
        ({"initial_state": torch.zeros(2, 2, 6, 8)}, r"\[rows, H, K, V\] = \[2, 2, 8, 6\]"),
        ({"cu_seqlens": torch.tensor([0, 70], dtype=torch.int32)}, "needs B = 1"),
        ({"backend": "triton"}, "backend"),
        ({"backend": "fla"}, "fla"),
    ],
)
def test_refusals(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rwkv6(**(draw() | change))


def test_an_empty_sequence_is_refused() -> None:
    arguments = draw()
    with pytest.raises(UserError, match="T must be at least 1"):
        rwkv6(**{n: t if n == "bonus" else t[:, :0] for n, t in arguments.items()})


def test_fla_refuses_float64() -> None:
    with pytest.raises(UserError, match="it does not take float64"):
        rwkv6(**draw(), backend="fla")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance", "packed"),
    [(torch.bfloat16, 1e-2, False), (torch.bfloat16, 1e-2, True), (torch.float32, TF32_TOLERANCE, False)],
)
def test_fla_is_the_recurrence(dtype: torch.dtype, tolerance: float, packed: bool) -> None:
    pytest.importorskip("fla")
    arguments = draw(B=1 if packed else 2, T=200, K=64, V=64, strength=0.5, device="cuda")
    borders = torch.tensor([0, 77, 200], dtype=torch.int32, device="cuda") if packed else None
    arguments["initial_state"] = state_for(arguments, 2)
    # Both take the same rounded numbers.
    arguments = {n: t.to(dtype).double() if n in "rkv" else t.float().double() for n, t in arguments.items()}

    def run(backend: str) -> dict[str, Any]:
        def op(**tensors: Any) -> tuple[Tensor, Tensor]:
            if backend == "fla":
                tensors = {n: t.to(dtype if n in "rkv" else torch.float32) for n, t in tensors.items()}
            return rwkv6(**tensors, cu_seqlens=borders, backend=backend)

        return with_gradients(op, arguments)

    assert_same(run("fla"), run("reference"), tolerance)


@pytest.mark.gpu
def test_fla_decodes() -> None:
    pytest.importorskip("fla")
    arguments = draw(T=9, K=64, V=64, device="cuda")
    bonus = arguments.pop("bonus")
    expected, final = rwkv6(**arguments, bonus=bonus, backend="reference")
    single = {n: t.to(torch.float32 if n == "log_decay" else torch.bfloat16) for n, t in arguments.items()}
    state, outputs = None, []
    with torch.no_grad():
        for t in range(9):
            step = {n: tensor[:, t : t + 1] for n, tensor in single.items()}
            o, state = rwkv6(**step, bonus=bonus.float(), initial_state=state)
            outputs.append(o)
    assert state is not None
    assert relative_error(torch.cat(outputs, 1), expected) < 1e-2
    assert relative_error(state, final) < 1e-2


@pytest.mark.gpu
def test_fla_takes_long_sequences() -> None:
    pytest.importorskip("fla")
    T = 100_000
    arguments = {n: t.float() for n, t in draw(B=1, T=T, K=64, V=64, device="cuda").items()}
    arguments |= {n: arguments[n].bfloat16() for n in "rkv"}
    found = with_gradients(rwkv6, arguments)
    assert all(t.isfinite().all() for t in found.values())
    bonus = arguments.pop("bonus")
    with torch.no_grad():
        _, middle = rwkv6(**{n: t[:, : T // 2] for n, t in arguments.items()}, bonus=bonus)
        o, last = rwkv6(**{n: t[:, T // 2 :] for n, t in arguments.items()}, bonus=bonus, initial_state=middle)
    assert relative_error(last, found["state"]) < 1e-2
    assert relative_error(o, found["o"][:, T // 2 :]) < 1e-2
