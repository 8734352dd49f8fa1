"""The parts of timing the selective scan that run without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from seqarch.bench import kernels_check, scan, timing
from seqarch.bench.kernels import COLUMNS, line, run_steps
from seqarch.bench.rows import Table
from seqarch.kernels import selective_scan
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


def test_tensors_by_position_are_those_by_name() -> None:
    given = {name: t for name, t in inputs(1, 7, 5, 4, "full").items() if t is not None}
    expected, _ = scan.scan(given)
    assert torch.equal(scan.positional(tuple(given))(*given.values())[0], expected)


def test_no_rows_without_correctness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "check", lambda: iter([True, False]))
    with pytest.raises(SystemExit, match="1 of 2 checks failed"):
        next(scan.rows())


@pytest.mark.parametrize(("factor", "held"), [(1.0, True), (1.001, False), (float("nan"), False)])
def test_checks_can_fail(monkeypatch: pytest.MonkeyPatch, capsys, factor: float, held: bool) -> None:
    def small(B: int, T: int, d: int, dtype: torch.dtype, decay: str) -> dict[str, torch.Tensor]:
        return {name: t for name, t in inputs(1, 5, 3, 4, decay, dtype=dtype).items() if t is not None}

    def op(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        wrong = 1.0 if options.get("backend") == "reference" else factor
        y, state = selective_scan(**{**options, "backend": "reference"})
        return y, wrong * state

    monkeypatch.setattr(scan, "draw", small)
    monkeypatch.setattr(scan, "selective_scan", op)
    monkeypatch.setattr(kernels_check, "poison", lambda: None)
    monkeypatch.setattr(scan, "TOLERANCE", {torch.float32: 1e-4})
    assert list(scan.check()) == [held] * 6
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("ok   scan decay" if held else "FAIL scan decay") for line in lines)
    assert "y, state, dx, ddt" in lines[0]


def test_rows_are_those_of_the_other_ops(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def small(B: int, T: int, d: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: t for name, t in inputs(1, 5, 3, 4, "full", dtype=dtype).items() if t is not None}

    def measure(name: str, fn: Callable[[], Any], **shape: int) -> dict[str, Any]:
        fn()
        return {"name": name, **shape, "p20": 1.0, "p50": 2.0, "p80": 3.0, "unit": "ms", "peak_mib": 4.0}

    monkeypatch.setattr(scan, "draw", small)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(scan, "SHAPES", ((1, 5, 3),))
    monkeypatch.setattr(scan, "check", lambda: iter([True]))
    rows = list(scan.rows())
    passes = [f"{name} {each}" for name in ("scan", "scan, dt in bf16") for each in ("fwd", "fwd+bwd")]
    assert [row["name"] for row in rows][:4] == passes
    assert all(set(row) <= set(COLUMNS) for row in rows)
    assert {(row["H"], row["D"]) for row in rows} == {(3, scan.STATES)}
    run_steps({"scan": iter(rows)}, Table(COLUMNS, line=line))
    assert "T=5 H=3 D=16" in capsys.readouterr().out
