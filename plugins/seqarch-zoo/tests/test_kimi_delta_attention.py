"""KimiDeltaAttention keeps the contract and equals fla's naive recurrence and layer."""

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from seqarch_zoo.kimi_delta_attention import KimiDeltaAttention, kda

from seqarch.testing import MixerSuite


class TestKimiDeltaAttention(MixerSuite):
    mixer = KimiDeltaAttention
    options: ClassVar = [{"n_heads": 4}, {"n_heads": 2, "head_dim": 6, "conv": False, "neg_eigval": True}]


def test_the_convolution_starts_as_in_the_authors_model():
    """Uniform in +-1/2. With the matrices' 0.02, outputs would be too small against the epsilon of their norm."""
    torch.manual_seed(0)
    convolution: Any = KimiDeltaAttention(64, 0, 2, n_heads=4).convolution
    assert convolution.weight.abs().max().item() == pytest.approx(0.5, abs=0.01)


def inputs(device="cpu", dtype=torch.float32, size=8, length=70):
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, length, 3, size, generator=generator) for _ in range(4))
    beta = torch.rand(2, length, 3, generator=generator)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return [t.to(device, dtype) for t in (q, k, v)], [t.to(device) for t in (-F.softplus(g), beta)]


def test_equals_flas_naive_recurrence():
    naive = pytest.importorskip("fla.ops.kda.naive").naive_recurrent_kda
    (q, k, v), (g, beta) = inputs()
    expected, state = naive(q, k, v, g, beta, output_final_state=True)
    o, final = kda(q, k, v, g, beta)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, state, rtol=1e-4, atol=1e-5)


def test_the_gate_equals_flas():
    """The decay of `project` against fla's own formula in PyTorch."""
    gate = pytest.importorskip("fla.ops.kda.gate").naive_kda_gate
    mixer = KimiDeltaAttention(32, 0, 2, n_heads=4)
    x = torch.randn(2, 5, 32)
    _, (_, _, log_decay, _), _ = mixer.project(x, None, None)
    expected = gate(mixer.decay(x).unflatten(-1, (4, 8)), mixer.A_log, mixer.dt_bias)
    torch.testing.assert_close(log_decay, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_kernels_equal_the_reference():
    (q, k, v), (g, beta) = inputs("cuda", torch.bfloat16, 64, 200)
    o, state = kda(q, k, v, g, beta)
    wide, final = kda(q.double(), k.double(), v.double(), g.double(), beta.double(), backend="reference")
    torch.testing.assert_close(o.double(), wide, rtol=0.03, atol=0.01)
    torch.testing.assert_close(state.double(), final, rtol=0.03, atol=0.01)


@pytest.mark.gpu
@torch.no_grad()
def test_equals_flas_layer_with_its_weights():
    layers = pytest.importorskip("fla.layers")
    torch.manual_seed(0)
    theirs = layers.KimiDeltaAttention(hidden_size=256, num_heads=4, head_dim=64, layer_idx=0).cuda()
    ours = KimiDeltaAttention(256, 0, 2, n_heads=4).cuda()
    projections = (theirs.q_proj, theirs.k_proj, theirs.v_proj)
    ours.qkv.weight.copy_(torch.cat([layer.weight for layer in projections]))
    convolutions = (theirs.q_conv1d, theirs.k_conv1d, theirs.v_conv1d)
    convolution: Any = ours.convolution
    convolution.weight.copy_(torch.cat([layer.weight for layer in convolutions]).squeeze(1))
    ours.A_log.copy_(theirs.A_log.flatten())
    ours.dt_bias.copy_(theirs.dt_bias)
    ours.norm.weight.copy_(theirs.o_norm.weight)
    for mine, published in ((ours.beta, theirs.b_proj), (ours.decay, theirs.f_proj), (ours.out, theirs.o_proj)):
        mine.load_state_dict(published.state_dict())
    ours.gate.load_state_dict(theirs.g_proj.state_dict())
    x = torch.randn(2, 200, 256, device="cuda", dtype=torch.bfloat16)
    expected = theirs.bfloat16()(x)[0]
    torch.testing.assert_close(ours.bfloat16()(x), expected, rtol=0.05, atol=0.02 * expected.abs().max().item())
