"""Canon layers are the published convolutions, at the places that their paper names."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.kernels.short_convolution.op import UNIT_EPS
from seqarch.mixers.attention import Attention
from seqarch.mixers.canon import Canon, CanonLayer
from seqarch.mixers.delta_net import GatedDeltaNet
from seqarch.mixers.mamba2 import Mamba2
from seqarch.mixers.rwkv7 import RWKV7
from seqarch.model import GeGLU, RWKVChannelMix, SequenceLM, SwiGLU
from seqarch.model.block import Block

inside: Any = partial  # pyright knows no options that a mixer has from its parent
attention = inside(Attention, n_heads=2, position="none")


def build(canon: Canon | None, mixer: Any = attention, feed_forward: Any = SwiGLU) -> SequenceLM:
    torch.manual_seed(0)
    return SequenceLM(31, 16, 2, {"mixer": mixer}, feed_forward=feed_forward, canon=canon).double()


def published(layer: CanonLayer, x: Tensor) -> Tensor:
    """`apply_canon` of the authors: a depthwise causal `nn.Conv1d` and its input."""
    conv = nn.Conv1d(layer.channels, layer.channels, 4, groups=layer.channels, padding=3, bias=False).double()
    conv.weight.data.copy_(layer.weight[:, None])
    return x + conv(x.mT)[..., : x.shape[1]].mT


def test_the_four_places_are_those_of_the_authors() -> None:
    block = build(Canon()).blocks[1]
    assert isinstance(block, Block)
    mixer, after = block.mixer, block.feed_forward
    assert isinstance(mixer, Attention)
    assert isinstance(after, SwiGLU)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    h = published(block.mixer_canon, block.mixer_norm(x))  # pyright: ignore
    q, k, v = published(mixer.canon, mixer.qkv(h)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    middle = x + mixer.out(o)
    h = published(block.feed_forward_canon, block.feed_forward_norm(middle))  # pyright: ignore
    gate, up = published(after.canon, torch.cat((after.gate(h), after.up(h)), dim=-1)).chunk(2, dim=-1)
    torch.testing.assert_close(block(x)[0], middle + after.down(F.silu(gate) * up))


def test_initial_values_are_those_of_conv1d() -> None:
    weight = CanonLayer(20_000, 4, residual=True, activation=None).weight
    assert weight.abs().max() <= 0.5
    assert weight.std().item() == pytest.approx(1 / math.sqrt(12), rel=0.02)  # uniform in +-0.5


def test_inside_a_recurrence_it_takes_the_place_of_its_convolution() -> None:
    mixer: Any = build(Canon("B"), inside(GatedDeltaNet, n_heads=2, head_dim=4, conv=False)).blocks[0].mixer
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    projected = F.silu(published(mixer.canon, mixer.qkv(x)))
    q, k, v = projected.split([8, 8, 16], dim=-1)
    values, (q_there, k_there, *_), _ = mixer.project(x, None, None)
    torch.testing.assert_close(values.flatten(2), v)
    for there, expected in ((q_there, q), (k_there, k)):
        heads = expected.unflatten(-1, (2, 4))
        torch.testing.assert_close(there, heads / (heads.square().sum(dim=-1, keepdim=True) + UNIT_EPS).sqrt())


@pytest.mark.parametrize("places", ["A", "B", "C", "D", "ABCD"])
def test_parameters_flops_and_state_grow_by_the_layers(places: str) -> None:
    plain, lm = build(None), build(Canon(places))
    widths = {"A": 16, "B": 48, "C": 16, "D": 2 * 64}
    channels = 2 * sum(widths[place] for place in places)
    assert lm.n_parameters() - plain.n_parameters() == 4 * channels
    for training in (False, True):
        more = lm.flops_per_token(7, training=training) - plain.flops_per_token(7, training=training)
        assert more == 2 * 4 * channels * (3 if training else 1)
    assert lm.state_bytes(7) - plain.state_bytes(7) == 2 * 3 * channels


@pytest.mark.parametrize(
    ("canon", "message"),
    [
        ({"places": "AE"}, "places must hold some of A, B, C and D, each once, not 'AE'"),
        ({"places": "AA"}, "each once, not 'AA'"),
        ({"places": ""}, "each once, not ''"),
        ({"conv_size": 1}, "canon.conv_size must be at least 2"),
        ({"activation": "gelu"}, "activation must be silu or null, not gelu"),
    ],
)
def test_wrong_options_are_refused(canon: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Canon(**canon))


@pytest.mark.parametrize(
    ("mixer", "feed_forward", "message"),
    [
        (inside(RWKV7, n_heads=2), GeGLU, "has B, but RWKV7 has no place for it"),
        (inside(Mamba2, head_dim=8), GeGLU, "has B, but Mamba2 has no place for it"),
        (inside(Attention, n_heads=2, key_conv=3), GeGLU, "has B, but Attention has no place for it"),
        (attention, RWKVChannelMix, "has D, but RWKVChannelMix has no place for it"),
        (attention, None, "has C, but no block has a feed_forward"),
    ],
)
def test_layers_without_a_place_are_refused(mixer: Any, feed_forward: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(Canon(), mixer, feed_forward)
