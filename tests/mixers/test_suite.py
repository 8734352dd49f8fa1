"""`MixerSuite` catches bugs: it reports the one bug of each mixer in `broken.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import CheckpointError

from seqarch.errors import UserError
from seqarch.mixers.attention import Attention
from seqarch.mixers.base import Mixer
from seqarch.mixers.based import TaylorLinearAttention
from seqarch.mixers.cores import KeyValueState, SoftmaxCore
from seqarch.mixers.rwkv7 import RWKV7Shell
from seqarch.testing import MixerSuite
from seqarch.testing.cures import CURES
from tests.mixers.broken import (
    BROKEN,
    HEADS,
    CrossesBorders,
    EntropyAcrossBorders,
    KeepsADictionary,
    LosesPrecisionInFloat32,
    SameRopeAtEveryCall,
    ScalesByNothing,
    ScalesNothing,
    ToyMean,
)


class WithoutParameters(Mixer):
    """A sound mixer of which nothing is learned."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None].to(x.dtype)


class TestCausalMean(MixerSuite):
    mixer = ToyMean


class TestWithoutParameters(MixerSuite):
    mixer = WithoutParameters


class WithFrozenParameter(ToyMean):
    def __init__(self, d_model: int, layer_idx: int, n_layers: int) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.out.bias.requires_grad_(False)


class TestWithFrozenParameter(MixerSuite):
    mixer = WithFrozenParameter


@pytest.mark.parametrize(
    ("broken", "options", "test"), BROKEN, ids=[f"{broken.__name__}-{test}" for broken, _, test in BROKEN]
)
def test_the_suite_fails(broken: type[Mixer], options: dict[str, Any], test: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(pytest, "skip", pytest.fail)
    suite = type("Suite", (MixerSuite,), {"mixer": broken})()
    with pytest.raises((AssertionError, UserError, Unsupported, CheckpointError, NotImplementedError)):
        getattr(suite, test)(options)


OFF = r"off by [\d.e-]+, more than "
SAID = [
    (ScalesNothing, {}, "test_refusals", r"unknown in scales or published: \{'n_headz'\}"),
    (ScalesByNothing, HEADS, "test_refusals", r"unknown in scales or published: \{'lenght'\}"),
    (KeepsADictionary, HEADS, "test_refusals", "init_state returned a dict, not a MixerState"),
    (SameRopeAtEveryCall, HEADS, "test_pieces_without_gradients", rf"{OFF}.*\n.*\nwrong positions: 1\n"),
    (CrossesBorders, HEADS, "test_packed_documents", r"largest at row 0, position \d+, channel \d+: \S+, not \S+\n"),
    (LosesPrecisionInFloat32, {}, "test_float32", f"float32: output: {OFF}0.0001\nlargest at row"),
    (EntropyAcrossBorders, HEADS, "test_entropy", rf"{OFF}\S+\nlargest at row 0, position \d+, head \d"),
]


@pytest.mark.parametrize(("broken", "options", "test", "said"), SAID)
def test_the_suite_says_what_is_wrong_where_and_what_cures_it(broken: Any, options: Any, test: str, said: str) -> None:
    suite = type("Suite", (MixerSuite,), {"mixer": broken})()
    with pytest.raises(AssertionError, match=said) as caught:
        getattr(suite, test)(options)
    assert caught.value.__notes__[0].splitlines()[1:] == [f"* {cure}" for cure in CURES[test]]


def test_a_sound_mixer_passes_what_the_broken_ones_fail() -> None:
    for sound in (Attention, RWKV7Shell, TaylorLinearAttention):
        suite = type("Suite", (MixerSuite,), {"mixer": sound})()
        for test in sorted({test for broken, _, test in BROKEN if issubclass(broken, sound)} - {"test_compile"}):
            getattr(suite, test)(HEADS)


def test_a_core_given_to_two_layers_keeps_their_states_apart() -> None:
    core = SoftmaxCore()
    layers = [RWKV7Shell(32, index, 2, n_heads=4, core=core) for index in (0, 1)]
    states = [layer.init_state(1, 4, "cpu", torch.float32) for layer in layers]
    layers[0](torch.randn(1, 3, 32), state=states[0])
    lengths = [state.state.length for state in states if isinstance(state.state, KeyValueState)]
    assert lengths == [3, 0]
