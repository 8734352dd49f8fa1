"""What of the timing of the selective scan runs without a GPU."""

from __future__ import annotations

import pytest
import torch

from seqarch.bench import scan
from seqarch.errors import UserError
from tests.kernels.scan_inputs import draw


def test_the_cuda_kernel_gets_time_last() -> None:
    inputs = {name: t.detach() for name, t in draw(2, 7, 5, 4, "full", dtype=torch.float32).items() if t is not None}
    inputs["x"] = inputs["x"].bfloat16()
    x, dt, A, B, C, D = scan.cuda_arguments(inputs)
    assert [t.shape for t in (x, dt, B, C)] == [(2, 5, 7), (2, 5, 7), (2, 1, 4, 7), (2, 1, 4, 7)]
    assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in (x, dt, B, C))
    assert all(t.dtype == torch.float32 for t in (A, D))
    assert all(t.requires_grad and t.is_leaf for t in (x, dt, A, B, C, D))
    assert torch.equal(x[1, 2], inputs["x"][1, :, 2])


def test_tensors_by_position_are_those_by_name() -> None:
    inputs = {name: t for name, t in draw(1, 7, 5, 4, "full").items() if t is not None}
    expected, _ = scan.scan(inputs)
    assert torch.equal(scan._positional(tuple(inputs))(*inputs.values()), expected)


def test_errors_name_every_tensor() -> None:
    inputs = {name: t for name, t in draw(1, 7, 5, 4, "one").items() if t is not None}
    errors = scan._errors(inputs, inputs)
    assert errors.keys() == {"y", "state", *(f"d{name}" for name in inputs)}
    assert max(errors.values()) < 1e-12


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(UserError, match="NVIDIA GPU"):
        next(scan.rows())
