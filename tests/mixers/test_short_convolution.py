"""The short convolution is `nn.Conv1d` with one group per channel, however the sequence is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.mixers.delta_net import DeltaNet
from seqarch.mixers.mamba1 import Mamba1
from seqarch.mixers.short_convolution import ShortConvolution, optional_convolution

LENGTHS = (1, 2, 3, 4, 13, 37)


def build(kernel_size: int = 4, *, bias: bool = True, activation: Any = "silu") -> ShortConvolution:
    torch.manual_seed(0)
    return ShortConvolution(6, kernel_size, bias=bias, activation=activation).double()


def draw(length: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(batch, length, 6, generator=generator, dtype=torch.float64).requires_grad_()


def published(layer: ShortConvolution) -> nn.Conv1d:
    """A causal `nn.Conv1d` with the same weights."""
    size = layer.kernel_size
    conv = nn.Conv1d(6, 6, size, groups=6, padding=size - 1, bias=layer.bias is not None).double()
    conv.weight.data.copy_(layer.weight[:, None])
    if conv.bias is not None and layer.bias is not None:
        conv.bias.data.copy_(layer.bias)
    return conv


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kernel_size", [2, 3, 4])
@pytest.mark.parametrize(("bias", "activation"), [(True, "silu"), (False, None)])
def test_is_a_depthwise_convolution(length: int, kernel_size: int, bias: bool, activation: str | None) -> None:
    layer, x = build(kernel_size, bias=bias, activation=activation), draw(length)
    conv = published(layer)
    expected = conv(x.mT)[..., :length].mT
    expected = F.silu(expected) if activation else expected
    torch.testing.assert_close(layer(x), expected)
    dy = torch.randn_like(expected)
    ours = torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
    theirs = torch.autograd.grad(expected, [x, *conv.parameters()], dy)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.view_as(a))


@pytest.mark.parametrize("pieces", [[1] * 13, [2, 1, 7, 3], [12, 1], [1, 12]])
def test_pieces_are_the_whole(pieces: list[int]) -> None:
    layer, x = build(), draw(13)
    state = layer.init_state(2, "cpu", torch.float64)
    y = torch.cat([layer(piece, state=state) for piece in x.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(y, layer(x))
    torch.testing.assert_close(state.last, x[:, -3:])
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
    for a, b in zip(torch.autograd.grad(y, [x, *layer.parameters()], dy), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_the_state_is_small_and_starts_as_zero() -> None:
    layer = build()
    state = layer.init_state(2, "cpu", torch.bfloat16)
    assert not state.last.any()
    assert state.last.nbytes == 2 * 3 * 6 * 2
    state = layer.init_state(2, "cpu", torch.float64)
    layer(draw(100), state=state)
    assert state.last.untyped_storage().nbytes() == 2 * 3 * 6 * 8


@pytest.mark.parametrize("documents", [[13], [1, 2, 3, 7], [5, 0, 8], [1] * 13])
def test_nothing_crosses_a_border(documents: list[int]) -> None:
    layer, x = build(), draw(13, batch=1)
    borders = torch.tensor([0, *documents]).cumsum(0, dtype=torch.int32)
    expected = torch.cat([layer(piece) for piece in x.split(documents, dim=1) if piece.shape[1]], dim=1)
    packed = layer(x, cu_seqlens=borders)
    torch.testing.assert_close(packed, expected)
    dy = torch.randn_like(packed)
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], dy)
    for a, b in zip(torch.autograd.grad(packed, [x, *layer.parameters()], dy), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_initial_values_are_those_of_conv1d() -> None:
    torch.manual_seed(0)
    layer, conv = ShortConvolution(5000, 4, bias=True), nn.Conv1d(5000, 5000, 4, groups=5000)
    assert conv.bias is not None
    assert layer.bias is not None
    for ours, theirs in ((layer.weight, conv.weight), (layer.bias, conv.bias)):
        assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=1e-2)
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=3e-2)


def test_half_precision_stays() -> None:
    layer, x = build().bfloat16(), draw(13).detach().bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), layer.double()(x.double()), rtol=2e-2, atol=2e-2)


def test_the_state_keeps_its_dtype() -> None:
    convolution = ShortConvolution(3)
    state = convolution.init_state(2, "cpu", torch.bfloat16)
    x = torch.randn(2, 5, 3)
    assert convolution(x, state=state).dtype == torch.float32
    assert state.last.dtype == torch.bfloat16
    assert torch.equal(state.last, x[:, -3:].bfloat16())


def test_refusals() -> None:
    with pytest.raises(UserError, match="at least 2, not 1"):
        ShortConvolution(6, 1)
    with pytest.raises(UserError, match="activation must be silu or null, not relu"):
        build(activation="relu")
    layer = build()
    with pytest.raises(UserError, match="cu_seqlens"):
        layer(draw(3, 1), state=layer.init_state(1, "cpu", torch.float64), cu_seqlens=torch.tensor([0, 3]).int())


@pytest.mark.parametrize("options", [{"bias": True}, {"bias": False, "activation": None}])
def test_queries_keys_and_values_need_silu_and_no_bias(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="convolved without bias and with SiLU"):
        build(**options).qkv(draw(3), 1, 2)


@pytest.mark.parametrize(
    "mixer", [Mamba1(8, 0, 1, backend="reference"), DeltaNet(8, 0, 1, n_heads=2, backend="reference")], ids=str
)
def test_the_reference_of_a_mixer_is_that_of_its_convolution(mixer: Mamba1 | DeltaNet) -> None:
    assert mixer.convolution is not None
    assert mixer.convolution.backend == "reference"
    assert optional_convolution(8, None, True, backend="fla").backend == "auto"  # pyright: ignore[reportOptionalMemberAccess]


def test_flops() -> None:
    assert build().flops_per_token() == 2 * 4 * 6
