"""RWKV-5 and RWKV-6 keep the contract, follow the published formulas and start from the published values.

The published code is github.com/BlinkDL/RWKV-LM, RWKV-v5/src/model.py, classes RWKV_Tmix_x052 and RWKV_Tmix_x060.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.kernels import chunks
from seqarch.mixers.base import Mixer
from seqarch.mixers.rwkv56 import RWKV5, RWKV6
from seqarch.testing.compare import relative_error
from seqarch.testing.harness import Inputs, MixerHarness
from tests.kernels.precision import TF32_TOLERANCE, assert_near_float64
from tests.mixers.gradients import outputs_and_gradients
from tests.mixers.rwkv import copy_all, stirred
from tests.mixers.short_chunks import TRACED, ShortChunks


class TestRWKV5(ShortChunks):
    reference = chunks
    mixer = RWKV5
    options: ClassVar = {"n_heads": 4}
    compiles = False  # RWKV-6 does, with the same op, and this decay is a parameter


class TestRWKV6(ShortChunks):
    reference = chunks
    mixer = RWKV6
    compile_options: ClassVar = TRACED
    options: ClassVar = [{"n_heads": 4}, {"n_heads": 2, "mix_rank": 3, "decay_rank": 5}]


def published_recurrence(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, H: int) -> Tensor:
    """The loop of cuda/wkv6_cuda.cu over `[B, T, C]` (that of wkv5_cuda.cu has the same w at every t)."""
    B, T, C = r.shape
    r, k, v, w = (t.view(B, T, H, C // H) for t in (r, k, v, w))
    state = torch.zeros(B, H, C // H, C // H, dtype=r.dtype)  # [key, value]
    y = torch.empty_like(v)
    for t in range(T):
        x = k[:, t, :, :, None] * v[:, t, :, None]
        y[:, t] = torch.einsum("bhi,bhij->bhj", r[:, t], u[..., None] * x + state)
        state = state * torch.exp(-torch.exp(w[:, t, :, :, None])) + x
    return y.view(B, T, C)


def published_output(mixer: Any, y: Tensor, g: Tensor) -> Tensor:
    B, T, C = y.shape
    normed = F.group_norm(y.view(B * T, C) / 8, mixer.n_heads, mixer.norm.weight, mixer.norm.bias, eps=1e-5)
    return mixer.output(normed.view(B, T, C) * g)


def test_rwkv5_is_the_published_formula() -> None:
    mixer = stirred(RWKV5).double()
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    xx = F.pad(x, (0, 0, 1, -1))
    mixes = {name: 1 - getattr(mixer, f"{name}_mix") for name in ("key", "value", "receptance", "gate")}
    k, v, r, g = (getattr(mixer, n)(x * time_mix + xx * (1 - time_mix)) for n, time_mix in mixes.items())
    y = published_recurrence(r, k, v, mixer.decay.flatten().expand(2, 11, 32), mixer.bonus, 4)
    torch.testing.assert_close(mixer(x), published_output(mixer, y, F.silu(g)))


def test_rwkv6_is_the_published_formula() -> None:
    mixer = stirred(RWKV6).double()
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    xx = F.pad(x, (0, 0, 1, -1)) - x
    # Our kinds have another order than the published w, k, v, r, g.
    order = [4, 1, 2, 0, 3]
    w1 = mixer.mix_down.weight.unflatten(0, (5, -1))[order].flatten(0, 1).T
    xxx = torch.tanh((x + xx * mixer.shift_mix) @ w1).view(2 * 11, 5, -1).transpose(0, 1)
    mw, mk, mv, mr, mg = torch.bmm(xxx, mixer.mix_up[order]).view(5, 2, 11, -1).unbind(0)
    r = mixer.receptance(x + xx * (mixer.receptance_mix + mr))
    k = mixer.key(x + xx * (mixer.key_mix + mk))
    v = mixer.value(x + xx * (mixer.value_mix + mv))
    g = F.silu(mixer.gate(x + xx * (mixer.gate_mix + mg)))
    xw = x + xx * (mixer.decay_mix + mw)
    w = mixer.decay.flatten() + torch.tanh(xw @ mixer.decay_down.weight.T) @ mixer.decay_up.weight.T
    y = published_recurrence(r, k, v, w, mixer.bonus, 4)
    torch.testing.assert_close(mixer(x), published_output(mixer, y, g))


@pytest.mark.parametrize("layer_idx", [0, 2])
@pytest.mark.parametrize("kind", [RWKV5, RWKV6])
def test_starts_from_the_published_values(kind: type[RWKV5] | type[RWKV6], layer_idx: int) -> None:
    C, layers = 96, 4
    mixer = kind(C, layer_idx, layers, n_heads=4)
    ratio_0_to_1, ratio_1_to_almost0 = layer_idx / (layers - 1), 1.0 - layer_idx / layers
    ddd = torch.tensor([i / C for i in range(C)])
    decay_speed = [-6 + 5 * (n / (C - 1)) ** (0.7 + 1.3 * ratio_0_to_1) for n in range(C)]
    time_faaaa = [ratio_0_to_1 * (1 - (n / (C - 1))) + ((n + 1) % 3 - 1) * 0.1 for n in range(C)]
    slow, fast = 1.0 - ddd**ratio_1_to_almost0, 1.0 - ddd ** (0.5 * ratio_1_to_almost0)
    torch.testing.assert_close(mixer.key_mix, slow)
    torch.testing.assert_close(mixer.value_mix, 1.0 - (ddd**ratio_1_to_almost0 + 0.3 * ratio_0_to_1))
    torch.testing.assert_close(mixer.receptance_mix, fast)
    torch.testing.assert_close(mixer.gate_mix, fast)
    torch.testing.assert_close(mixer.decay.flatten(), torch.tensor(decay_speed))
    torch.testing.assert_close(mixer.bonus.flatten(), torch.tensor(time_faaaa))
    torch.testing.assert_close(mixer.norm.weight, torch.full((C,), ((1 + layer_idx) / layers) ** 0.7))
    for layer, gain in ((mixer.receptance, 1), (mixer.key, 0.1), (mixer.value, 1), (mixer.gate, 0.1)):
        torch.testing.assert_close(layer.weight @ layer.weight.T, gain**2 * torch.eye(C), atol=1e-5, rtol=0)
    assert not mixer.output.weight.any()
    if isinstance(mixer, RWKV6):
        torch.testing.assert_close(mixer.decay_mix, slow)
        torch.testing.assert_close(mixer.shift_mix, slow)
        assert mixer.mix_down.weight.shape == (5 * 32, C)
        assert mixer.decay_down.weight.shape == (64, C)
        for down, up in ((mixer.mix_down, mixer.mix_up), (mixer.decay_down, mixer.decay_up.weight)):
            assert not down.weight.any()
            assert 0.009 < up.abs().max() <= 0.01


@pytest.mark.parametrize("kind", [RWKV5, RWKV6])
def test_weight_decay_takes_the_projections_alone(kind: type[RWKV5] | type[RWKV6]) -> None:
    mixer = kind(32, 0, 2, n_heads=4)
    decayed = {n for n, p in mixer.named_parameters() if p.dim() > 1 and not getattr(p, "_no_weight_decay", False)}
    assert decayed == {f"{name}.weight" for name in ("receptance", "key", "value", "gate", "output")}


@pytest.mark.parametrize("kind", [RWKV5, RWKV6])
def test_entropy_is_that_of_the_unrolled_recurrence(kind: type[RWKV5] | type[RWKV6]) -> None:
    mixer = stirred(kind).double()
    x = torch.randn(1, 7, 32, dtype=torch.float64)
    _, (r, k, log_decay), _ = mixer.project(x, None, None)
    expected = torch.zeros(7, 4)
    for head in range(4):
        for i in range(7):
            weights = torch.stack(
                [
                    (r[0, i, head] * k[0, j, head] * log_decay[0, j + 1 : i, head].sum(0).exp()).sum()
                    if j < i
                    else (r[0, i, head] * k[0, i, head] * mixer.bonus[head]).sum()
                    for j in range(i + 1)
                ]
            ).abs()
            expected[i, head] = torch.special.entr(weights / weights.sum()).sum()
    torch.testing.assert_close(mixer.attention_entropy(x)[0], expected)


def test_costs_are_projections_and_recurrence() -> None:
    mixer = RWKV5(64, 0, 2, n_heads=4)
    assert mixer.flops_per_token(7) == 2 * 5 * 64 * 64 + 4 * 64 * 16
    assert mixer.state_bytes(10, torch.bfloat16) == 64 * 2 + 64 * 16 * 4
    assert RWKV6(64, 0, 2, n_heads=4).flops_per_token(7) == mixer.flops_per_token(7) + 2 * 2 * (5 * 32 + 64) * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_heads": 5}, "n_heads=5 does not divide d_model=32"),
        ({"n_heads": 4, "backend": "triton"}, "backend"),
        ({"n_heads": 4, "mix_rank": 0}, "mix_rank"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        RWKV6(32, 0, 2, **options)


def test_strong_decays_leave_the_last_token() -> None:
    mixer = stirred(RWKV5)
    with torch.no_grad():
        mixer.decay.fill_(6.0)
    x = torch.randn(1, 50, 32, requires_grad=True)
    y = mixer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())
    # exp(-exp(6)) is zero: tokens two places back are forgotten, or three with the token shift.
    torch.testing.assert_close(mixer(x[:, 40:])[:, 3:], y[:, 43:])


def in_fla(mixer: RWKV6) -> Any:
    """The layer of fla with the weights of `mixer`; its kinds of mixes are in the order r, w, k, v, g."""
    layers = pytest.importorskip("fla.layers")
    layer = layers.RWKV6Attention(
        hidden_size=mixer.d_model, expand_k=1.0, num_heads=mixer.n_heads, norm_eps=64e-5, layer_idx=mixer.layer_idx
    )
    order = [0, 4, 1, 2, 3]
    mixes = [getattr(mixer, f"{name}_mix") for name in ("receptance", "decay", "key", "value", "gate")]
    lora: nn.Sequential = layer.w_proj.linear.lora
    pairs = [
        (layer.x_proj[0].mu, mixer.shift_mix),
        (layer.x_proj[0].linear.weight, mixer.mix_down.weight.unflatten(0, (5, -1))[order].flatten(0, 1)),
        (layer.x_proj[2].weight, mixer.mix_up[order].flatten(0, 1).T.contiguous()),
        (layer.x_bias, torch.stack(mixes)),
        (lora[0].weight, mixer.decay_down.weight),
        (lora[2].weight, mixer.decay_up.weight),
        (lora[2].bias, mixer.decay.flatten()),
        (layer.bonus, mixer.bonus),
        (layer.g_norm.weight, mixer.norm.weight),
        (layer.g_norm.bias, mixer.norm.bias),
        (layer.o_proj.weight, mixer.output.weight),
    ]
    for name in ("receptance", "key", "value", "gate"):
        pairs.append((getattr(layer, f"{name[0]}_proj").linear.weight, getattr(mixer, name).weight))
    copy_all(pairs)
    return layer


@pytest.mark.gpu
def test_is_the_layer_of_fla() -> None:
    mixer = stirred(RWKV6, 128, 2).cuda()
    layer = in_fla(mixer).cuda()
    x = torch.randn(2, 100, 128, device="cuda")
    ours = outputs_and_gradients(mixer, x)
    theirs = outputs_and_gradients(layer, x, lambda module, x: module(x)[0])
    same = {"y": "y", "x": "x", "output.weight": "o_proj.weight", "key.weight": "k_proj.linear.weight"}
    same |= {"receptance.weight": "r_proj.linear.weight", "decay_down.weight": "w_proj.linear.lora.0.weight"}
    for name, theirs_name in same.items():
        assert relative_error(ours[name], theirs[theirs_name]) < 1e-3, name
    assert relative_error(ours["bonus"], theirs["bonus"]) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [RWKV5, RWKV6])
@pytest.mark.parametrize(("half", "tolerance"), [(False, TF32_TOLERANCE), (True, 4e-2)])
def test_on_cuda_is_the_float64_reference(kind: type[Mixer], half: bool, tolerance: float) -> None:
    pytest.importorskip("fla")
    wide = stirred(kind, 128, 2).double()
    x = torch.randn(2, 100, 128)
    exact = outputs_and_gradients(wide, x.double())

    def on_cuda(backend: str) -> dict[str, Tensor]:
        mixer = stirred(kind, 128, 2, backend=backend).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            return outputs_and_gradients(mixer, x.cuda())

    assert_near_float64(on_cuda("fla"), exact, tolerance, (lambda: on_cuda("reference")) if half else None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [RWKV5, RWKV6])
def test_decodes_on_cuda(kind: type[Mixer]) -> None:
    pytest.importorskip("fla")
    mixer = stirred(kind, 128, 2).cuda()
    x = torch.randn(2, 70, 128, device="cuda")
    with torch.no_grad():
        pieces = MixerHarness().run_pieces(mixer, Inputs(x), [60, *[1] * 10])
        assert relative_error(pieces, mixer(x)) < 1e-3
