"""The parts of timing convolutions and norms that run without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from seqarch.bench import around, kernels_check, timing
from seqarch.bench.kernels import COLUMNS, run_steps
from seqarch.bench.rows import Table
from seqarch.kernels import qkv_convolution


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    original = around.tensors_of
    monkeypatch.setattr(kernels_check, "poison", lambda: None)
    for name, value in (("HEAD", 8), ("DEVICE", "cpu")):
        monkeypatch.setattr(around, name, value)
    monkeypatch.setitem(around.OURS, "qkv convolution", (partial(qkv_convolution, n_heads=2, key_dim=16), 96))
    monkeypatch.setattr(around, "tensors_of", lambda name, B, T, C: original(name, 2, 64, 96))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("factor", "held"), [(1.0, True), (1.1, False), (float("nan"), False)])
def test_checks_can_fail(monkeypatch: pytest.MonkeyPatch, capsys: Any, factor: float, held: bool) -> None:
    ours = {name: (op, channels) for name, (op, channels) in around.OURS.items()}

    def wrong(op: Any) -> Any:
        def run(*tensors: torch.Tensor, backend: str = "auto") -> Any:
            scale = factor if backend == "auto" else 1.0
            return tuple(scale * t for t in timing.outputs(op, tensors, backend="reference"))

        return run

    monkeypatch.setattr(around, "OURS", {name: (wrong(op), channels) for name, (op, channels) in ours.items()})
    assert list(around.check()) == [held] * 3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0][5:] for line in lines] == list(ours)


@pytest.mark.usefixtures("small")
def test_rows_of_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda name, fn, **shape: (fn(), {"name": name, **shape, "p50": 1.0})[1])
    monkeypatch.setattr(torch, "compile", lambda op: op)
    monkeypatch.setattr(around, "published", lambda name: {"other": around.OURS[name][0]})
    table = Table(COLUMNS)
    run_steps({"around": around.rows()}, table)
    ways = ("seqarch", "PyTorch, compiled", "other")
    expected = [f"{name}, {way} {run}" for name in around.OURS for way in ways for run in ("fwd", "fwd+bwd")]
    assert [row["name"] for row in table.rows] == expected


def test_no_rows_without_correctness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(around, "check", lambda: iter([True, False]))
    with pytest.raises(SystemExit, match="1 of 2 checks failed"):
        next(around.rows())
