"""SLSTM keeps the contract and equals the authors' layer and the paper's equations, gates of any size included."""

from typing import Any, ClassVar

import pytest
import torch
from seqarch_zoo.slstm import SLSTM, slstm

from seqarch.testing import MixerSuite


class TestSLSTM(MixerSuite):
    mixer = SLSTM
    options: ClassVar = [{"n_heads": 2}]
    compile_options: ClassVar = {"backend": "aot_eager"}  # the recurrence itself is not compiled


@pytest.mark.parametrize("size", [1, 30])
def test_equations_of_the_paper(size):
    """Equations 8 to 14 token by token, without a stabiliser, in float64."""
    generator = torch.Generator().manual_seed(0)
    gates = size * torch.randn(2, 40, 3, 4, 5, generator=generator, dtype=torch.float64)
    recurrent = torch.randn(3, 5, 4, 5, generator=generator, dtype=torch.float64)
    h, c, n = torch.zeros(3, 2, 3, 5, dtype=torch.float64)
    expected = []
    for t in range(40):
        i, f, z, o = (gates[:, t] + torch.einsum("bhi,higo->bhgo", h, recurrent)).unbind(2)
        c = f.sigmoid() * c + i.exp() * z.tanh()
        n = f.sigmoid() * n + i.exp()
        h = o.sigmoid() * c / n
        expected.append(h)
    found, _ = slstm(gates.flatten(3), recurrent.flatten(2))
    torch.testing.assert_close(found, torch.stack(expected, dim=1), rtol=1e-9, atol=1e-9)


def test_gates_that_would_overflow_float32():
    gates = torch.randn(1, 50, 1, 4, 8)
    gates[..., :2, :] *= 200
    recurrent = torch.randn(1, 8, 32)
    found, _ = slstm(gates.flatten(3), recurrent)
    expected, _ = slstm(gates.flatten(3).double(), recurrent.double())
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def authors_layer(mixer: Any) -> Any:
    """The layer of the package xlstm with the weights of `mixer`."""
    xlstm = pytest.importorskip("xlstm", reason="the authors' code is not installed: pip install --no-deps xlstm")
    sizes: Any = {"embedding_dim": mixer.d_model, "num_heads": mixer.n_heads, "backend": "vanilla"}
    place: Any = {"_block_idx": mixer.layer_idx, "_num_blocks": mixer.n_layers}
    layer = xlstm.sLSTMLayer(xlstm.sLSTMLayerConfig(**sizes, **place, dtype="float32")).double()
    layer.reset_parameters()
    layer.conv1d.conv.weight.copy_(mixer.convolution.weight[:, None])
    layer.conv1d.conv.bias.copy_(mixer.convolution.bias)
    return layer


@torch.no_grad()
def test_equals_the_authors_layer():
    torch.manual_seed(0)
    mixer = SLSTM(32, 1, 3, n_heads=2).double()
    layer = authors_layer(mixer)
    bias = layer.slstm_cell._bias_int2ext(layer.slstm_cell._bias_).view(2, 4, 16)
    torch.testing.assert_close(mixer.bias, bias, rtol=0, atol=1e-5)  # as initialised
    for parameter in mixer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    layer = authors_layer(mixer)
    # the authors call the projection `fgate` that their cell takes as the input gate
    for each, weight in zip((layer.fgate, layer.igate, layer.zgate, layer.ogate), mixer.gates, strict=True):
        each.weight.copy_(weight)
    cell = layer.slstm_cell
    cell._bias_.copy_(cell._bias_ext2int(mixer.bias))
    cell._recurrent_kernel_.copy_(cell._recurrent_kernel_ext2int(mixer.recurrent.unflatten(-1, (4, -1))))
    layer.group_norm.weight.copy_(mixer.norm_weight - 1)
    x = torch.randn(2, 60, 32, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), layer(x), rtol=1e-9, atol=1e-9)
