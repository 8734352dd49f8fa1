"""The contract asks only for `forward`. What a mixer with nothing else can do, and what it refuses."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqarch.errors import UserError
from seqarch.mixers.attention import Attention
from seqarch.mixers.base import Mixer, MixerState
from seqarch.mixers.mamba1 import Mamba1
from seqarch.model import GeGLU, SequenceLM
from seqarch.testing import MixerSuite


class AssociativeMemory(Mixer):
    """A sum of outer products of keys and values, normalised; it knows neither states nor packed documents."""

    def __init__(self, d_model, layer_idx, n_layers):
        super().__init__(d_model, layer_idx, n_layers)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scores = (q @ k.transpose(1, 2)).tril()
        return self.out(scores @ v / scores.sum(-1, keepdim=True))


class NeedsValues(AssociativeMemory):
    """Its computation depends on the numbers, so it cannot run on tensors without data."""

    def forward(self, x):
        return super().forward(x) if bool(x.isfinite().all()) else x


class TestAssociativeMemory(MixerSuite):
    mixer = AssociativeMemory


SKIPPED = {
    "test_pieces_with_gradients": "does not claim 'decode'",
    "test_state_bytes": "does not claim 'decode'",
    "test_packed_documents": "does not claim 'packed'",
    "test_entropy": "does not claim 'entropy'",
    "test_flops": "defines no flops_per_token",
    "test_reset_parameters": "defines no reset_parameters",
    "test_carry": "hands nothing to later layers",
}


@pytest.mark.parametrize("test", SKIPPED)
def test_the_suite_names_what_it_skips(test: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=f"AssociativeMemory {SKIPPED[test]}"):
        getattr(TestAssociativeMemory(), test)({})


def test_flops_are_those_of_the_products_that_run() -> None:
    mixer = AssociativeMemory(32, 0, 2)
    assert mixer.flops_counted
    for length in (7, 1024, 2048, 100_000):
        # the projections, then scores and values for all pairs, as this mixer computes them
        assert mixer.flops_per_token(length) == 2 * 4 * 32 * 32 + 2 * 2 * 32 * length
        assert mixer.flops_per_token(length, training=True) == 3 * mixer.flops_per_token(length)


def test_flops_of_a_mixer_that_needs_values_are_those_of_its_matrices() -> None:
    assert NeedsValues(32, 0, 2).flops_per_token(7) == 2 * 4 * 32 * 32


def test_counting_leaves_weights_and_random_numbers_as_they_are() -> None:
    mixer = AssociativeMemory(32, 0, 2)
    before = {name: tensor.clone() for name, tensor in mixer.state_dict().items()}
    state = torch.get_rng_state()
    mixer.flops_per_token(16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in mixer.state_dict().items())
    assert next(mixer.parameters()).device.type == "cpu"


@pytest.mark.parametrize("length", [16, 64])
def test_the_count_of_a_mixer_with_a_formula_agrees_with_it(length: int) -> None:
    attention, mamba = Attention(32, 0, 2, n_heads=4), Mamba1(32, 0, 2)
    assert Mixer.flops_per_token(attention, length) == 2 * 4 * 32 * 32 + 4 * 32 * length  # all pairs, future ones too
    convolution = 2 * 64 * 4  # on a CPU a sum of elements, which does not count
    assert Mixer.flops_per_token(mamba, length) == mamba.flops_per_token(length) - convolution


def test_weights_are_drawn_again_by_the_submodules() -> None:
    mixer = AssociativeMemory(32, 0, 2)
    torch.manual_seed(0)
    mixer.reset_parameters()
    torch.manual_seed(0)
    fresh = AssociativeMemory(32, 0, 2)
    assert all(torch.equal(tensor, fresh.state_dict()[name]) for name, tensor in mixer.state_dict().items())


def model(mixer: type[Mixer]) -> SequenceLM:
    return SequenceLM(61, 32, 2, {"memory": mixer}, feed_forward=GeGLU)


def test_a_model_of_it_learns_and_says_that_its_operations_are_counted() -> None:
    lm = model(AssociativeMemory)
    tokens = torch.randint(61, (2, 9))
    lm.checkpoint_activations()
    lm(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())
    assert lm.flops_counted
    assert lm.flops_per_token(8, training=True) > 0


def test_what_it_cannot_do_is_refused_in_a_sentence() -> None:
    lm = model(AssociativeMemory)
    tokens = torch.randint(61, (1, 9))
    with pytest.raises(UserError, match="AssociativeMemory has no decoding state: it cannot generate text"):
        lm.init_state(1, 9, "cpu", torch.float32)
    with pytest.raises(UserError, match="AssociativeMemory does not support text generation"):
        lm.state_bytes(9)
    with pytest.raises(UserError, match=r"AssociativeMemory does not support packed documents \(cu_seqlens\)"):
        lm(tokens, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))


@pytest.mark.parametrize(("capability", "argument"), [("packed", "cu_seqlens"), ("decode", "state")])
def test_a_capability_without_its_argument_is_refused(capability: str, argument: str) -> None:
    """Otherwise a run with a document mask would train without it."""
    mixer, given = AssociativeMemory(8, 0, 1), cast(Any, {argument: torch.tensor([0, 1])})
    mixer.capabilities = frozenset({capability})
    with pytest.raises(UserError, match=f"says that it can do '{capability}', but forward takes no {argument}$"):
        mixer.arguments(**given)


def test_a_mixer_without_forward_says_so() -> None:
    class Nothing(Mixer):
        pass

    with pytest.raises(TypeError, match=r"abstract class Nothing .*forward"):
        model(Nothing)


def test_a_mixer_is_given_what_its_forward_names() -> None:
    class Everything(Mixer):
        capabilities = frozenset({"decode", "packed"})

        def forward(self, x: Tensor, *, state=None, cu_seqlens=None, carry=None) -> Tensor:
            return x

    class Anything(Everything):
        def forward(self, x: Tensor, **options) -> Tensor:
            return x

    borders = torch.tensor([0, 1])
    assert AssociativeMemory(8, 0, 1).arguments(carry={}) == {}
    options: list[dict[str, Any]] = [{"state": 1}, {"cu_seqlens": borders}]
    for given in options:
        rest = {"state": None, "cu_seqlens": None} | given
        assert Everything(8, 0, 1).arguments(**given, carry={}) == {**rest, "carry": {}}
        assert Anything(8, 0, 1).arguments(**given, carry={}) == rest
    with pytest.raises(UserError, match="a state continues one sequence"):
        Everything(8, 0, 1).arguments(state=MixerState(), cu_seqlens=borders)
