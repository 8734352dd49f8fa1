"""Mamba3 keeps the contract and equals the recurrence of the authors' tests, token by token."""

import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from seqarch_zoo.mamba3 import ANGLE_BLOCK, Mamba3, _angles

from seqarch.errors import UserError
from seqarch.testing import MixerSuite


class TestMamba3(MixerSuite):
    mixer = Mamba3
    options: ClassVar = [
        {"d_state": 8, "head_dim": 16},
        {"d_state": 6, "head_dim": 16, "n_groups": 2, "rotated": 1.0, "rank": 2},
    ]


def rotated(t, angles):
    """`mamba3_siso_step_ref` and `mamba3_MIMO_step_ref` of the authors' tests: neighbours are pairs."""
    pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
    turn = F.pad(torch.polar(torch.ones_like(angles), angles), (0, pairs.shape[-1] - angles.shape[-1]), value=1.0)
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


@pytest.mark.parametrize("rank", [1, 3])
def test_equals_the_authors_step(rank):
    """arXiv 2603.15569: `h_t = a_t h_{t-1} + (1 - l_t) dt_t a_t k_{t-1} v_{t-1}^T + l_t dt_t k_t v_t^T`."""
    torch.manual_seed(0)
    mixer = Mamba3(16, 0, 2, d_state=8, head_dim=8, rank=rank).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 80, 16, dtype=torch.float64)
    z, v, B, C, dt, A, trapezoid, angles = mixer.in_proj(x).split(mixer.widths, dim=-1)
    dt = F.softplus(dt + mixer.dt_bias)
    decay = (dt * (-F.softplus(A)).clamp(max=-1e-4)).exp()
    share = trapezoid.sigmoid()
    B, C = (F.rms_norm(t.view(2, 80, rank, 1, 8), (8,), eps=1e-5) for t in (B, C))
    k, q = B * mixer.B_norm + mixer.B_bias, C * mixer.C_norm + mixer.C_bias
    ones = torch.ones(3, 1, 4, 8, dtype=torch.float64)
    into, gate, out = ones if mixer.ranks is None else mixer.ranks
    v, z = (t.view(2, 80, 1, 4, 8) for t in (v, z))
    v, z = v * into, z * gate
    state, angle = torch.zeros(2, 4, 8, 8, dtype=torch.float64), torch.zeros(2, 4, 2, dtype=torch.float64)
    last_k = last_v = torch.zeros(2, rank, 4, 8, dtype=torch.float64)
    outputs = []
    for t in range(80):
        angle = angle + math.pi * angles[:, t, None].tanh() * dt[:, t, :, None]
        key, query = rotated(k[:, t], angle), rotated(q[:, t], angle)
        earlier = torch.einsum("brhn,brhp->bhnp", last_k, last_v) * ((1 - share) * dt * decay)[:, t, :, None, None]
        own = torch.einsum("brhn,brhp->bhnp", key, v[:, t]) * (share * dt)[:, t, :, None, None]
        state = decay[:, t, :, None, None] * state + earlier + own
        read = torch.einsum("bhnp,brhn->brhp", state, query) + mixer.D[:, None] * v[:, t]
        outputs.append((read * F.silu(z[:, t]) * out).sum(dim=1).flatten(1))
        last_k, last_v = key, v[:, t]
    expected = mixer.out_proj(torch.stack(outputs, dim=1))
    torch.testing.assert_close(mixer(x), expected, rtol=1e-9, atol=1e-10)


def test_angles_stay_exact_over_many_tokens():
    """Float32 sums of 20,000 large turns, in one piece or in two, are as exact as sums in float64."""
    torch.manual_seed(0)
    turns = 3 * torch.rand(1, 20_000, 2, 3)
    exact, half = turns.double().cumsum(dim=1), 100 * ANGLE_BLOCK + 1
    before = _angles(turns[:, :half], None, None)
    after = _angles(turns[:, half:], before[:, -1], None)
    borders = torch.tensor([0, half, 20_000], dtype=torch.int32)
    since = torch.cat((exact[:, :half], exact[:, half:] - exact[:, half - 1 : half]), dim=1)
    whole, packed = _angles(turns, None, None), _angles(turns, None, borders)
    for found, sums in ((whole, exact), (torch.cat((before, after), dim=1), exact), (packed, since)):
        torch.testing.assert_close(found.cos(), sums.cos().float(), rtol=0, atol=2e-4)
        torch.testing.assert_close(found.sin(), sums.sin().float(), rtol=0, atol=2e-4)


def test_an_odd_state_is_refused():
    with pytest.raises(UserError, match="d_state must be even, as channels rotate in pairs, not 7"):
        Mamba3(16, 0, 2, d_state=7, head_dim=8)
