"""The selective scan: the pieces against the recurrence, the recurrence against its definition, and refusals."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels import selective_scan
from seqarch.kernels.selective_scan import op as reference
from tests.kernels import naive
from tests.kernels.scan_inputs import DECAYS, draw, leaves, recurrent


@pytest.mark.parametrize("decay", DECAYS)
def test_recurrence_is_the_unrolled_sum(decay: str) -> None:
    inputs = draw(2, 7, 3, 4, decay)
    x, dt, B, C = (inputs[name] for name in ("x", "dt", "B", "C"))
    log = {"full": lambda t: dt[:, t, :, None] * inputs["A"], "one": lambda t: inputs["log_decay"][:, t, None, None]}
    y = x * inputs["D"]
    for i in range(7):
        for j in range(i + 1):
            total: Any = sum((log.get(decay, lambda _: 0)(t) for t in range(j + 1, i + 1)), torch.zeros(2, 3, 4))
            weight = (C[:, i, None] * B[:, j, None] * total.exp()).sum(-1)
            y[:, i] = y[:, i] + weight * dt[:, j] * x[:, j]
    naive.assert_close(recurrent(inputs)[0], y)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [1, 2, 64, 150])
def test_pieces_are_the_recurrence(decay: str, T: int) -> None:
    inputs = draw(2, T, 5, 4, decay)
    state = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    actual, expected = selective_scan(**inputs, initial_state=state), recurrent(inputs, state)
    _assert_same(actual, expected, [*leaves(inputs), state])


def _assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tensors: list[Tensor]) -> None:
    """Outputs, final states and gradients through both."""
    naive.assert_close(actual[1], expected[1], name="final state")
    weight = torch.linspace(-1, 1, expected[1].numel(), dtype=torch.float64).view_as(expected[1])
    joined = [y + (h * weight).sum() for y, h in (actual, expected)]
    naive.assert_same_gradients(joined[0], joined[1], tensors)


def test_pieces_are_cut_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(1, 50, 5, 4, "full")
    expected = recurrent(inputs)[0]
    monkeypatch.setattr(reference, "PIECE_ELEMENTS", 5 * 4 * 16)
    assert [piece.stop - piece.start for piece in reference._pieces(inputs["x"], 4)] == [16, 16, 16, 2]
    naive.assert_same_gradients(selective_scan(**inputs)[0], expected, leaves(inputs))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("given", [False, True])
def test_packed_documents(decay: str, given: bool) -> None:
    inputs = draw(1, 83, 5, 4, decay)
    borders = torch.tensor([0, 1, 40, 40, 83], dtype=torch.int32)
    initial = torch.randn(4, 5, 4, dtype=torch.float64, requires_grad=True) if given else None
    packed = selective_scan(**inputs, initial_state=initial, cu_seqlens=borders)
    outputs, states = [], []
    for n, (a, b) in enumerate([(0, 1), (1, 40), (40, 40), (40, 83)]):
        state = None if initial is None else initial[n : n + 1]
        if a == b:
            states.append(torch.zeros(1, 5, 4, dtype=torch.float64) if state is None else state)
            continue
        piece: dict[str, Any] = {k: v if k in ("A", "D") or v is None else v[:, a:b] for k, v in inputs.items()}
        y, h = recurrent(piece, state)
        outputs.append(y)
        states.append(h)
    expected = torch.cat(outputs, 1), torch.cat(states)
    _assert_same(packed, expected, leaves(inputs) + ([] if initial is None else [initial]))


@pytest.mark.parametrize("decay", DECAYS)
def test_two_halves_are_the_whole(decay: str) -> None:
    inputs = draw(2, 30, 5, 4, decay)
    whole = selective_scan(**inputs)
    outputs, state = [], None
    for a, b in ((0, 17), (17, 18), (18, 30)):
        piece: dict[str, Any] = {k: v if k in ("A", "D") or v is None else v[:, a:b] for k, v in inputs.items()}
        y, state = selective_scan(**piece, initial_state=state)
        outputs.append(y)
    assert state is not None
    _assert_same((torch.cat(outputs, 1), state), whole, leaves(inputs))


@pytest.mark.parametrize("decay", DECAYS)
def test_float32_is_exact_to_rounding(decay: str) -> None:
    inputs = draw(2, 150, 5, 4, decay)
    narrow: dict[str, Any] = {k: None if v is None else v.detach().float().requires_grad_() for k, v in inputs.items()}
    results = []
    for each in (narrow, inputs):
        y, state = selective_scan(**each)
        results.append((y, state, *torch.autograd.grad(y.sum() + state.sum(), leaves(each))))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == torch.float32
        naive.assert_close(actual, expected, 1e-6)


@pytest.mark.parametrize("decay", ["full", "one"])
def test_strong_decay_forgets(decay: str) -> None:
    """Decays below the smallest number leave only the last token, with finite gradients."""
    inputs: dict[str, Any] = {
        k: v.detach() for k, v in draw(1, 200, 3, 4, decay, dtype=torch.float32).items() if v is not None
    }
    inputs["dt"] = inputs["dt"] + 300
    if decay == "one":
        inputs["log_decay"] = inputs["log_decay"] - 300
    else:
        inputs["A"] = inputs["A"] - 1
    inputs = {k: v.requires_grad_() for k, v in inputs.items()}
    y, _ = selective_scan(**{"A": None, **inputs})
    x, dt, B, C = (inputs[name] for name in ("x", "dt", "B", "C"))
    naive.assert_close(y, x * (inputs["D"] + dt * (B * C).sum(-1, keepdim=True)), 1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), list(inputs.values())))


def test_half_precision_keeps_a_float32_state() -> None:
    inputs = draw(1, 40, 5, 4, "full", dtype=torch.float32)
    expected = selective_scan(**inputs)
    half: dict[str, Any] = {k: v.bfloat16() if k in ("x", "B", "C") else v for k, v in inputs.items()}
    for y, state in (selective_scan(**half), _under_autocast(inputs)):
        assert y.dtype == torch.bfloat16
        assert state.dtype == torch.float32
        naive.assert_close(y, expected[0], 1e-2)
        naive.assert_close(state, expected[1], 1e-2)


def _under_autocast(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return selective_scan(**inputs)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_breaks() -> None:
    inputs = draw(1, 20, 5, 4, "one")
    compiled = torch.compile(lambda inputs: selective_scan(**inputs), fullgraph=True, backend="aot_eager")
    _assert_same(compiled(inputs), selective_scan(**inputs), leaves(inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dt": torch.ones(1, 4, 6)}, "dt must have shape"),
        ({"C": torch.ones(1, 4, 3)}, "C must have shape"),
        ({"A": torch.ones(5, 3)}, r"A must have shape \[d, N\] = \[5, 4\]"),
        ({"D": torch.ones(4)}, r"D must have shape \[d\] = \[5\]"),
        ({"A": None, "log_decay": torch.ones(1, 5)}, r"log_decay must have shape \[B, T\] = \[1, 4\]"),
        ({"log_decay": torch.ones(1, 4)}, "two ways to decay"),
        ({"x": torch.ones(1, 4, 5).bfloat16()}, "must be of dtype torch.bfloat16"),
        ({"initial_state": torch.ones(2, 5, 4)}, r"initial_state must have shape \[rows, d, N\] = \[1, 5, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens must be int32"),
        ({"backend": "cuda"}, "unknown backend 'cuda'"),
        ({"backend": "triton"}, "the tensors are on cpu, not on a CUDA device"),
    ],
)
def test_refusals(change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    inputs: dict[str, Any] = {k: v.float() for k, v in draw(1, 4, 5, 4, "full").items() if v is not None}
    with pytest.raises(UserError, match=message):
        selective_scan(**{**inputs, **change})


@pytest.mark.skipif(importlib.util.find_spec("mamba_ssm") is not None, reason="mamba-ssm is installed")
def test_a_missing_kernel_is_said() -> None:
    inputs: dict[str, Any] = {k: v.float() for k, v in draw(1, 4, 5, 4, "full").items() if v is not None}
    with pytest.raises(UserError, match="pip install mamba-ssm"):
        selective_scan(**inputs, backend="mamba_ssm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A": None}, "it takes only decays by A"),
        ({"initial_state": torch.ones(1, 5, 4)}, "takes neither initial_state nor cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}, "takes neither initial_state nor cu_seqlens"),
    ],
)
def test_what_the_cuda_kernel_cannot_do(change: dict[str, Any], message: str) -> None:
    inputs: dict[str, Any] = draw(1, 4, 5, 4, "full", dtype=torch.float32)
    with pytest.raises(UserError, match=message):
        selective_scan(**{**inputs, **change}, backend="mamba_ssm")
