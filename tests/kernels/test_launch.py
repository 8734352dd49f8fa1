"""Operators of Triton kernels run on the device of their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from seqarch.kernels import flops, gated_rms_norm, short_convolution, top1_chunk_attention
from seqarch.kernels.launch import operator


def test_operators_run_on_the_device_of_their_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Tensor] = []

    @contextlib.contextmanager
    def device_of(t: Tensor) -> Iterator[None]:
        current.append(t)
        yield
        current.pop()

    monkeypatch.setitem(flops.FORMULAS, "add", flops.none)

    @operator("seqarch_tests::add", lambda x, y, scale: torch.empty_like(x))
    def add(x: Tensor, y: Tensor | None, scale: float) -> Tensor:
        assert [t.data_ptr() for t in current] == [x.data_ptr()]
        return x + scale if y is None else x + scale * y

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x, y = torch.ones(3), torch.arange(3.0)
    assert add(x, y, 2.0).tolist() == [1, 3, 5]
    assert add(x, None, scale=2.0).tolist() == [3, 3, 3]
    assert not current


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_on_another_gpu_than_the_current_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(2, 300, 4, 64, generator=generator) for _ in range(3))
    weight = torch.randn(256, 4, generator=generator)

    def run(device: str) -> list[Tensor]:
        leaves = [t.to(device).requires_grad_() for t in (x, y, z, weight)]
        q, k, v, w = leaves
        outputs = (
            top1_chunk_attention(q, k, v, chunk_size=64),
            short_convolution(q.flatten(2), w, activation="silu"),
            gated_rms_norm(q, k, w[:4, 0], v.flatten(2), w[:, 0]),
        )
        return [*outputs, *torch.autograd.grad([t.square().sum() for t in outputs], leaves)]

    assert torch.cuda.current_device() == 0
    for here, there in zip(run("cuda:0"), run("cuda:1"), strict=True):
        torch.testing.assert_close(there.cpu(), here.cpu(), rtol=1e-4, atol=1e-4)
