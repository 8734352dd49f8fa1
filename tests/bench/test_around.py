"""The parts of timing convolutions and norms that run without a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.kernels import around
from seqarch.bench import timing
from seqarch.kernels import qkv_convolution


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    original = around.tensors_of
    for name, value in (("HEAD", 8), ("DEVICE", "cpu")):
        monkeypatch.setattr(around, name, value)
    monkeypatch.setitem(around.OURS, "qkv convolution", (partial(qkv_convolution, n_heads=2, key_dim=16), 96))
    monkeypatch.setattr(around, "tensors_of", lambda name, B, T, C: original(name, 2, 64, 96))


@pytest.mark.usefixtures("small")
def test_rows_of_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda name, fn, **shape: (fn(), {"name": name, **shape, "p50": 1.0})[1])
    monkeypatch.setattr(torch, "compile", lambda op: op)
    monkeypatch.setattr(around, "published", lambda name: {"other": around.OURS[name][0]})
    ways = ("seqarch", "PyTorch, compiled", "other")
    expected = [f"{name}, {way} {run}" for name in around.OURS for way in ways for run in ("fwd", "fwd+bwd")]
    assert [row["name"] for row in around.rows()] == expected
