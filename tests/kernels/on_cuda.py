"""Compares our kernels on a GPU with references in float64, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from seqarch.kernels import select_chunks, top1_chunk_attention
from tests.kernels import inputs


def draw(*sizes: int, HK: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Random q, k and v on the GPU that ask for gradients, q and k of unit length."""
    return list(inputs.attention(*sizes, HK=HK, normalised=True, dtype=dtype, device="cuda").values())


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, by norm; NaN stays NaN."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-3)).item()


def assert_within(actual: Iterable[Tensor], expected: Iterable[Tensor], bound: float) -> None:
    errors = [error(a, b) for a, b in zip(actual, expected, strict=True)]
    assert all(e < bound for e in errors), f"errors {' '.join(f'{e:.1e}' for e in errors)}, above {bound}"


def outputs_and_gradients(op: Callable[..., Any], tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Outputs and the gradients of their weighted sum. The weights are the same numbers in every dtype."""
    result = op(*tensors, **options)
    found = result if isinstance(result, tuple) else (result,)
    generator = torch.Generator(found[0].device).manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, device=t.device).bfloat16().to(t.dtype) for t in found]
    return [t.detach() for t in (*found, *torch.autograd.grad(found, tensors, weights))]


def assert_as_float64(op: Callable[..., Any], tensors: list[Tensor], bound: float, **options: Any) -> None:
    """Outputs and gradients of `op` are those of its reference in float64."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    found = outputs_and_gradients(op, tensors, options)
    if "alibi_slopes" in options:
        options = {**options, "alibi_slopes": options["alibi_slopes"].double()}
    assert_within(found, outputs_and_gradients(op, wide, {**options, "backend": "reference"}), bound)


def assert_selected_as_float64(tensors: list[Tensor], bound: float = 1e-2, **options: Any) -> None:
    """The selected chunks, and the attention to them. Choices may differ if masses are equal within rounding."""
    q, k, _ = (t.detach() for t in tensors)
    chunks = select_chunks(q, k, backend="triton", **options)
    expected = select_chunks(q.double(), k.double(), backend="reference", **options)
    assert (chunks != expected).float().mean() < 2e-3
    assert torch.equal(chunks < 0, expected < 0)
    assert_as_float64(top1_chunk_attention, tensors, bound, chunks=chunks, backend="triton", **options)
