"""The bound for fla's float32 kernels is the error of products in TF32, and bf16 would exceed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqarch.kernels import rwkv6, rwkv7
from tests.kernels import inputs, test_delta_rule, test_rwkv6, test_rwkv7, test_ssd, test_taylor_attention
from tests.kernels.precision import TF32_TOLERANCE, DroppedBits, assert_near_float64, relative_errors

Run = Callable[[torch.dtype], dict[str, Tensor]]


def rwkv(module: Any, op: Any, **options: Any) -> Run:
    arguments = module.draw(T=200, K=64, V=64, **options)
    arguments["initial_state"] = test_rwkv6.state_for(arguments, 2)
    rounded = {name: t.float() for name, t in arguments.items()}
    return lambda dtype: test_rwkv6.with_gradients(op, {name: t.to(dtype) for name, t in rounded.items()})


def by_index(module: Any, tensors: list[Any]) -> Run:
    def run(dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
        return {str(index): t for index, t in enumerate(module.apply(leaves))}

    return run


def delta_rule(decay: float | None) -> Run:
    tensors = test_delta_rule.draw(300, B=2, H=4, K=96, V=192, decay=decay, dtype=torch.float32)
    return by_index(test_delta_rule, tensors)


def taylor_attention() -> Run:
    return by_index(test_taylor_attention, test_taylor_attention.draw(300, H=4, K=16, V=64, dtype=torch.float32))


def ssd() -> Run:
    sizes: dict[str, Any] = test_ssd.CUDA_SHAPE
    arguments = inputs.ssd(**sizes, G=2, dtype=torch.float32)
    return lambda dtype: test_ssd.results(arguments if dtype == torch.float32 else test_ssd.widened(arguments))


CASES = {
    "rwkv6": lambda: rwkv(test_rwkv6, rwkv6, strength=0.5),
    "rwkv7": lambda: rwkv(test_rwkv7, rwkv7),
    "delta_rule": lambda: delta_rule(None),
    "delta_rule-decay": lambda: delta_rule(0.1),
    "taylor_attention": taylor_attention,
    "ssd": ssd,
}


@pytest.mark.parametrize("case", CASES)
def test_the_bound_is_that_of_products_in_tf32(case: str) -> None:
    run = CASES[case]()
    exact = run(torch.float64)

    def worst(bits: int | None) -> float:
        if bits is None:
            return max(relative_errors(run(torch.float32), exact).values())
        with DroppedBits(bits):
            return max(relative_errors(run(torch.float32), exact).values())

    assert worst(None) < 1e-5
    assert 1e-3 < worst(10) <= TF32_TOLERANCE
    assert worst(7) > 2 * TF32_TOLERANCE


@pytest.mark.parametrize("borders", [None, [0, 5, 260, 600]])
def test_decays_of_fla_in_tf32_are_further_off(borders: list[int] | None) -> None:
    sizes: dict[str, Any] = {**test_ssd.CUDA_SHAPE, "B": 1 if borders else 2}
    arguments = inputs.ssd(**sizes, dtype=torch.float32)
    options = {"cu_seqlens": torch.tensor(borders, dtype=torch.int32)} if borders else {}
    wide = test_ssd.widened(arguments)
    exact = test_ssd.results(wide, **options, backend="reference")
    assert max(relative_errors(test_ssd.as_fla_in_tf32(wide, **options), exact).values()) < 1e-12
    errors = relative_errors(test_ssd.as_fla_in_tf32(arguments, **options), exact)
    assert errors.pop("dA") > 4 * TF32_TOLERANCE
    assert max(errors.values()) <= TF32_TOLERANCE


def test_ten_bits_are_tf32() -> None:
    x = torch.tensor([[1.0, 1 + 2**-10, 1 + 2**-11, -1 - 2**-10 - 2**-11]])
    with DroppedBits():
        found = torch.eye(4) @ x.T
    assert found.flatten().tolist() == [1, 1 + 2**-10, 1, -1 - 2**-10]


def test_a_cancelling_sum_may_be_as_far_off_as_in_plain_pytorch() -> None:
    exact = {"y": torch.ones(4), "bonus": torch.ones(4)}

    def off(error: float) -> dict[str, Tensor]:
        return {"y": torch.ones(4), "bonus": torch.full((4,), 1 + error)}

    def unused() -> dict[str, Tensor]:
        raise AssertionError("not needed")

    assert_near_float64(off(0.03), exact, 0.04, unused)
    assert_near_float64(off(0.066), exact, 0.04, lambda: off(0.06))
    for found, plain in ((0.066, 0.05), (0.25, 0.3), (float("nan"), 0.1), (0.066, float("nan"))):
        with pytest.raises(AssertionError, match=r"above 0\.04: bonus off by"):
            assert_near_float64(off(found), exact, 0.04, lambda plain=plain: off(plain))
    with pytest.raises(AssertionError, match="bonus off by"):
        assert_near_float64(off(0.066), exact, 0.04)
