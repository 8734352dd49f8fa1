"""Gated DeltaNet-2 keeps the contract and equals flash-linear-attention's layer."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.kernels import chunks, gated_delta_rule2
from seqarch.mixers.gated_delta_net2 import GatedDeltaNet2
from seqarch.testing.compare import relative_error
from tests.kernels import inputs
from tests.kernels.precision import SLACK, TF32_TOLERANCE
from tests.mixers.gradients import outputs_and_gradients
from tests.mixers.short_chunks import TRACED, ShortChunks


class TestGatedDeltaNet2(ShortChunks):
    reference = chunks
    mixer = GatedDeltaNet2
    compile_options: ClassVar = TRACED
    options: ClassVar = [
        {"n_heads": 4},
        {"n_heads": 2, "head_dim": 6, "expand_v": 1.5, "conv": False, "neg_eigval": True},
    ]


def published_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, S: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of the paper, one matrix for each step; `[B, T, H, ...]`."""
    outputs = []
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    for t in range(q.shape[1]):
        move = eye - torch.einsum("bhi,bhj->bhij", k[:, t], b[:, t] * k[:, t])
        S = move @ (g[:, t].exp()[..., None] * S) + torch.einsum("bhi,bhj->bhij", k[:, t], w[:, t] * v[:, t])
        outputs.append(torch.einsum("bhij,bhi->bhj", S, q[:, t]) / k.shape[-1] ** 0.5)
    return torch.stack(outputs, dim=1), S


@pytest.mark.parametrize("length", [1, 5, 70])
def test_the_op_is_the_published_recurrence(length: int) -> None:
    given = inputs.gated_delta_rule2(T=length, strength=2.0)
    state = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    q, k, v, g, b = given.values()
    write = torch.rand_like(v)
    expected = published_rule(q, k, v, g, b, write, state)
    found = gated_delta_rule2(q, k, write * v, g, b, initial_state=state)
    torch.testing.assert_close(found, expected)


def test_the_first_outputs_are_larger_than_the_epsilon_of_their_norm() -> None:
    """Convolutions start as in the published layer: with 0.02 the norm's outputs would have a tenth of the length."""
    torch.manual_seed(0)
    mixer, gated = GatedDeltaNet2(768, 0, 1, n_heads=6), []
    mixer.out.register_forward_pre_hook(lambda module, inputs: gated.append(inputs[0]))
    mixer(torch.randn(1, 128, 768))
    assert gated[0].square().mean().sqrt() > 0.25  # the gate starts at a half


def published(**options: Any) -> Any:
    """fla's layer with 2 heads of 16 channels."""
    layers = pytest.importorskip("fla.layers")
    torch.manual_seed(0)
    layer = layers.GatedDeltaNet2(hidden_size=64, num_heads=2, head_dim=16, layer_idx=0, **options)
    with torch.no_grad():
        layer.o_norm.weight.add_(0.3 * torch.randn_like(layer.o_norm.weight))
    return layer


@torch.no_grad()
def with_weights_of(layer: Any, **options: Any) -> GatedDeltaNet2:
    ours = GatedDeltaNet2(64, 0, 2, n_heads=2, head_dim=16, **options)
    ours.qkv.weight.copy_(torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
    assert ours.convolution is not None
    kernels = [layer.q_conv1d.weight, layer.k_conv1d.weight, layer.v_conv1d.weight]
    ours.convolution.weight.copy_(torch.cat(kernels).squeeze(1))
    pairs: list[tuple[Any, Any]] = [(ours.erase, layer.b_proj), (ours.write, layer.w_proj), (ours.out, layer.o_proj)]
    pairs += [(ours.step_down, layer.f_proj[0]), (ours.step_up, layer.f_proj[1]), (ours.norm, layer.o_norm)]
    pairs += [(ours.gate_down, layer.g_proj[0]), (ours.gate_up, layer.g_proj[1])]
    for mine, theirs in pairs:
        mine.load_state_dict(theirs.state_dict())
    ours.A_log.copy_(layer.A_log)
    ours.dt_bias.copy_(layer.dt_bias)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in layer.parameters())
    return ours


def written_out(layer: Any, x: Tensor) -> Tensor:
    """What fla's layer computes, from its own projections, without its kernels."""

    def heads(projection: Any, convolution: Any) -> Tensor:
        y = F.pad(projection(x).mT, (convolution.kernel_size[0] - 1, 0))
        return F.silu(F.conv1d(y, convolution.weight, groups=y.shape[1]).mT).unflatten(-1, (2, -1))

    q, k = (
        t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        for t in (heads(layer.q_proj, layer.q_conv1d), heads(layer.k_proj, layer.k_conv1d))
    )
    v = heads(layer.v_proj, layer.v_conv1d)
    step = F.softplus(layer.f_proj(x) + layer.dt_bias).view_as(k)
    b = layer.b_proj(x).sigmoid().view_as(k) * (2 if layer.allow_neg_eigval else 1)
    w = layer.w_proj(x).sigmoid().view_as(v)
    start = torch.zeros(len(x), 2, k.shape[-1], v.shape[-1], dtype=x.dtype)
    o, _ = published_rule(q, k, v, -layer.A_log.exp()[:, None] * step, b, w, start)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * layer.o_norm.weight
    return layer.o_proj((o * layer.g_proj(x).sigmoid().view_as(o)).flatten(2))


@pytest.mark.parametrize(
    ("theirs", "ours"), [({}, {}), ({"expand_v": 2.0, "allow_neg_eigval": True}, {"expand_v": 2.0, "neg_eigval": True})]
)
def test_equals_the_published_layer_written_out(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    layer = published(**theirs)
    mixer = with_weights_of(layer, **ours).double()
    x = torch.randn(2, 70, 64, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), written_out(layer.double(), x))


@pytest.mark.gpu
def test_on_cuda_it_is_the_layer_of_fla_and_the_float64_reference() -> None:
    layer = published().cuda()
    mixer = with_weights_of(layer).cuda()
    x = torch.randn(2, 100, 64, device="cuda")
    ours = outputs_and_gradients(mixer, x, lambda module, x: module(x))
    theirs = outputs_and_gradients(layer, x, lambda module, x: module(x)[0])
    for name, theirs_name in {
        "y": "y",
        "x": "x",
        "out.weight": "o_proj.weight",
        "erase.weight": "b_proj.weight",
    }.items():
        assert relative_error(ours[name], theirs[theirs_name]) < TF32_TOLERANCE, name
    exact = outputs_and_gradients(mixer.cpu().double(), x.cpu().double(), lambda module, x: module(x))
    # decays get their gradient as differences that cancel (tests/kernels/precision.py): the bound is fla's own error
    bounds = {"A_log": max(TF32_TOLERANCE, SLACK * relative_error(theirs["A_log"].cpu(), exact["A_log"]))}
    for name, expected in exact.items():
        assert relative_error(ours[name].cpu(), expected) < bounds.get(name, TF32_TOLERANCE), name


def test_starts_as_published() -> None:
    mixer = GatedDeltaNet2(256, 0, 2, n_heads=2)
    steps = F.softplus(mixer.dt_bias)
    assert 0.00099 < steps.min() < steps.max() < 0.101
    assert 1 <= mixer.A_log.exp().min() < mixer.A_log.exp().max() <= 16
    assert (mixer.key_dim, mixer.value_dim) == (128, 128)
