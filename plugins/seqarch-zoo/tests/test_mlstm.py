"""MLSTM keeps the contract and equals the equations of the paper, gates of any size included."""

from typing import ClassVar

import pytest
import seqarch_zoo.mlstm as module
import torch
from seqarch_zoo.mlstm import MLSTM, mlstm

from seqarch.testing import MixerSuite


class TestMLSTM(MixerSuite):
    mixer = MLSTM
    options: ClassVar = [{"n_heads": 2}, {"n_heads": 4, "expand": 1, "block_size": 8}]

    @pytest.fixture(autouse=True)
    def _short_chunks(self, monkeypatch):
        monkeypatch.setattr(module, "CHUNK_SIZE", 8)


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


def test_gates_that_would_overflow_float32():
    q, k, v = torch.randn(3, 1, 100, 1, 4).unbind()
    gate = torch.full((1, 100, 1), 200.0)
    o, _ = mlstm(q, k, v, gate, torch.zeros(1, 100, 1))
    shifted, _ = mlstm(q.double(), k.double(), v.double(), gate.double(), torch.zeros(1, 100, 1).double())
    torch.testing.assert_close(o.double(), shifted, rtol=1e-3, atol=1e-3)
