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


def test_rows_are_those_of_the_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(B: int, T: int, d: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: t for name, t in inputs(1, 5, 3, 4, "full", dtype=dtype).items() if t is not None}

    def measure(name: str, fn: Callable[[], Any], **shape: int) -> dict[str, Any]:
        fn()
        return {"name": name, **shape, "p20": 1.0, "p50": 2.0, "p80": 3.0, "unit": "ms", "peak_mib": 4.0}

    monkeypatch.setattr(scan, "draw", small)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(scan, "SHAPES", ((1, 5, 3),))
    rows = list(scan.rows())
    passes = [f"{name} {each}" for name in ("scan", "scan, dt in bf16") for each in ("fwd", "fwd+bwd")]
    assert [row["name"] for row in rows][:4] == passes
    assert all(set(row) <= set(COLUMNS) for row in rows)
    assert {(row["H"], row["D"]) for row in rows} == {(3, scan.STATES)}
