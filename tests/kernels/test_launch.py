"""Operators of Triton kernels run on the device of their tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqarch.kernels import gated_rms_norm, short_convolution, top1_chunk_attention
from seqarch.kernels.flops import none
from seqarch.kernels.launch import gradient_of, operator


def test_operators_run_on_the_device_of_their_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Tensor] = []

    @contextlib.contextmanager
    def device_of(t: Tensor) -> Iterator[None]:
        current.append(t)
        yield
        current.pop()

    @operator("seqarch_tests::add", lambda x, y, scale: torch.empty_like(x), flops=none)
    def add(x: Tensor, y: Tensor | None, scale: float) -> Tensor:
        assert [t.data_ptr() for t in current] == [x.data_ptr()]
        return x + scale if y is None else x + scale * y

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x, y = torch.ones(3), torch.arange(3.0)
    assert add(x, y, 2.0).tolist() == [1, 3, 5]
    assert add(x, None, scale=2.0).tolist() == [3, 3, 3]
    assert not current


class Zeros(TorchDispatchMode):
    """Notes the shapes of all tensors of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if "zeros" in str(func):
            self.shapes.append(tuple(found.shape))
        return found


@pytest.mark.parametrize(("used", "shapes"), [((0, 1), []), ((0,), [(4,)]), ((1,), [(3,)])])
def test_only_results_with_gradients_get_zeros(used: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
    """A result that has a gradient but no use gets zeros. What only the backward pass reads costs nothing."""
    name = f"scaled_{len(used)}_{used[0]}"

    @operator(f"seqarch_tests::{name}", lambda x, y: (*map(torch.empty_like, (x, y)), x.new_empty(5)), flops=none)
    def scaled(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return 2 * x, 3 * y, torch.ones(5)

    @gradient_of(scaled, gradients=2, outputs=2, keep=[2])
    def scaled_backward(dx: Tensor, dy: Tensor, x: Tensor, y: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        assert kept.tolist() == [1] * 5
        return 2 * dx, 3 * dy

    inputs = [torch.ones(size, requires_grad=True) for size in (3, 4)]
    results = scaled(*inputs)
    loss = torch.stack([results[n].sum() for n in used]).sum()
    with Zeros() as zeros:
        gradients = torch.autograd.grad(loss, inputs)
    assert zeros.shapes == shapes
    assert [grad.tolist() for grad in gradients] == [[2 * (0 in used)] * 3, [3 * (1 in used)] * 4]


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
