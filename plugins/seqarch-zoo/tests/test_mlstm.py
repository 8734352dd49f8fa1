"""MLSTM keeps the contract and equals the authors' layer and the paper's equations, gates of any size included."""

from functools import partial
from typing import Any, ClassVar

import pytest
import seqarch_zoo.mlstm as module
import torch
from seqarch_zoo.mlstm import MLSTM, mlstm

from seqarch.testing import MixerSuite


class TestMLSTM(MixerSuite):
    mixer = MLSTM
    options: ClassVar = [{"n_heads": 2}, {"n_heads": 4, "expand": 1, "block_size": 16}]


@pytest.mark.parametrize("slices", [(256, 64), (4, 5)])
@pytest.mark.parametrize("size", [1, 30])
def test_equations_of_the_paper(size, slices, monkeypatch):
    """Equations 19 to 27 token by token, without a stabiliser, in float64; also in two pieces, with heads in slices."""
    monkeypatch.setattr(module, "LARGEST_SLICES", slices)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 70, 3, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    log_input, log_forget = (size * torch.randn(2, 70, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    log_forget = -log_forget.abs()
    C, n = torch.zeros(2, 3, 8, 8, dtype=torch.float64), torch.zeros(2, 3, 8, dtype=torch.float64)
    expected = []
    for t in range(70):
        f, i, key = log_forget[:, t, :, None].exp(), log_input[:, t, :, None].exp(), k[:, t] / 8**0.5
        C = f[..., None] * C + i[..., None] * v[:, t, :, :, None] * key[:, :, None, :]
        n = f * n + i * key
        norm = (n * q[:, t]).sum(dim=-1, keepdim=True).abs().clamp_min(1)
        expected.append((C * q[:, t, :, None, :]).sum(dim=-1) / norm)
    tensors = q, k, v, log_input, log_forget
    first, state = mlstm(*(t[:, :33] for t in tensors))
    second, (memory, maximum) = mlstm(*(t[:, 33:] for t in tensors), initial_state=state)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    for o in (mlstm(*tensors)[0], torch.cat((first, second), dim=1)):
        close(o, torch.stack(expected, dim=1))
    scale = maximum.exp()[..., None, None]
    close(memory * scale, torch.cat((C.mT, n[..., None]), dim=-1))


@torch.no_grad()
def authors_layer(mixer: Any) -> Any:
    """The layer of the package xlstm with the weights of `mixer`."""
    xlstm = pytest.importorskip("xlstm", reason="the authors' code is not installed: pip install --no-deps xlstm")
    sizes: Any = {"embedding_dim": mixer.d_model, "num_heads": mixer.n_heads, "context_length": 150}
    layer = xlstm.mLSTMLayer(xlstm.mLSTMLayerConfig(**sizes)).double()
    cell = layer.mlstm_cell
    layer.proj_up.weight.copy_(mixer.up.weight)
    layer.conv1d.conv.weight.copy_(mixer.convolution.weight[:, None])
    layer.conv1d.conv.bias.copy_(mixer.convolution.bias)
    for each, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj), mixer.qkv, strict=True):
        each.weight.copy_(weight)
    for gate, weight, bias in zip(
        (cell.igate, cell.fgate), mixer.gates.weight.chunk(2), mixer.gates.bias.chunk(2), strict=True
    ):
        gate.weight.copy_(weight)
        gate.bias.copy_(bias)
    cell.outnorm.weight.copy_(mixer.norm_weight - 1)
    layer.learnable_skip.copy_(mixer.skip)
    layer.proj_down.weight.copy_(mixer.down.weight)
    return layer


@torch.no_grad()
def test_equals_the_authors_layer():
    """Their parallel form and their steps; they add 1e-6 to the denominator, the paper does not."""
    torch.manual_seed(0)
    mixer = MLSTM(32, 0, 2, n_heads=2).double()
    for parameter in mixer.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 150, 32, dtype=torch.float64)
    layer, o = authors_layer(mixer), mixer(x)
    torch.testing.assert_close(o, layer(x), rtol=1e-5, atol=1e-5)
    cell = layer.mlstm_cell
    cell.backend_fn, cell.backend_fn_step = partial(cell.backend_fn, eps=0), partial(cell.backend_fn_step, eps=0)
    torch.testing.assert_close(o, layer(x), rtol=1e-11, atol=1e-11)
    state: dict[str, Any] = {}
    for t in range(150):
        y, state = layer.step(x[:, t, None], **state)
        torch.testing.assert_close(o[:, t, None], y, rtol=1e-11, atol=1e-11)


def test_gates_that_would_overflow_float32():
    q, k, v = torch.randn(3, 1, 100, 1, 4).unbind()
    gate = torch.full((1, 100, 1), 200.0)
    o, _ = mlstm(q, k, v, gate, torch.zeros(1, 100, 1))
    shifted, _ = mlstm(q.double(), k.double(), v.double(), gate.double(), torch.zeros(1, 100, 1).double())
    torch.testing.assert_close(o.double(), shifted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("block_size", [4, 16])
def test_projections_are_block_diagonal(block_size):
    mixer = MLSTM(32, 0, 2, block_size=block_size).double()
    x, weight = torch.randn(2, 5, 64, dtype=torch.float64), mixer.qkv[1]
    torch.testing.assert_close(mixer._blocks(x, weight), x @ torch.block_diag(*weight).mT)
