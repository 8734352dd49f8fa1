"""Gated linear attention: the contract, and the recurrence against its definition."""

import torch

from seqarch.kernels import OPS, gla
from seqarch.mixers.gla import GLA
from seqarch.testing import MixerSuite


class TestGLA(MixerSuite):
    mixer = GLA
    options = {"n_heads": 2}
    bfloat16_tolerance = 0.05  # keys and queries are not of unit length: rounded once, products are off by 0.036


def test_the_op_is_its_definition():
    q, k, v, log_decay = drawn = tuple(OPS["gla"].inputs().values())
    state = torch.randn(q.shape[0], *k.shape[2:], v.shape[3], dtype=v.dtype)
    o, final = gla(*drawn, initial_state=state)
    wanted = []
    for t in range(q.shape[1]):
        state = log_decay[:, t, ..., None].exp() * state + k[:, t, ..., None] * v[:, t, :, None]
        wanted.append(q.shape[3] ** -0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    torch.testing.assert_close(o, torch.stack(wanted, dim=1))
    torch.testing.assert_close(final, state)
