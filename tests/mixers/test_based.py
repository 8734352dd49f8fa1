"""Based and its kinds of layers keep the contract and equal the published ones."""

from __future__ import annotations

import copy
import importlib
import math
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from seqarch.errors import UserError
from seqarch.mixers.attention import Attention
from seqarch.mixers.based import Based, GatedConvolution, TaylorLinearAttention, based_kind
from seqarch.testing import MixerSuite
from tests.kernels.precision import TF32_TOLERANCE, assert_near_float64
from tests.mixers.short_chunks import TRACED, ShortChunks

reference = importlib.import_module("seqarch.kernels.taylor_attention")  # a function has its name


class TestTaylorLinearAttention(ShortChunks):
    reference = reference
    mixer = TaylorLinearAttention
    options: ClassVar = [{"n_heads": 4, "feature_dim": 6}, {"n_heads": 2, "feature_dim": 3}]


class TestGatedConvolution(MixerSuite):
    mixer = GatedConvolution
    options: ClassVar = [{}, {"conv_size": 5, "expand": 3, "bias": False}]


class BasedConvolution(Based):
    """The suite's layer 1 as the layer before it."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **options: Any) -> None:
        super().__init__(d_model, layer_idx - 1 if layer_idx < n_layers else layer_idx, n_layers, **options)


class BasedWindow(Based):
    """The suite's layer 1 as the layer after it."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, **options: Any) -> None:
        super().__init__(d_model, layer_idx + 1, n_layers, **options)


class TestBased(ShortChunks):
    reference = reference
    mixer = Based
    compile_options: ClassVar = TRACED
    options: ClassVar = {"n_heads": 2, "feature_dim": 4}


class TestBasedConvolution(MixerSuite):
    mixer = BasedConvolution
    compiles = False  # the layer inside does, and `Based` with another one
    options: ClassVar = {"n_heads": 2}


class TestBasedWindow(MixerSuite):
    mixer = BasedWindow
    compiles = False  # as above
    options: ClassVar = {"n_heads": 2, "window": 5}


def kinds(n_layers: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for layer in range(n_layers):
        found.setdefault(based_kind(layer, n_layers), []).append(layer)
    return found


def test_layers_stand_where_the_published_model_has_them() -> None:
    """train/configs/experiment/reference/based-360m.yaml: alt_mixer_layers, alt_mixer_2_layers."""
    published = kinds(27)
    assert published["linear"] == [1, 6, 11, 16, 21]
    assert published["window"] == [2, 7, 12, 17, 22]
    assert {kind: len(layers) for kind, layers in kinds(15).items()} == {"convolution": 9, "linear": 3, "window": 3}
    assert kinds(4) == {"convolution": [0, 3], "linear": [1], "window": [2]}
    assert kinds(7)["convolution"] == [0, 3, 4, 5, 6]


def test_each_layer_is_its_kind_with_its_options() -> None:
    options: dict[str, Any] = {"n_heads": 4, "window": 7, "feature_dim": 5, "conv_size": 4, "expand": 3}
    convolution, linear, window = (Based(32, layer, 15, **options).layer for layer in range(3))
    assert isinstance(convolution, GatedConvolution)
    assert convolution.convolution.weight.shape == (96, 4)
    assert isinstance(linear, TaylorLinearAttention)
    assert (linear.n_heads, linear.key_dim) == (4, 5)
    assert isinstance(window, Attention)
    assert (window.n_heads, window.attend.core.window) == (4, 7)  # pyright: ignore[reportAttributeAccessIssue]
    assert [Based(32, layer, 15, **options).implied for layer in range(3)] == [True, True, False]


def test_linear_attention_equals_the_published_layer_of_fla() -> None:
    layers = pytest.importorskip("fla.layers")
    torch.manual_seed(0)
    layer = layers.BasedLinearAttention(hidden_size=32, feature_dim=4, num_heads=2, num_key_value_heads=2)
    x = torch.randn(2, 70, 32)
    torch.testing.assert_close(with_weights_of(layer)(x), layer.forward_reference(x))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, TF32_TOLERANCE), (torch.bfloat16, 2e-2)])
def test_linear_attention_equals_the_published_layer_on_a_gpu(dtype: torch.dtype, ratio: float) -> None:
    layers = pytest.importorskip("fla.layers")
    torch.manual_seed(0)
    layer = layers.BasedLinearAttention(hidden_size=256, feature_dim=16, num_heads=4, num_key_value_heads=4)
    layer = layer.to("cuda", dtype)
    ours = with_weights_of(layer)
    plain = with_weights_of(layer, backend="reference")
    x = torch.randn(2, 300, 256, device="cuda", dtype=dtype)
    weight = torch.randn(2, 300, 256, device="cuda")

    def run(module: Any, dtype: torch.dtype = dtype) -> dict[str, torch.Tensor]:
        leaf = x.detach().to(dtype).requires_grad_()
        y = module(leaf)
        return {"y": y, "x": torch.autograd.grad((y * weight).sum(), leaf)[0]}

    mine = run(ours)
    assert_near_float64(mine, run(layer), ratio)
    exact = run(copy.deepcopy(plain).double(), torch.float64)
    assert_near_float64(mine, exact, ratio, (lambda: run(plain)) if dtype == torch.bfloat16 else None)


@torch.no_grad()
def with_weights_of(layer: Any, **options: Any) -> TaylorLinearAttention:
    weight = layer.o_proj.weight
    ours = TaylorLinearAttention(
        weight.shape[0], 1, 15, n_heads=layer.num_heads, feature_dim=layer.feature_dim, **options
    ).to(weight)
    ours.qkv.weight.copy_(torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
    ours.out.weight.copy_(weight)
    return ours


def test_gated_convolution_written_out() -> None:
    """based/models/mixers/convolution.py, BaseConv: the first half is convolved, the second is the gate."""
    torch.manual_seed(0)
    mixer = GatedConvolution(8, 0, 2).double()
    torch.nn.init.normal_(mixer.projection.bias)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    a, b = mixer.projection(x).split(16, dim=-1)
    a = F.conv1d(F.pad(a.mT, (2, 0)), mixer.convolution.weight[:, None], groups=16).mT
    torch.testing.assert_close(mixer(x), mixer.out(F.silu(a) * b))


def test_starts_as_published() -> None:
    """`_init_weights` of based/models/gpt.py with 15 layers; a depthwise `nn.Conv1d` of 3 taps."""
    torch.manual_seed(0)
    linear, convolution = (Based(768, layer, 15, n_heads=12).layer for layer in (1, 0))
    assert isinstance(linear, TaylorLinearAttention)
    assert isinstance(convolution, GatedConvolution)
    for layer, std in (
        (linear.qkv, 0.02),
        (linear.out, 0.02 / math.sqrt(30)),
        (convolution.projection, 0.02),
        (convolution.out, 0.02 / math.sqrt(30)),
    ):
        assert layer.weight.std().item() == pytest.approx(std, rel=0.01)
        assert layer.bias is None or not layer.bias.any()
    kernel = convolution.convolution.weight
    assert 0.99 * 3**-0.5 < kernel.abs().max() <= 3**-0.5
    assert kernel.std().item() == pytest.approx(1 / 3, rel=0.05)
    assert convolution.convolution.bias is None


def test_sizes() -> None:
    linear = TaylorLinearAttention(768, 1, 15, n_heads=12)
    assert sum(p.numel() for p in linear.parameters()) == 2 * 768 * 12 * 16 + 2 * 768**2
    features = 1 + 16 + 16 * 17 // 2
    assert linear.state_bytes(10) == 12 * features * 65 * 4
    convolution = GatedConvolution(768, 0, 15)
    assert sum(p.numel() for p in convolution.parameters()) == 6 * 768**2 + 3 * 1536 + 4 * 768 + 768
    assert convolution.state_bytes(10) == 2 * 1536 * 2


def test_entropy_of_linear_attention_is_that_of_its_weights() -> None:
    torch.manual_seed(0)
    mixer = TaylorLinearAttention(16, 1, 15, n_heads=2, feature_dim=4)
    torch.nn.init.normal_(mixer.qkv.weight)
    x = torch.randn(1, 70, 16)
    q, k, _ = mixer.qkv(x).split((8, 8, 16), dim=-1)
    s = 0.5 * torch.einsum("bihd,bjhd->bhij", q.unflatten(-1, (2, 4)), k.unflatten(-1, (2, 4)))
    weights = (1 + s + s**2 / 2).tril()
    p = weights / weights.sum(-1, keepdim=True)
    expected = -torch.xlogy(p, p).sum(-1).transpose(1, 2)
    torch.testing.assert_close(mixer.attention_entropy(x), expected, atol=1e-4, rtol=1e-4)


def test_entropy_of_a_convolution_is_that_of_its_taps() -> None:
    mixer = GatedConvolution(64, 0, 15)
    with torch.no_grad():
        mixer.convolution.weight.copy_(torch.tensor([0.0, -1.0, 1.0]))
        mixer.convolution.weight[2].copy_(torch.tensor([2.0, 1.0, 1.0]))
    entropy = mixer.attention_entropy(torch.randn(2, 5, 64))
    assert entropy.shape == (2, 5, 64)  # every second channel of 128
    torch.testing.assert_close(entropy[0, :, 0], torch.tensor([0, *4 * [math.log(2)]]))
    torch.testing.assert_close(entropy[1, :, 1], torch.tensor([0, math.log(2), *3 * [1.5 * math.log(2)]]))
    packed = mixer.attention_entropy(torch.randn(1, 5, 64), cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32))
    torch.testing.assert_close(packed[0, :, 0], math.log(2) * torch.tensor([0.0, 1, 1, 0, 1]))


def test_refusals() -> None:
    with pytest.raises(UserError, match="n_heads=5 does not divide d_model=32"):
        Based(32, 1, 15, n_heads=5)
    with pytest.raises(UserError, match="feature_dim must be at least 1"):
        TaylorLinearAttention(32, 1, 15, n_heads=4, feature_dim=0)
    with pytest.raises(UserError, match="expand must be at least 1"):
        GatedConvolution(32, 1, 15, expand=0)
    with pytest.raises(UserError, match="at least 2"):
        GatedConvolution(32, 1, 15, conv_size=1)
    for option, least in (("window", 1), ("feature_dim", 1), ("conv_size", 2), ("expand", 1)):
        wrong: dict[str, Any] = {option: least - 1}
        with pytest.raises(UserError, match=f"{option} must be at least {least}"):
            Based(32, 0, 1, n_heads=4, **wrong)
    with pytest.raises(UserError, match="unknown backend 'flaa'"):
        Based(32, 1, 15, n_heads=4, backend="flaa")  # pyright: ignore[reportArgumentType]
