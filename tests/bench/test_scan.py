"""The parts of timing the selective scan that run without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.kernels import scan
from seqarch.bench import timing
from seqarch.bench.kernels import COLUMNS
from tests.kernels.scan_inputs import draw as inputs


def test_the_cuda_kernel_gets_time_last() -> None:
    given = {name: t.detach() for name, t in inputs(2, 7, 5, 4, "full", dtype=torch.float32).items() if t is not None}
    given["x"] = given["x"].bfloat16()
    x, dt, A, B, C, D = scan.cuda_arguments(given)
    assert [t.shape for t in (x, dt, B, C)] == [(2, 5, 7), (2, 5, 7), (2, 1, 4, 7), (2, 1, 4, 7)]
    assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in (x, dt, B, C))
    assert all(t.dtype == torch.float32 for t in (A, D))
    assert all(t.requires_grad and t.is_leaf for t in (x, dt, A, B, C, D))
    assert torch.equal(x[1, 2], given["x"][1, :, 2])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a CPU, on which nothing is timed."""

    def measure(name: str, fn: Callable[[], Any], **shape: int) -> dict[str, Any]:
        fn()
        return {"name": name, **shape, "p20": 1.0, "p50": 2.0, "p80": 3.0, "unit": "ms", "peak_mib": 4.0}

    monkeypatch.setattr(timing, "measure", measure)
    sizes = {"DEVICE": "cpu", "LENGTHS": ((1, 5),), "CHANNELS": (8,), "CHECKED": (1, 70), "HEAD": 4}
    for name, value in {**sizes, "backends": lambda op: ["reference"]}.items():
        monkeypatch.setattr(scan, name, value)


@pytest.mark.usefixtures("small")
def test_rows_are_those_of_the_other_ops() -> None:
    rows = [*scan.rows(), *scan.of_heads()]
    names = ("scan", "scan, dt in bf16", "ssd by reference")
    assert [row["name"] for row in rows] == [f"{name} {each}" for name in names for each in ("fwd", "fwd+bwd")]
    assert all(set(row) <= set(COLUMNS) for row in rows)
    assert {(row["H"], row["D"]) for row in rows} == {(8, scan.STATES), (2, 4)}


@pytest.mark.usefixtures("small")
def test_errors_are_those_of_the_dtype() -> None:
    rows = list(scan.errors())
    off = {row["name"].removesuffix(f": {name}"): row["p50"] for row in rows if (name := row["name"][-1:]) == "y"}
    assert len(rows) == 2 * (1 + 6) + 2 * (1 + 5)
    assert all(set(row) <= set(COLUMNS) for row in rows)
    for op in ("selective_scan", "ssd"):
        assert off[f"{op} by reference, float32"] < 1e-5 < 1e-4 < off[f"{op} by reference, bfloat16"] < 1e-2
