"""RWKV-7 and its shell, with every core, keep the contract and follow the published time-mix."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.kernels import chunks
from seqarch.mixers.attention import Attention
from seqarch.mixers.base import Mixer
from seqarch.mixers.cores import SoftmaxCore, Top1ChunkCore, Top1ElementCore
from seqarch.mixers.delta_net import GatedDeltaNet
from seqarch.mixers.mamba2 import Mamba2
from seqarch.mixers.positions import PositionEncoding
from seqarch.mixers.rwkv7 import RWKV7, V_FIRST, RWKV7Shell
from seqarch.mixers.short_convolution import ShortConvolutionState
from seqarch.mixers.token_shift import token_shift
from seqarch.testing import MixerSuite
from seqarch.testing.compare import relative_error
from seqarch.testing.harness import Inputs, MixerHarness
from tests.kernels.precision import TF32_TOLERANCE, assert_near_float64
from tests.mixers.gradients import outputs_and_gradients
from tests.mixers.rwkv import copy_all, stirred
from tests.mixers.short_chunks import TRACED, ShortChunks


class TestRWKV7(ShortChunks):
    reference = chunks
    mixer = RWKV7
    compile_options: ClassVar = TRACED
    options: ClassVar = {"n_heads": 4}


class TestRWKV7Shell(MixerSuite):
    mixer = RWKV7Shell
    compile_options: ClassVar = TRACED
    options: ClassVar = [{"n_heads": 4}, {"n_heads": 4, "core": SoftmaxCore(5), "position": "none", "qk_norm": True}]


class TestRWKV7ShellTop1Element(MixerSuite):
    mixer = RWKV7Shell
    options: ClassVar = {"n_heads": 4, "core": Top1ElementCore()}
    compiles = False  # the shell does with other cores, and the core as a mixer
    bfloat16_tolerance = 0.15
    differentiable = False


class TestRWKV7ShellTop1Chunk(MixerSuite):
    mixer = RWKV7Shell
    compiles = False  # as above
    options: ClassVar = {"n_heads": 4, "core": Top1ChunkCore(8, "approx"), "temperature": 0.2}
    # Rounding changes the selection of a few queries, and the group norm enlarges small outputs.
    bfloat16_tolerance = 0.2


inside: Any = partial  # pyright knows no options that a mixer has from its parent


class TestRWKV7ShellWithMixers(MixerSuite):
    mixer = RWKV7Shell
    compile_options: ClassVar = TRACED
    options: ClassVar = [
        {"n_heads": 4, "core": inside(GatedDeltaNet, n_heads=2, head_dim=8)},
        {"n_heads": 4, "core": inside(Attention, n_heads=4, key_conv=3)},
    ]
    bfloat16_tolerance = 0.1  # the group norm enlarges small outputs


class OnlyForward(Mixer):
    """A mixer of a plug-in that defines nothing else."""

    def __init__(self, *place: int) -> None:
        super().__init__(*place)
        self.inside = torch.nn.Linear(self.d_model, self.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).cumsum(dim=1)


class TestRWKV7ShellWithAPlugin(MixerSuite):
    mixer = RWKV7Shell
    compile_options: ClassVar = TRACED
    options: ClassVar = {"n_heads": 4, "core": OnlyForward}
    bfloat16_tolerance = 0.2


def test_shell_of_a_mixer_written_out() -> None:
    mixer = stirred(RWKV7Shell, core=inside(GatedDeltaNet, n_heads=2, head_dim=8)).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    delta = F.pad(x, (0, 0, 1, -1)) - x
    o = mixer.mixer(x + delta * mixer.value_mix)
    o = F.layer_norm(o.unflatten(-1, (4, 8)), (8,), eps=64e-5).flatten(2) * mixer.norm.weight + mixer.norm.bias
    g = torch.sigmoid((x + delta * mixer.gate_mix) @ mixer.gate.down.weight.T) @ mixer.gate.up.weight.T
    carry = {}
    torch.testing.assert_close(mixer(x, carry=carry), mixer.output(o * g))
    assert carry == {}


def test_shell_of_a_mixer_counts_what_is_inside_once() -> None:
    alone = Mamba2(64, 0, 2, head_dim=16, d_state=8)
    mixer = RWKV7Shell(64, 0, 2, n_heads=4, core=inside(Mamba2, head_dim=16, d_state=8))
    for training in (False, True):
        around = 2 * (64 * 64 + 2 * 64 * 32) * (3 if training else 1)
        assert mixer.flops_per_token(7, training=training) == around + alone.flops_per_token(7, training=training)
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (mixer, alone)]
    assert sizes[0] == sizes[1] + 64 * 64 + 2 * 64 * 32 + 4 * 64
    assert (mixer.implied, mixer.flops_counted) == (True, False)
    plugin = RWKV7Shell(64, 0, 2, n_heads=4, core=OnlyForward)
    assert plugin.flops_counted
    assert plugin.capabilities == frozenset()


def test_a_mixer_inside_hands_on_no_values() -> None:
    first = RWKV7Shell(32, 0, 2, n_heads=4, core=inside(Mamba2, head_dim=16))
    later = RWKV7Shell(32, 1, 2, n_heads=4)
    later.connect([first])
    assert later.value_gate is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"core": inside(RWKV7, n_heads=4)}, "RWKV7 hands tensors to later layers"),
        ({"core": inside(RWKV7Shell, n_heads=4)}, "RWKV7Shell hands tensors to later layers"),
        ({"core": inside(Mamba2, head_dim=16), "position": "none"}, "position: for attention cores only"),
        ({"core": inside(Mamba2, head_dim=16), "qk_norm": False}, "qk_norm: for attention cores only"),
        ({"core": inside(Mamba2, head_dim=17)}, "head_dim=17 does not divide"),
    ],
)
def test_shell_refuses_mixers_that_cannot_be_inside(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RWKV7Shell(32, 0, 2, n_heads=4, **options)


def test_time_mix_written_out() -> None:
    torch.manual_seed(0)
    mixer = RWKV7Shell(16, 1, 2, n_heads=2, position="none").double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, v_first = torch.randn(2, 1, 9, 16, dtype=torch.float64)
    before = F.pad(x, (0, 0, 1, -1))

    def shifted(mix: Tensor) -> Tensor:
        return x + (before - x) * mix

    r, k = mixer.receptance(shifted(mixer.receptance_mix)), mixer.key(shifted(mixer.key_mix))
    xv, xg = shifted(mixer.value_mix), shifted(mixer.gate_mix)
    v = mixer.value(xv)
    low = mixer.value_gate
    assert low is not None
    v = v + (v_first - v) * torch.sigmoid(low.up.bias + xv @ low.down.weight.T @ low.up.weight.T)
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (r, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    o = F.layer_norm(o, (8,), eps=64e-5).flatten(2) * mixer.norm.weight + mixer.norm.bias
    g = torch.sigmoid(xg @ mixer.gate.down.weight.T) @ mixer.gate.up.weight.T
    carry = {V_FIRST: v_first}
    torch.testing.assert_close(mixer(x, carry=carry), mixer.output(o * g))
    assert carry == {V_FIRST: v_first}


def numpy_step(mixer: Any, x: Tensor, v0: Tensor, last_x: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """`time_mixing` of github.com/BlinkDL/RWKV-LM, RWKV-v7/rwkv_v7_numpy.py: one token `[C]`, S `[H, value, key]`."""
    mixes = (getattr(mixer, f"{name}_mix") for name in ("receptance", "decay", "key", "value", "rate", "gate"))
    xr, xw, xk, xv, xa, xg = (x + m * (last_x - x) for m in mixes)
    low = {name: getattr(mixer, name) for name in ("decay", "rate", "gate", "value_gate")}
    down = {name: part.down.weight.T for name, part in low.items()}
    up = {name: part.up.weight.T for name, part in low.items()}
    r, k, v = mixer.receptance.weight @ xr, mixer.key.weight @ xk, mixer.value.weight @ xv
    w = torch.tanh(xw @ down["decay"]) @ up["decay"] + low["decay"].up.bias
    w = torch.exp(-torch.sigmoid(w) / math.e**0.5)
    v = v + (v0 - v) * torch.sigmoid(xv @ down["value_gate"] @ up["value_gate"] + low["value_gate"].up.bias)
    a = torch.sigmoid(xa @ down["rate"] @ up["rate"] + low["rate"].up.bias)
    g = torch.sigmoid(xg @ down["gate"]) @ up["gate"]
    kk = k * mixer.removal_scale
    k = k + k * (a - 1) * mixer.rate_scale
    r, w, k, v, kk, a, r_k = (t.reshape(mixer.n_heads, -1, 1) for t in (r, w, k, v, kk, a, mixer.bonus))
    kk = kk / torch.linalg.norm(kk, dim=1, keepdim=True).clamp_min(1e-12)
    S = S * w.mT - S @ kk * (kk * a).mT + v * k.mT
    y = F.group_norm((S @ r).view(1, -1), mixer.n_heads, mixer.norm.weight, mixer.norm.bias, eps=64e-5)[0]
    y = y + ((r * k * r_k).sum(dim=1, keepdim=True) * v).flatten()
    return mixer.output.weight @ (y * g), S


def test_rwkv7_is_the_published_step() -> None:
    mixer = stirred(RWKV7).double()
    x, v_first = torch.randn(2, 9, 32, dtype=torch.float64)
    y = mixer(x[None], carry={V_FIRST: v_first[None]})
    last, S = torch.zeros(32, dtype=torch.float64), torch.zeros(4, 8, 8, dtype=torch.float64)
    for t in range(9):
        expected, S = numpy_step(mixer, x[t], v_first[t], last, S)
        torch.testing.assert_close(y[0, t], expected)
        last = x[t]
    state = mixer.init_state(1, 9, "cpu", torch.float64)
    mixer(x[None], carry={V_FIRST: v_first[None]}, state=state)
    torch.testing.assert_close(state.state[0].mT, S)


@pytest.mark.parametrize("layer_idx", [0, 2])
def test_rwkv7_starts_from_the_published_values(layer_idx: int) -> None:
    C, N, layers = 128, 32, 4
    mixer = RWKV7(C, layer_idx, layers, n_heads=C // N)
    ratio_0_to_1, ratio_1_to_almost0 = layer_idx / (layers - 1), 1.0 - layer_idx / layers
    ddd = torch.tensor([i / C for i in range(C)])
    linear = torch.tensor([n / (C - 1) - 0.5 for n in range(C)])
    zigzag = torch.tensor([((n % N) - ((N - 1) / 2)) / ((N - 1) / 2) for n in range(C)])
    zigzag = zigzag * zigzag.abs()
    www = torch.tensor([-6 + 6 * (n / (C - 1)) ** (1 + 1 * ratio_0_to_1**0.3) for n in range(C)])
    for mix in (mixer.decay_mix, mixer.rate_mix):
        torch.testing.assert_close(mix, 1.0 - ddd ** (0.9 * ratio_1_to_almost0))
    torch.testing.assert_close(mixer.receptance_mix, 1.0 - ddd ** (0.2 * ratio_1_to_almost0))
    torch.testing.assert_close(mixer.decay.up.bias, www + 0.5 + zigzag * 2.5, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mixer.rate.up.bias, -0.19 + zigzag * 0.3 + linear * 0.4)
    torch.testing.assert_close(mixer.removal_scale, 0.71 - linear * 0.1)
    assert mixer.rate_scale.eq(1.02).all()
    assert mixer.bonus.eq(-0.04).all()
    for low in (mixer.decay, mixer.rate, mixer.gate):
        assert not low.down.weight.any()
        product = low.up.weight.T @ low.up.weight
        torch.testing.assert_close(product, 0.01 * torch.eye(len(product)), atol=1e-6, rtol=0)
    assert_drawn_by_the_training_script(mixer)


def assert_drawn_by_the_training_script(mixer: RWKV7 | RWKV7Shell) -> None:
    """`RWKV.generate_init_weight`: orthogonal projections with gains, the group norm by depth."""
    for layer, gain in ((mixer.receptance, 1.0), (mixer.key, 0.1), (mixer.value, 1.0)):
        product = layer.weight @ layer.weight.T
        torch.testing.assert_close(product, gain**2 * torch.eye(len(product)), atol=1e-5, rtol=0)
    assert not mixer.output.weight.any()
    layer_scale = ((1 + mixer.layer_idx) / mixer.n_layers) ** 0.7
    torch.testing.assert_close(mixer.norm.weight, torch.full_like(mixer.norm.weight, layer_scale))
    assert not mixer.norm.bias.any()


def test_rwkv7_has_the_published_ranks() -> None:
    mixer = RWKV7(768, 1, 12, n_heads=12)
    ranks = {name: getattr(mixer, name).down.out_features for name in ("decay", "rate", "value_gate", "gate")}
    assert ranks == {"decay": 64, "rate": 64, "value_gate": 32, "gate": 128}


def test_rwkv7_costs_are_projections_and_recurrence() -> None:
    mixer = RWKV7(64, 0, 2, n_heads=4)
    assert mixer.flops_per_token(7) == 2 * (4 * 64 * 64 + 3 * 2 * 64 * 32) + 8 * 64 * 16
    assert mixer.state_bytes(10, torch.bfloat16) == 64 * 2 + 64 * 16 * 4


def test_rwkv7_decays_projections_alone() -> None:
    mixer = RWKV7(32, 1, 2, n_heads=4)
    decayed = {n for n, p in mixer.named_parameters() if p.dim() > 1 and not getattr(p, "_no_weight_decay", False)}
    assert decayed == {f"{name}.weight" for name in ("receptance", "key", "value", "output")}


def in_fla(mixer: RWKV7) -> Any:
    """The layer of fla with the weights of `mixer`."""
    layers = pytest.importorskip("fla.layers")
    gates = {"w_lora": mixer.decay, "a_lora": mixer.rate, "v_lora": mixer.value_gate, "g_lora": mixer.gate}
    names = {"w_lora": "decay", "a_lora": "a", "v_lora": "v", "g_lora": "gate"}
    ranks = {f"{names[name]}_low_rank_dim": low.down.out_features for name, low in gates.items() if low is not None}
    layer = layers.RWKV7Attention(
        hidden_size=mixer.d_model,
        head_dim=mixer.head_dim,
        layer_idx=mixer.layer_idx,
        num_hidden_layers=mixer.n_layers,
        norm_eps=64e-5 / mixer.head_dim,
        **ranks,
    )
    pairs = [(layer.k_k, mixer.removal_scale), (layer.k_a, mixer.rate_scale), (layer.r_k, mixer.bonus)]
    for letter, name in zip("rwkvag", ("receptance", "decay", "key", "value", "rate", "gate"), strict=True):
        pairs.append((getattr(layer, f"x_{letter}"), getattr(mixer, f"{name}_mix")))
    for name in ("receptance", "key", "value", "output"):
        pairs.append((getattr(layer, f"{name[0]}_proj").weight, getattr(mixer, name).weight))
    for name, low in gates.items():
        lora = getattr(layer, name).lora
        pairs += [(lora[0].weight, low.down.weight), (lora[2].weight, low.up.weight)]
        if low.up.bias is not None:
            pairs.append((lora[2].bias, low.up.bias))
    pairs += [(layer.g_norm.weight, mixer.norm.weight), (layer.g_norm.bias, mixer.norm.bias)]
    copy_all(pairs)
    return layer


@pytest.mark.gpu
def test_rwkv7_is_the_layer_of_fla() -> None:
    mixer = stirred(RWKV7, 128, 2).cuda()
    layer = in_fla(mixer).cuda()
    x, v_first = torch.randn(2, 2, 100, 128, device="cuda")
    ours = outputs_and_gradients(mixer, x, lambda module, x: module(x, carry={V_FIRST: v_first}))
    theirs = outputs_and_gradients(layer, x, lambda module, x: module(x, v_first=v_first)[0])
    same = {"y": "y", "x": "x", "output.weight": "o_proj.weight", "key.weight": "k_proj.weight", "bonus": "r_k"}
    same |= {"decay.up.weight": "w_lora.lora.2.weight", "rate.down.weight": "a_lora.lora.0.weight"}
    same |= {"removal_scale": "k_k", "rate_scale": "k_a", "value_gate.up.bias": "v_lora.lora.2.bias"}
    for name, theirs_name in same.items():
        assert relative_error(ours[name], theirs[theirs_name]) < 1e-3, name


@pytest.mark.gpu
@pytest.mark.parametrize(("half", "tolerance"), [(False, TF32_TOLERANCE), (True, 4e-2)])
def test_rwkv7_on_cuda_is_the_float64_reference(half: bool, tolerance: float) -> None:
    pytest.importorskip("fla")
    x, v_first = torch.randn(2, 2, 100, 128, generator=torch.Generator().manual_seed(0))

    def run(module: Any, x: Tensor) -> Tensor:
        # As the first layer would give them.
        first = v_first.to(x.device, torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype)
        return module(x, carry={V_FIRST: first})

    exact = outputs_and_gradients(stirred(RWKV7, 128, 2).double(), x.double(), run)

    def on_cuda(backend: str) -> dict[str, Tensor]:
        mixer = stirred(RWKV7, 128, 2, backend=backend).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            return outputs_and_gradients(mixer, x.cuda(), run)

    assert_near_float64(on_cuda("fla"), exact, tolerance, (lambda: on_cuda("reference")) if half else None)


@pytest.mark.gpu
def test_rwkv7_decodes_on_cuda() -> None:
    pytest.importorskip("fla")
    mixer = stirred(RWKV7, 128, 2, layer_idx=0).cuda()
    x = torch.randn(2, 70, 128, device="cuda")
    with torch.no_grad():
        pieces = MixerHarness().run_pieces(mixer, Inputs(x), [60, *[1] * 10])
        assert relative_error(pieces, mixer(x)) < 1e-3


def test_starts_as_zero_with_the_published_mixes() -> None:
    mixer = RWKV7Shell(64, 2, 4, n_heads=2)
    x = torch.randn(1, 5, 64)
    assert not mixer(x, carry={V_FIRST: x}).any()
    expected = 1 - (torch.arange(64) / 64) ** (0.7 * 0.5)
    torch.testing.assert_close(mixer.key_mix, expected)
    assert_drawn_by_the_training_script(mixer)
    assert mixer.value_gate is not None
    assert mixer.value_gate.up.bias[0].item() == pytest.approx(0.73 + 0.2)


def test_size_is_that_of_the_published_layer_without_its_decay() -> None:
    mixer = RWKV7Shell(768, 1, 12, n_heads=12)
    projections, gate, value_gate = 4 * 768**2, 2 * 768 * 128, 2 * 768 * 32 + 768
    assert sum(p.numel() for p in mixer.parameters()) == projections + gate + value_gate + 4 * 768 + 2 * 768


def test_normalisation_is_that_of_the_core_unless_given() -> None:
    assert not RWKV7Shell(32, 0, 2, n_heads=4).attend.qk_norm
    assert RWKV7Shell(32, 0, 2, n_heads=4, core=Top1ChunkCore()).attend.qk_norm
    assert not RWKV7Shell(32, 0, 2, n_heads=4, core=Top1ChunkCore(), qk_norm=False).attend.qk_norm


def test_costs_are_projections_and_core() -> None:
    mixer = RWKV7Shell(64, 0, 2, n_heads=4)
    assert mixer.flops_per_token(7) == 2 * (4 * 64 * 64 + 2 * 64 * 32) + 4 * 64 * 4
    assert mixer.state_bytes(10, torch.bfloat16) == 10 * 2 * 64 * 2 + 64 * 2


class Turned(PositionEncoding):
    """Has a matrix, as an encoding of a plug-in may."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.turn = nn.Linear(self.head_dim, self.head_dim)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn(q), self.turn(k)


@pytest.mark.parametrize("training", [False, True])
def test_costs_have_those_of_a_position_encoding_once(training: bool) -> None:
    with_it, without = (RWKV7Shell(64, 0, 2, n_heads=4, position=each) for each in (Turned, "none"))
    more = with_it.flops_per_token(7, training=training) - without.flops_per_token(7, training=training)
    assert more == 2 * 16 * 16 * (3 if training else 1)


def test_refusals() -> None:
    with pytest.raises(UserError, match="n_heads=5 does not divide d_model=32"):
        RWKV7Shell(32, 0, 2, n_heads=5)
    x = torch.randn(1, 3, 32)
    with pytest.raises(UserError, match="takes no v_first"):
        RWKV7Shell(32, 0, 2, n_heads=4)(x, carry={V_FIRST: x})


def test_a_later_layer_may_be_the_first_with_a_value_residual() -> None:
    mixer, later = RWKV7Shell(32, 1, 3, n_heads=4), RWKV7Shell(32, 2, 3, n_heads=4)
    mixer.connect([Attention(32, 0, 3, n_heads=4)])
    later.connect([mixer])
    assert mixer.value_gate is None
    assert later.value_gate is not None
    x = torch.randn(1, 3, 32)
    carry = {}
    mixer(x, carry=carry)
    expected = mixer.value(x + (F.pad(x, (0, 0, 1, -1)) - x) * mixer.value_mix)
    torch.testing.assert_close(carry, {V_FIRST: expected})
    with pytest.raises(UserError, match="takes no v_first"):
        mixer(x, carry=carry)


def test_token_shift_moves_by_one() -> None:
    x = torch.arange(1.0, 7).view(1, 6, 1)
    assert token_shift(x).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    borders = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    assert token_shift(x, cu_seqlens=borders).flatten().tolist() == [0, 1, 0, 3, 4, 5]
    state = ShortConvolutionState.empty(1, 1, 1, "cpu", torch.float32)
    pieces = [token_shift(piece, state=state) for piece in x.split([1, 3, 2], dim=1)]
    assert torch.cat(pieces, dim=1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert state.last.untyped_storage().nbytes() == 4


def test_what_the_recurrence_takes_is_half_precision_under_autocast() -> None:
    """Float32 weights would widen the activations. Only decays stay float32."""
    torch.manual_seed(0)
    mixer = RWKV7(64, 1, 2, n_heads=2)
    with torch.autocast("cpu", torch.bfloat16):
        v, inputs, (bonus, _) = mixer.project(torch.randn(1, 5, 64), None, None)
    assert v.dtype == bonus.dtype == torch.bfloat16
    assert [t.dtype for t in inputs] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
