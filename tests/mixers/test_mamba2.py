"""Mamba-2 and its ablations keep the contract, and the layer is the published one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.ssd import op as reference
from seqarch.mixers.mamba2 import Mamba2
from seqarch.testing.compare import relative_error
from seqarch.testing.harness import Inputs, MixerHarness
from tests.kernels.precision import assert_near_float64
from tests.mixers.gradients import outputs_and_gradients
from tests.mixers.short_chunks import ShortChunks

SMALL: dict[str, Any] = {"d_state": 8, "head_dim": 16}


class TestMamba2(ShortChunks):
    mixer = Mamba2
    reference, constant = reference, "CHUNK"
    options: ClassVar = [
        SMALL,
        {**SMALL, "n_groups": 2, "conv_size": 2, "decay": "one"},
        {**SMALL, "decay": "none", "conv": False, "norm": False},
    ]


def test_written_out() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(16, 0, 2, **SMALL).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    assert mixer.convolution is not None
    assert mixer.A_log is not None
    assert mixer.norm_weight is not None
    z, mixed, dt = (x @ mixer.in_proj.weight.T).split([32, 48, 2], dim=-1)
    kernel = mixer.convolution.weight[:, None]
    mixed = F.conv1d(F.pad(mixed.mT, (3, 0)), kernel, mixer.convolution.bias, groups=48).mT
    inputs, B, C = F.silu(mixed).split([32, 8, 8], dim=-1)
    dt = F.softplus(dt + mixer.dt_bias)
    state, outputs = torch.zeros(2, 8, 16, dtype=torch.float64), []
    for t in range(6):
        a = (-mixer.A_log.exp() * dt[0, t]).exp()
        heads = inputs[0, t].view(2, 16)
        state = a[:, None, None] * state + torch.einsum("h,n,hp->hnp", dt[0, t], B[0, t], heads)
        outputs.append(torch.einsum("hnp,n->hp", state, C[0, t]) + mixer.D[:, None] * heads)
    y = torch.stack(outputs).flatten(1) * F.silu(z[0])
    y = F.rms_norm(y, (32,), mixer.norm_weight, 1e-5)
    torch.testing.assert_close(mixer(x)[0], y @ mixer.out_proj.weight.T)


@pytest.mark.parametrize("decay", ["one", "none"])
def test_shared_decay_is_the_full_one_with_equal_heads(decay: Any) -> None:
    """`one` and `none` equal `full` if all heads of `full` have one decay, or a decay of zero."""
    torch.manual_seed(0)
    mixer = Mamba2(16, 0, 2, decay=decay, **SMALL)
    inputs, B, C = torch.randn(1, 9, 2, 16), torch.randn(1, 9, 1, 8), torch.randn(1, 9, 1, 8)
    steps = torch.rand(1, 9, len(mixer.dt_bias))
    y, _ = mixer.recur(inputs, B, C, steps)
    rate = torch.zeros(()) if mixer.A_log is None else mixer.A_log.exp()
    a = (-rate * steps[..., -1:]).exp()
    for head in range(2):
        state = torch.zeros(8, 16)
        for t in range(9):
            state = a[0, t] * state + steps[0, t, head] * B[0, t, 0, :, None] * inputs[0, t, head]
            torch.testing.assert_close(y[0, t, head], C[0, t, 0] @ state)


@pytest.mark.parametrize("norm", [True, False])
def test_skip_connection_gate_and_norm(norm: bool) -> None:
    torch.manual_seed(0)
    mixer = Mamba2(16, 0, 2, norm=norm, **SMALL)
    x = torch.randn(2, 5, 16)
    inputs, (B, C, steps), (_, z, _) = mixer.project(x, None, None)
    y, _ = mixer.recur(inputs, B, C, steps)
    gated = (y + mixer.D[:, None] * inputs).flatten(2) * F.silu(z)
    expected = F.rms_norm(gated, (32,), eps=1e-5) if norm else gated
    torch.testing.assert_close(mixer(x), mixer.out_proj(expected))


def test_initial_values_are_the_published_ones() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(1024, 3, 8, head_dim=8)
    assert mixer.A_log is not None
    A, dt = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
    assert A.min() >= 1 - 1e-5
    assert A.max() <= 16 + 1e-4
    assert A.mean().item() == pytest.approx(8.5, abs=1)
    assert dt.min() >= 1e-3 - 1e-6
    assert dt.max() <= 0.1 + 1e-5
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.2)
    assert mixer.D.eq(1).all()
    # uniform in +-1 / sqrt(fan_in), the output projection over sqrt(n_layers) besides
    assert mixer.in_proj.weight.abs().max().item() == pytest.approx(1024**-0.5, rel=1e-3)
    assert mixer.out_proj.weight.abs().max().item() == pytest.approx((2048 * 8) ** -0.5, rel=1e-3)
    undecayed = {name for name, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert undecayed == {"A_log", "D", "dt_bias"}


@pytest.mark.parametrize("options", [{}, {"n_groups": 4}, {"norm": False}], ids=str)
def test_same_output_as_the_layer_of_flash_linear_attention(options: dict[str, Any]) -> None:
    """Its plain PyTorch path with our weights copied into it.

    Groups have one head. With larger groups, that path gives head h the group h % G. The authors' kernels and ours give
    it h // (H / G).
    """
    fla = pytest.importorskip("fla.layers.mamba2")
    torch.manual_seed(0)
    mixer = Mamba2(32, 0, 2, **SMALL, **options)
    for parameter in mixer.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    layer = published(fla.Mamba2, mixer, norm=options.get("norm", True), n_groups=options.get("n_groups", 1))
    layer.act = torch.nn.SiLU()  # there, this and the norm are kernels only for a GPU
    if layer.norm is not None:
        layer.norm = GatedNorm(layer.norm.group_size, layer.norm.weight)
    x = torch.randn(2, 50, 32)
    expected = layer.torch_forward(x)[0]
    torch.testing.assert_close(mixer(x), expected, rtol=1e-4, atol=1e-5)


class GatedNorm(torch.nn.Module):
    """The published gated norm, computed group by group."""

    def __init__(self, group_size: int, weight: Tensor) -> None:
        super().__init__()
        self.group_size = group_size
        self.weight = weight

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        groups = (y * F.silu(z)).split(self.group_size, dim=-1)
        return torch.cat([F.rms_norm(group, (self.group_size,), eps=1e-5) for group in groups], dim=-1) * self.weight


RENAMED = {"convolution.weight": "conv1d.weight", "convolution.bias": "conv1d.bias", "norm_weight": "norm.weight"}
"""The published names of parameters that we call otherwise."""


def published(layer_class: Any, mixer: Mamba2, *, norm: bool, n_groups: int) -> Any:
    """fla's layer with the weights of `mixer`."""
    layer = layer_class(
        hidden_size=mixer.d_model,
        head_dim=mixer.head_dim,
        state_size=mixer.d_state,
        n_groups=n_groups,
        rmsnorm=norm,
        chunk_size=64,
    )
    return with_weights(layer, mixer)


def with_weights(layer: Any, mixer: Mamba2) -> Any:
    """A published layer with the weights of `mixer`."""
    weights = {RENAMED.get(name, name): tensor for name, tensor in mixer.state_dict().items()}
    weights["conv1d.weight"] = weights["conv1d.weight"][:, None]
    layer.load_state_dict(weights)
    return layer


@pytest.mark.parametrize(
    ("d_model", "n_layers", "tied", "published_size"), [(768, 24, 1, 110e6), (2048, 48, 1, 1.3e9), (768, 24, 2, 135e6)]
)
def test_size_of_the_model(d_model: int, n_layers: int, tied: int, published_size: float) -> None:
    """in_proj d (4d + 2N + H), out_proj 2d d, convolution 5 (2d + 2N), three numbers per head, the norms 2d and d."""
    with torch.device("meta"):
        mixer = Mamba2(d_model, 0, n_layers)
    d, N, H = d_model, 128, d_model // 32
    layer = d * (4 * d + 2 * N + H) + 2 * d * d + 5 * (2 * d + 2 * N) + 3 * H + 2 * d
    assert sum(p.numel() for p in mixer.parameters()) == layer
    model = n_layers * (layer + d) + d + tied * 32_000 * d
    assert model == pytest.approx(published_size, rel=0.12)


def test_costs() -> None:
    mixer = Mamba2(64, 0, 2, d_state=16, head_dim=32)
    projections = 2 * (64 * (128 + 128 + 32 + 4) + 128 * 64)
    assert mixer.flops_per_token(7) == projections + 2 * 4 * (128 + 32) + 4 * 128 * 16
    assert mixer.state_bytes(1000, torch.bfloat16) == 128 * 16 * 4 + 3 * (128 + 32) * 2


def test_implied_entropy_is_that_of_the_unrolled_weights() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(16, 0, 2, **SMALL).double()
    x = torch.randn(1, 70, 16, dtype=torch.float64)
    _, (B, C, steps), _ = mixer.project(x, None, None)
    assert mixer.A_log is not None
    total = (-mixer.A_log.exp() * steps).cumsum(1)
    weights = torch.einsum("bin,bjn->bij", C[:, :, 0], B[:, :, 0])[..., None] * steps[:, None]
    weights = (weights * (total[:, :, None] - total[:, None]).exp()).abs()
    weights = weights.masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril()[..., None], 0)
    p = weights / weights.sum(2, keepdim=True)
    expected = -torch.xlogy(p, p).sum(2)
    torch.testing.assert_close(mixer.attention_entropy(x), expected.float())


def test_refusals() -> None:
    with pytest.raises(UserError, match=r"head_dim=48 does not divide expand \* d_model=64"):
        Mamba2(32, 0, 2, head_dim=48)
    with pytest.raises(UserError, match=r"n_groups=3 does not divide expand . d_model / head_dim=4"):
        Mamba2(32, 0, 2, head_dim=16, n_groups=3)
    with pytest.raises(UserError, match="decay must be full, one or none, not half"):
        Mamba2(32, 0, 2, decay="half")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="must be at least 1"):
        Mamba2(32, 0, 2, d_state=0)
    with pytest.raises(UserError, match="at least 2"):
        Mamba2(32, 0, 2, conv_size=1)
    with pytest.raises(UserError, match="conv_size=4 does nothing without conv"):
        Mamba2(32, 0, 2, conv_size=4, conv=False)
    with pytest.raises(UserError, match="unknown backend 'cuda'"):
        Mamba2(32, 0, 2, backend="cuda")  # pyright: ignore[reportArgumentType]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("options", [{}, {"decay": "one"}, {"decay": "none", "conv": False}, {"norm": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_cuda_against_float64(backend: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixer = Mamba2(256, 0, 2, backend=backend, **options).cuda()
    plain, wide = (Mamba2(256, 0, 2, backend="reference", **options).to("cuda", t) for t in (None, torch.float64))
    for other in (plain, wide):
        other.load_state_dict(mixer.state_dict())
    x, dy = torch.randn(2, 2, 1000, 256, device="cuda")
    dy = dy.to(dtype)
    half = dtype == torch.bfloat16

    def run(module: Mamba2, x: Tensor, half: bool) -> dict[str, Tensor]:
        x = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            y = module(x)
        return {"y": y, **dict(zip(["x", *names(module)], gradients(y, x, module, dy), strict=True))}

    tolerance = 2e-2 if half else 2e-3  # projections, convolution and gate round besides
    exact = run(wide, x.double(), half=False)
    assert_near_float64(run(mixer, x, half), exact, tolerance, (lambda: run(plain, x, half)) if half else None)


def names(mixer: Mamba2) -> list[str]:
    return [name for name, _ in mixer.named_parameters()]


def gradients(y: Tensor, x: Tensor, mixer: Mamba2, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, [x, *mixer.parameters()], dy.to(y.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"norm": False}], ids=str)
def test_on_cuda_against_the_published_layer(options: dict[str, Any]) -> None:
    fla = pytest.importorskip("fla.layers.mamba2")
    torch.manual_seed(0)
    mixer = Mamba2(256, 0, 2, **options).cuda()
    layer = published(fla.Mamba2, mixer, norm=options.get("norm", True), n_groups=1).cuda()
    x = torch.randn(2, 500, 256, device="cuda")
    assert relative_error(mixer(x), layer.torch_forward(x)[0]) < 2e-3
    with torch.autocast("cuda", torch.bfloat16):
        assert relative_error(mixer(x), layer(x)[0]) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_same_output_and_gradients_as_the_layer_of_mamba_ssm(fused: bool, n_groups: int) -> None:
    """Our layer runs in float64 on the reference; the error is that of the authors' kernels, which multiply in TF32."""
    pytest.importorskip("causal_conv1d")  # both ways to run the layer call it
    module = pytest.importorskip("mamba_ssm.modules.mamba2")
    torch.manual_seed(0)
    mixer = Mamba2(256, 0, 2, n_groups=n_groups, backend="reference").cuda()
    for parameter in mixer.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    layer = module.Mamba2(256, ngroups=n_groups, use_mem_eff_path=fused, layer_idx=0).cuda()
    layer = with_weights(layer, mixer)
    x = torch.randn(2, 300, 256, device="cuda")
    found = outputs_and_gradients(layer, x)
    exact = outputs_and_gradients(mixer.double(), x.double())
    assert relative_error(found["y"], exact["y"]) < 5e-3
    theirs = {name: found[RENAMED.get(name, name)].view_as(gradient) for name, gradient in exact.items()}
    assert_near_float64(theirs, exact, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "fla"])
def test_compiled_on_cuda(backend: Any) -> None:
    torch.manual_seed(0)
    mixer = Mamba2(256, 0, 2, backend=backend).cuda()
    x = torch.randn(2, 500, 256, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)
    torch.compiler.reset()
    compiled = torch.compile(mixer, fullgraph=backend == "triton")
    y, expected = compiled(x), mixer(x)
    assert relative_error(y, expected) < 1e-4
    for name, got, want in zip(["x", *names(mixer)], *(gradients(t, x, mixer, dy) for t in (y, expected)), strict=True):
        assert relative_error(got, want) < 1e-3, name


@pytest.mark.gpu
def test_decoding_on_cuda_continues_what_was_computed_at_once() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(256, 0, 2).cuda()
    x = torch.randn(2, 300, 256, device="cuda")
    with torch.no_grad():
        pieces = MixerHarness().run_pieces(mixer, Inputs(x), [200, 97, 1, 1, 1])
        assert relative_error(pieces, mixer(x)) < 2e-3
