"""The implied entropy is the entropy of the unrolled recurrence's weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from seqarch.kernels import delta_rule
from seqarch.mixers.implied import implied_entropy


def gated_linear_recurrence(q: Tensor, k: Tensor, decay: Tensor, values: Tensor) -> Tensor:
    """`S_t = a_t S_{t-1} + k_t v_t^T`, `o_t = S_t^T q_t`, one step per token."""
    state = torch.zeros(*k[:, 0].shape, values.shape[-1], dtype=values.dtype)
    outputs = []
    for t in range(values.shape[1]):
        state = decay[:, t, :, None, None] * state + k[:, t, :, :, None] * values[:, t, :, None]
        outputs.append((q[:, t, :, :, None] * state).sum(dim=2))
    return torch.stack(outputs, dim=1)


def entropy(weights: Tensor) -> Tensor:
    """Entropy of the normalised absolute values along the last dimension."""
    p = weights.abs() / weights.abs().sum(dim=-1, keepdim=True)
    return -torch.xlogy(p, p).sum(dim=-1)


@pytest.mark.parametrize("columns", [1, 7, 20, 64])
def test_equals_the_entropy_of_the_unrolled_weights(columns: int) -> None:
    torch.manual_seed(0)
    B, T, H, K = 2, 20, 3, 4
    q, k = torch.randn(2, B, T, H, K, dtype=torch.float64)
    decay = torch.rand(B, T, H, dtype=torch.float64)
    # Token j reaches output i through the decays of j + 1 to i.
    products = decay.log().cumsum(dim=1)
    passed = (products[:, :, None] - products[:, None]).exp().permute(0, 3, 1, 2)
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * passed).tril()
    values = torch.randn(B, T, H, 5, dtype=torch.float64)
    actual = implied_entropy(lambda v: gated_linear_recurrence(q, k, decay, v), values, columns=columns)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, entropy(weights).transpose(1, 2).float(), atol=1e-6, rtol=1e-5)


def test_equal_keys_without_decay_weigh_all_tokens_alike() -> None:
    ones = torch.ones(1, 9, 2, 3)
    actual = implied_entropy(lambda v: gated_linear_recurrence(ones, ones, torch.ones(1, 9, 2), v), ones)
    torch.testing.assert_close(actual, torch.arange(1.0, 10).log()[None, :, None].expand(1, 9, 2))


def test_a_constant_decay_weighs_as_a_geometric_series() -> None:
    ones = torch.ones(1, 400, 1, 1, dtype=torch.float64)
    decay = torch.full((1, 400, 1), 0.5, dtype=torch.float64)
    actual = implied_entropy(lambda v: gated_linear_recurrence(ones, ones, decay, v), ones)
    assert actual[0, -1, 0].item() == pytest.approx(2 * math.log(2), abs=1e-6)


def test_the_delta_rule_with_one_key_keeps_the_last_token_alone() -> None:
    ones = torch.ones(1, 12, 1, 1, dtype=torch.float64)
    actual = implied_entropy(lambda v: delta_rule(ones, ones, v, ones[..., 0])[0], ones)
    torch.testing.assert_close(actual, torch.zeros(1, 12, 1))


def test_the_sign_and_size_of_weights_do_not_count() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 15, 2, 4)
    decay = torch.rand(1, 15, 2)

    def measure(scale: float) -> Tensor:
        return implied_entropy(lambda v: scale * gated_linear_recurrence(q, k, decay, v), q)

    torch.testing.assert_close(measure(-1e3), measure(1.0))


def test_no_weight_at_all_has_no_spread() -> None:
    values = torch.randn(1, 6, 2, 4)
    assert torch.equal(implied_entropy(torch.zeros_like, values), torch.zeros(1, 6, 2))
