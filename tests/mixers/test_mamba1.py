"""Mamba-1 and its ablations keep the contract, and the layer is the published one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.errors import UserError
from seqarch.kernels.selective_scan import op as reference
from seqarch.mixers.mamba1 import Mamba1
from seqarch.model import SequenceLM
from seqarch.testing.compare import relative_error
from seqarch.testing.harness import Inputs, MixerHarness
from tests.kernels.precision import assert_near_float64
from tests.mixers.gradients import outputs_and_gradients
from tests.mixers.short_chunks import ShortChunks

SMALL: dict[str, Any] = {"d_state": 4}


class TestMamba1(ShortChunks):
    mixer = Mamba1
    reference, constant, length = reference, "PIECE_ELEMENTS", 1  # so that the longest sequence has five pieces
    options: ClassVar = [
        SMALL,
        {"d_state": 3, "expand": 1, "conv_size": 2, "dt_rank": 5, "decay": "one"},
        {**SMALL, "decay": "none", "conv": False},
    ]


def perturbed(mixer: Mamba1) -> Mamba1:
    """The mixer in float64, its parameters moved from their initial values."""
    for parameter in mixer.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return mixer.double()


@pytest.mark.parametrize("decay", ["full", "one", "none"])
@pytest.mark.parametrize("conv", [True, False])
def test_written_out(decay: Any, conv: bool) -> None:
    torch.manual_seed(0)
    mixer = perturbed(Mamba1(16, 0, 2, decay=decay, conv=conv, **SMALL))
    u = torch.randn(1, 6, 16, dtype=torch.float64)
    x, z = (u[0] @ mixer.in_proj.weight.T).split(32, dim=-1)
    if mixer.convolution is not None:
        kernel = mixer.convolution.weight[:, None]
        x = F.conv1d(F.pad(x.T, (3, 0))[None], kernel, mixer.convolution.bias, groups=32)[0].T
    x = F.silu(x)
    low, B, C = (x @ mixer.x_proj.weight.T).split([1, 4, 4], dim=-1)
    dt = F.softplus(low @ mixer.dt_proj.weight.T + mixer.dt_bias)
    state, outputs = torch.zeros(32, 4, dtype=torch.float64), []
    for t in range(6):
        a = torch.ones(())
        if mixer.A_log is not None:
            step = dt[t, :, None] if decay == "full" else dt[t, -1]
            a = (-mixer.A_log.exp() * step).exp()
        state = a * state + (dt[t, :32] * x[t])[:, None] * B[t]
        outputs.append(state @ C[t] + mixer.D * x[t])
    y = torch.stack(outputs) * F.silu(z)
    torch.testing.assert_close(mixer(u)[0], y @ mixer.out_proj.weight.T)


def test_initial_values_are_the_published_ones() -> None:
    torch.manual_seed(0)
    mixer = Mamba1(1024, 3, 8)
    assert mixer.A_log is not None
    torch.testing.assert_close(mixer.A_log.exp(), torch.arange(1.0, 17).expand(2048, 16))
    dt = F.softplus(mixer.dt_bias)
    assert dt.min() >= 1e-3 - 1e-6
    assert dt.max() <= 0.1 + 1e-5
    assert dt.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.1)
    assert mixer.D.eq(1).all()
    # uniform in +-1 / sqrt(fan_in); the output projection over sqrt(n_layers) besides; the rank is 1024 / 16
    for layer, bound in (
        (mixer.in_proj, 1024**-0.5),
        (mixer.x_proj, 2048**-0.5),
        (mixer.dt_proj, 64**-0.5),
        (mixer.out_proj, (2048 * 8) ** -0.5),
    ):
        assert layer.weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=1e-2)
    undecayed = {name for name, p in mixer.named_parameters() if getattr(p, "_no_weight_decay", False)}
    assert undecayed == {"A_log", "D", "dt_bias"}


def test_a_wide_model_starts_as_the_published_one() -> None:
    """A tied head at first predicts that each token repeats, and gives all other tokens one probability.

    mamba_ssm's own model of 4 layers has a cosine of 0.432 and a first loss of 17.7 at this width and 32,000 tokens.
    """
    torch.manual_seed(0)
    lm = SequenceLM(4000, 2048, 2, {"mamba": lambda *place: Mamba1(*place)})
    x = torch.randperm(4000)[None, :33]
    own = x[0, :-1, None]
    with torch.no_grad():
        logits = lm(x[:, :-1])[0]
    # the cosine, and the norm of an embedding times that of the normalised vector
    assert logits.gather(1, own).mean().item() == pytest.approx(0.43 * 0.02 * 2048, rel=0.05)
    others = logits.scatter(1, own, -math.inf)
    spread = 0.5 * 0.02**2 * 2048  # half the variance of the logits
    assert F.cross_entropy(others, x[0, 1:]).item() == pytest.approx(math.log(4000) + spread, abs=0.5)


def test_one_decay_has_one_rate_and_one_step() -> None:
    mixer = Mamba1(16, 0, 2, decay="one")
    assert mixer.A_log is not None
    assert mixer.A_log.shape == (1,)
    assert mixer.dt_bias.shape == (33,)
    assert Mamba1(16, 0, 2, decay="none").A_log is None


def weights_of(mixer: Mamba1, module: torch.nn.Module) -> dict[str, Tensor]:
    """Our parameters by their published names."""
    renamed = {"convolution.weight": "conv1d.weight", "convolution.bias": "conv1d.bias", "dt_bias": "dt_proj.bias"}
    published = module.state_dict()
    weights: dict[str, Tensor] = {}
    for ours, tensor in mixer.state_dict().items():
        name = renamed.get(ours) or ours
        weights[name] = tensor.view_as(published[name])
    return weights


def test_same_output_as_the_layer_of_transformers() -> None:
    """Its plain PyTorch path with our weights copied into it."""
    pytest.importorskip("transformers")
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    mixer = perturbed(Mamba1(32, 0, 2)).float()
    layer = MambaMixer(MambaConfig(hidden_size=32, state_size=16, time_step_rank=2, num_hidden_layers=2), layer_idx=0)
    layer.load_state_dict(weights_of(mixer, layer))
    x = torch.randn(2, 50, 32, requires_grad=True)
    expected = layer(x)
    actual = mixer(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(actual)
    published = torch.autograd.grad(expected, list(layer.parameters()), dy)
    theirs = dict(zip(dict(layer.named_parameters()), published, strict=True))
    ours = torch.autograd.grad(actual, list(mixer.parameters()), dy)
    gradients = {name: grad for (name, _), grad in zip(mixer.named_parameters(), ours, strict=True)}
    renamed = {"convolution.weight": "conv1d.weight", "convolution.bias": "conv1d.bias", "dt_bias": "dt_proj.bias"}
    for name, grad in gradients.items():
        wanted = theirs[renamed.get(name, name)].view_as(grad)
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-4, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_same_output_as_the_layer_of_mamba_ssm(fast: bool) -> None:
    module = pytest.importorskip("mamba_ssm.modules.mamba_simple")
    torch.manual_seed(0)
    mixer = Mamba1(256, 0, 2).cuda()
    layer = module.Mamba(256, use_fast_path=fast, layer_idx=0).cuda()
    layer.load_state_dict(weights_of(mixer, layer))
    x = torch.randn(2, 300, 256, device="cuda")
    expected = layer(x)
    error = (mixer(x) - expected).norm() / expected.norm()
    assert error < 1e-3, f"off by {error:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"decay": "one"}, {"decay": "none", "conv": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_cuda_against_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mixer = Mamba1(256, 0, 2, backend="triton", **options).cuda()
    plain, wide = (Mamba1(256, 0, 2, backend="reference", **options).to("cuda", t) for t in (None, torch.float64))
    for other in (plain, wide):
        other.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 500, 256, device="cuda")
    half = dtype == torch.bfloat16

    def run(module: Mamba1) -> dict[str, Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            return outputs_and_gradients(module, x)

    tolerance = 2e-2 if half else 1e-3  # the scan itself computes in float32; projections and convolution round
    exact = outputs_and_gradients(wide, x.double())
    assert_near_float64(run(mixer), exact, tolerance, (lambda: run(plain)) if half else None)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["full", "one", "none"])
def test_decoding_on_cuda_continues_what_was_computed_at_once(decay: Any) -> None:
    torch.manual_seed(0)
    mixer = Mamba1(256, 0, 2, decay=decay).cuda()
    x = torch.randn(2, 300, 256, device="cuda")
    with torch.no_grad():
        pieces = MixerHarness().run_pieces(mixer, Inputs(x), [200, 97, 1, 1, 1])
        assert relative_error(pieces, mixer(x)) < 1e-3


def test_every_size_of_the_state() -> None:
    """State, projections and gate of the published sizes: 6 d_model^2 in the large matrices."""
    mixer = Mamba1(768, 0, 24)
    large = 3 * 768 * 1536
    rank, convolution, vectors = 48, 1536 * 4 + 1536, 1536 + 1536
    selection = 1536 * (rank + 2 * 16) + rank * 1536
    assert sum(p.numel() for p in mixer.parameters()) == large + selection + convolution + vectors + 1536 * 16
    assert mixer.state_bytes(1000) == 3 * 1536 * 2 + 1536 * 16 * 4
    assert mixer.flops_per_token(5) == 2 * (large + selection) + 2 * 4 * 1536 + 4 * 1536 * 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_state": 0}, "must be at least 1"),
        ({"dt_rank": 0}, "must be at least 1"),
        ({"decay": "some"}, "decay must be full, one or none, not some"),
        ({"backend": "fla"}, "unknown backend 'fla'"),
        ({"conv_size": 1}, "at least 2"),
        ({"conv_size": 4, "conv": False}, "conv_size=4 does nothing without conv"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Mamba1(16, 0, 2, **options)


def test_entropy_is_that_of_the_implied_weights() -> None:
    torch.manual_seed(0)
    mixer = perturbed(Mamba1(16, 0, 2, **SMALL))
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    inputs = mixer.convolution(mixer.in_proj(x).chunk(2, dim=-1)[0]) if mixer.convolution else None
    assert inputs is not None
    dt, decay, B, C = mixer._select(inputs)
    A = decay["A"]
    entropy = mixer.attention_entropy(x)
    assert entropy.shape == (1, 9, 32)
    for i in range(9):
        after = dt[0, : i + 1].flip(0).cumsum(0).flip(0) - dt[0, : i + 1]
        weights = torch.einsum("n,jn,jdn,jd->jd", C[0, i], B[0, : i + 1], (after[..., None] * A).exp(), dt[0, : i + 1])
        p = weights.abs() / weights.abs().sum(0)
        torch.testing.assert_close(entropy[0, i], -(p * p.log()).sum(0).float(), rtol=1e-4, atol=1e-5)
