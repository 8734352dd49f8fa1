"""RoPE depends only on distances. ALiBi has the paper's slopes. A user's own position encoding works too."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import nn

from seqarch.mixers.attention import Attention
from seqarch.mixers.positions import PositionEncoding, alibi_slopes, apply_rope, rope_tables
from seqarch.mixers.rwkv7 import RWKV7Shell
from seqarch.testing import MixerSuite
from tests.mixers.short_chunks import TRACED


def rotated(x: torch.Tensor, position: int, base: float = 10000.0) -> torch.Tensor:
    positions = torch.tensor([position])
    return apply_rope(x[None, None, None], rope_tables(positions, x.shape[0], base, torch.float64))[0, 0, 0]


def test_rope_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    scores = [rotated(q, 7 + shift) @ rotated(k, shift) for shift in (0, 1, 40, 100_000)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(4), rtol=1e-9, atol=0)
    assert not torch.isclose(scores[0], rotated(q, 8) @ rotated(k, 0))


def test_rope_rotates_pairs_by_position_over_wavelength() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    slow = 3 * 100 ** (-2 / 4)
    expected = torch.tensor([math.cos(3), -2 * math.sin(slow), math.sin(3), 2 * math.cos(slow)], dtype=torch.float64)
    torch.testing.assert_close(rotated(x, 3, base=100), expected)


def test_rope_at_position_zero_changes_nothing() -> None:
    x = torch.randn(8, dtype=torch.float64)
    assert torch.equal(rotated(x, 0), x)


def test_float32_tables_are_right_at_100_000_positions() -> None:
    positions = torch.tensor([99_999])
    cos, sin = rope_tables(positions, 8, 10000.0, torch.float32)
    angles = [99_999 * 10000 ** (-i / 4) for i in range(4)]
    assert cos[0].tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=1e-6)
    assert sin[0].tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=1e-6)


def test_half_precision_is_rotated_in_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 2, 16, dtype=torch.bfloat16)
    tables = rope_tables(torch.arange(1000, 1005), 16, 10000.0, torch.float32)
    turned = apply_rope(x, tables)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, apply_rope(x.float(), tables).bfloat16())


def test_the_operator_passes_pytorchs_own_checks() -> None:
    torch.library.opcheck(torch.ops.seqarch.rope_tables.default, (torch.arange(5), 8, 10000.0, torch.float32))


def test_alibi_slopes_of_a_power_of_two_are_those_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == pytest.approx([2**-i for i in range(1, 9)])
    assert alibi_slopes(16).tolist() == pytest.approx([2 ** (-i / 2) for i in range(1, 17)])
    assert alibi_slopes(1).tolist() == pytest.approx([2**-8])


def test_other_head_counts_interleave_the_next_power_of_two() -> None:
    twelve = [2**-i for i in range(1, 9)] + [2 ** (-i / 2) for i in (1, 3, 5, 7)]
    assert alibi_slopes(12).tolist() == pytest.approx(twelve)
    assert alibi_slopes(3).tolist() == pytest.approx([2**-4, 2**-8, 2**-2])


class Shift(PositionEncoding):
    """Adds a learned vector times the position to queries only."""

    def __init__(self, n_heads, n_kv_heads, head_dim):
        super().__init__(n_heads, n_kv_heads, head_dim)
        self.direction = nn.Linear(1, head_dim, bias=False)

    def forward(self, q, k, positions):
        return q + self.direction(positions[:, None].to(q.dtype) / 10)[:, None], k


class TestPositionOfOnesOwn(MixerSuite):
    mixer = Attention
    compile_options: ClassVar = TRACED
    options: ClassVar = [{"n_heads": 4, "position": Shift}]


class TestPositionOfOnesOwnInAShell(MixerSuite):
    mixer = RWKV7Shell
    compiles = False  # the shell does with other encodings, and this encoding with attention
    options: ClassVar = [{"n_heads": 4, "position": Shift}]


def test_an_encoding_counts_and_is_drawn_anew():
    with_it, without = Attention(32, 0, 2, n_heads=4, position=Shift), Attention(32, 0, 2, n_heads=4, position="none")
    assert with_it.flops_per_token(8) == without.flops_per_token(8) + 2 * 8
    before = with_it.state_dict()["attend.encoding.direction.weight"].clone()
    with_it.reset_parameters()
    assert not torch.equal(before, with_it.state_dict()["attend.encoding.direction.weight"])
