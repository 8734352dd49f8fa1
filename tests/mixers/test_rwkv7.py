"""The RWKV-7 shell keeps the contract with every core, and follows the published time-mix."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

from seqarch.errors import UserError
from seqarch.mixers.cores import SoftmaxCore, Top1ChunkCore, Top1ElementCore
from seqarch.mixers.rwkv7 import RWKV7, RWKV7Shell
from seqarch.mixers.token_shift import TokenShiftState, token_shift
from seqarch.testing import MixerSuite


class TestRWKV7(MixerSuite):
    mixer = RWKV7
    options: ClassVar = {"n_heads": 4}


class TestRWKV7Shell(MixerSuite):
    mixer = RWKV7Shell
    options: ClassVar = [
        {"n_heads": 4},
        {"n_heads": 4, "core": SoftmaxCore(5), "position": "none", "qk_norm": True},
    ]


class TestRWKV7ShellTop1Element(MixerSuite):
    mixer = RWKV7Shell
    options: ClassVar = {"n_heads": 4, "core": Top1ElementCore()}
    bfloat16_tolerance = 0.15
    differentiable = False


class TestRWKV7ShellTop1Chunk(MixerSuite):
    mixer = RWKV7Shell
    options: ClassVar = [
        {"n_heads": 4, "core": Top1ChunkCore(8)},
        {"n_heads": 4, "core": Top1ChunkCore(8, "approx"), "temperature": 0.2},
    ]
    # Rounding changes the selection for a query here and there, and the group norm enlarges small outputs.
    bfloat16_tolerance = 0.15


def test_time_mix_written_out() -> None:
    torch.manual_seed(0)
    mixer = RWKV7Shell(16, 1, 2, n_heads=2, position="none").double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, v_first = torch.randn(2, 1, 9, 16, dtype=torch.float64)
    before = F.pad(x, (0, 0, 1, -1))

    def shifted(mix: torch.Tensor) -> torch.Tensor:
        return x + (before - x) * mix

    r, k = mixer.receptance(shifted(mixer.receptance_mix)), mixer.key(shifted(mixer.key_mix))
    xv, xg = shifted(mixer.value_mix), shifted(mixer.gate_mix)
    v = mixer.value(xv)
    low = mixer.value_gate
    assert low is not None
    v = v + (v_first - v) * torch.sigmoid(low.up.bias + xv @ low.down.weight.T @ low.up.weight.T)
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (r, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    o = F.layer_norm(o, (8,), eps=64e-5).flatten(2) * mixer.norm.weight + mixer.norm.bias
    g = torch.sigmoid(xg @ mixer.gate.down.weight.T) @ mixer.gate.up.weight.T
    y, passed_on = mixer(x, v_first=v_first)
    torch.testing.assert_close(y, mixer.output(o * g))
    assert torch.equal(passed_on, v_first)


def test_starts_as_zero_with_the_published_mixes() -> None:
    mixer = RWKV7Shell(64, 3, 4, n_heads=2)
    x = torch.randn(1, 5, 64)
    assert not mixer(x, v_first=x)[0].any()
    expected = 1 - (torch.arange(64) / 64) ** (0.7 * 0.25)
    torch.testing.assert_close(mixer.key_mix, expected)
    assert mixer.key.weight.abs().max() <= 0.05 / 8
    assert mixer.value.weight.abs().max() > 0.05 / 8
    assert mixer.value_gate is not None
    assert mixer.value_gate.up.bias[0].item() == pytest.approx(0.73 + 0.2)


def test_size_is_that_of_the_published_layer_without_its_decay() -> None:
    mixer = RWKV7Shell(768, 1, 12, n_heads=12)
    projections, gate, value_gate = 4 * 768**2, 2 * 768 * 128, 2 * 768 * 32 + 768
    assert sum(p.numel() for p in mixer.parameters()) == projections + gate + value_gate + 4 * 768 + 2 * 768


def test_normalisation_is_that_of_the_core_unless_given() -> None:
    assert not RWKV7Shell(32, 0, 2, n_heads=4).attend.qk_norm
    assert RWKV7Shell(32, 0, 2, n_heads=4, core=Top1ChunkCore()).attend.qk_norm
    assert not RWKV7Shell(32, 0, 2, n_heads=4, core=Top1ChunkCore(), qk_norm=False).attend.qk_norm


def test_costs_are_projections_and_core() -> None:
    mixer = RWKV7Shell(64, 0, 2, n_heads=4)
    assert mixer.flops_per_token(7) == 2 * (4 * 64 * 64 + 2 * 64 * 32) + 4 * 64 * 4
    assert mixer.state_bytes(10, torch.bfloat16) == 10 * 2 * 64 * 2 + 64 * 2


def test_refusals() -> None:
    with pytest.raises(UserError, match="n_heads=5 does not divide d_model=32"):
        RWKV7Shell(32, 0, 2, n_heads=5)
    x = torch.randn(1, 3, 32)
    with pytest.raises(UserError, match="takes no v_first"):
        RWKV7Shell(32, 0, 2, n_heads=4)(x, v_first=x)


def test_a_later_layer_may_be_the_first_with_a_value_residual() -> None:
    mixer = RWKV7Shell(32, 1, 2, n_heads=4)
    x = torch.randn(1, 3, 32)
    _, v_first = mixer(x)
    torch.testing.assert_close(v_first, mixer.value(x + (F.pad(x, (0, 0, 1, -1)) - x) * mixer.value_mix))


def test_token_shift_moves_by_one() -> None:
    x = torch.arange(1.0, 7).view(1, 6, 1)
    assert token_shift(x).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    borders = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    assert token_shift(x, cu_seqlens=borders).flatten().tolist() == [0, 1, 0, 3, 4, 5]
    state = TokenShiftState.empty(1, 1, "cpu", torch.float32)
    pieces = [token_shift(piece, state=state) for piece in x.split([1, 3, 2], dim=1)]
    assert torch.cat(pieces, dim=1).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert state.last.untyped_storage().nbytes() == 4
    with pytest.raises(UserError, match="cu_seqlens"):
        token_shift(x, state=state, cu_seqlens=borders)
