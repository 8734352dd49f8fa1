"""MLSTM keeps the contract and equals the authors' layer and the paper's equations, gates of any size included."""

from functools import partial
from typing import Any, ClassVar

import pytest
import seqarch_zoo.mlstm as module
import torch
from seqarch_zoo.mlstm import MLSTM, mlstm

from seqarch.kernels.chunks import split_chunks
from seqarch.testing import MixerSuite


class TestMLSTM(MixerSuite):
    mixer = MLSTM
    options: ClassVar = [{"n_heads": 2}, {"n_heads": 4, "expand": 1, "block_size": 16}]

    @pytest.fixture(autouse=True)
    def _short_chunks(self, monkeypatch):
        monkeypatch.setattr(module, "CHUNK_SIZES", (8, 8))


@pytest.mark.parametrize("size", [1, 30])
def test_equations_of_the_paper(size):
    """Equations 19 to 27 token by token, without a stabiliser, in float64."""
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
    o, _ = mlstm(q, k, v, log_input, log_forget)
    torch.testing.assert_close(o, torch.stack(expected, dim=1), rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize(("width", "size"), [(8, 64), (96, 96), (320, 256)])
def test_wide_heads_have_long_chunks_and_equal_short_ones(width, size, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 300, 1, width, dtype=torch.float64)
    log_input, log_forget = torch.randn(2, 1, 300, 1, dtype=torch.float64)
    call = partial(mlstm, q, k, v, 3 * log_input, -log_forget.abs())
    lengths = []
    monkeypatch.setattr(
        module, "split_chunks", lambda t, size, *fill: lengths.append(size) or split_chunks(t, size, *fill)
    )
    (o, (state, maximum)), _ = call(), monkeypatch.setattr(module, "CHUNK_SIZES", (16, 16))
    expected, (others, other) = call()
    assert set(lengths) == {size, 16}
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state * maximum.exp()[..., None, None], others * other.exp()[..., None, None])


@pytest.mark.parametrize("block_size", [4, 16])
def test_projections_are_block_diagonal(block_size):
    mixer = MLSTM(32, 0, 2, block_size=block_size).double()
    x, weight = torch.randn(2, 5, 64, dtype=torch.float64), mixer.qkv[1]
    torch.testing.assert_close(mixer._blocks(x, weight), x @ torch.block_diag(*weight).mT)
