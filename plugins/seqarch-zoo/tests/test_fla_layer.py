"""FlaLayer finds fla's layers and their options, refuses in sentences, and keeps the contract around a layer."""

import itertools
from functools import partial
from typing import Any, ClassVar

import pytest
import seqarch_zoo.fla_layer as module
import torch
from seqarch_zoo.fla_layer import FlaLayer
from seqarch_zoo.gated_associative import GatedAssociative
from torch import nn

from seqarch.errors import UserError
from seqarch.kernels.packages import is_installed
from seqarch.model import SequenceLM
from seqarch.testing import MixerSuite

pytestmark = pytest.mark.skipif(not is_installed("fla"), reason="fla is not installed")


class RunningSum(nn.Module):
    """A layer in PyTorch with the arguments, the cache and the padding of fla's layers."""

    least = torch.bfloat16
    """The narrowest dtype of its state."""

    def __init__(self, hidden_size: int = 2048, gain: float = 1.0, layer_idx: Any = None) -> None:
        super().__init__()
        self.gain, self.layer_idx = gain, layer_idx
        self.proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        from fla.layers import utils

        rows, length = hidden_states.shape[:2]
        last = utils.get_layer_cache(self, past_key_values)
        x, indices, cu_seqlens = utils.unpad_hidden_states(
            hidden_states, kwargs.get("cu_seqlens"), attention_mask, length
        )
        y = self.gain * self.proj(x)
        y = y.to(torch.promote_types(y.dtype, self.least))
        parts = list(y) if cu_seqlens is None else [y[0, a:b] for a, b in itertools.pairwise(cu_seqlens)]
        before = torch.zeros_like(y[0, 0]).expand(len(parts), -1) if last is None else last["recurrent_state"]
        sums = [part.cumsum(dim=0) + start for part, start in zip(parts, before, strict=True)]
        state = torch.stack([part[-1] for part in sums])
        utils.update_layer_cache(self, past_key_values, recurrent_state=state, offset=length)
        joined = torch.stack(sums) if cu_seqlens is None else torch.cat(sums)[None]
        return utils.repad_hidden_states(joined.to(x.dtype), indices, rows, length), None, past_key_values


class WideSum(RunningSum):
    """A layer that accumulates in float32, as fla's kernels do."""

    least = torch.float32


class TestFlaLayer(MixerSuite):
    mixer = FlaLayer
    options: ClassVar = [{"layer": "WideSum", "options": {"gain": 0.5}}]
    compiles = False  # fla's layers are not compiled

    @pytest.fixture(autouse=True)
    def _on_a_cpu(self, monkeypatch):
        monkeypatch.setattr(module, "layer_class", lambda name: WideSum)
        monkeypatch.setattr(module, "interpreting", lambda: True)

    def test_two_processes_share_a_sequence(self, configuration):
        with pytest.raises(UserError, match="is a Cache: no process can send it"):
            super().test_two_processes_share_a_sequence(configuration)


class FirstValues(RunningSum):
    """A layer whose first in a model hands its values to the later ones, with the names of fla's RWKV-7."""

    def __init__(self, hidden_size: int = 2048, layer_idx: Any = None) -> None:
        super().__init__(hidden_size, layer_idx=layer_idx)
        if layer_idx != 0:
            self.v_lora = nn.Linear(hidden_size, hidden_size)

    def forward(
        self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, v_first: Any = None, **kwargs
    ):
        if past_key_values is not None:
            assert not self.training, "a cache in training"
        mixed, *rest = super().forward(hidden_states, attention_mask, past_key_values, **kwargs)
        v = self.proj(hidden_states)
        if self.layer_idx == 0:
            return (mixed, *rest, v)
        return (mixed + torch.lerp(v, v_first, self.v_lora(hidden_states).sigmoid()), *rest, v_first)


class Refusing(RunningSum):
    """A layer that takes a cache by its signature only."""

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        if past_key_values is not None:
            raise NotImplementedError("no cache here")
        return super().forward(hidden_states, **kwargs)


@pytest.fixture
def kind(request, monkeypatch):
    monkeypatch.setattr(module, "layer_class", lambda name: request.param)
    monkeypatch.setattr(module, "interpreting", lambda: True)


@pytest.mark.parametrize("kind", [FirstValues], indirect=True)
@pytest.mark.parametrize("pattern", [["fla"], ["fla", "other"], ["other", "fla"]])
@torch.no_grad()
def test_a_model_whose_layers_hand_on_first_values_decodes(kind, pattern):
    torch.manual_seed(0)
    mixers = {"fla": partial(FlaLayer, layer="FirstValues"), "other": partial(GatedAssociative, n_slots=4)}
    lm = SequenceLM(31, 16, 4, {name: mixers[name] for name in set(pattern)}, pattern=pattern).double().eval()
    tokens, state = torch.randint(0, 31, (2, 9)), lm.init_state(2, 9, "cpu", torch.float64)
    pieces = [lm(piece, state=state) for piece in tokens.split([5, 3, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), lm(tokens), rtol=1e-10, atol=1e-10)
    assert lm.train().state_bytes(9, torch.float64) == sum(t.nbytes for t in state.tensors()) / 2
    assert all(part.training for part in lm.modules())


@pytest.mark.parametrize("kind", [FirstValues], indirect=True)
def test_the_first_of_them_has_no_gate_that_it_cannot_use(kind):
    mixers = {"fla": partial(FlaLayer, layer="FirstValues"), "other": partial(GatedAssociative, n_slots=4)}
    lm = SequenceLM(31, 16, 4, mixers, pattern=["other", "fla"])
    lm(torch.randint(0, 31, (1, 5)), torch.randint(0, 31, (1, 5))).backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())
    assert [name for name, _ in lm.named_parameters() if "v_lora.weight" in name] == [
        "blocks.3.mixer.layer.v_lora.weight"
    ]


@pytest.mark.parametrize("kind", [RunningSum], indirect=True)
def test_a_state_is_measured_in_any_dtype_of_the_weights(kind):
    """A float32 model generates under bf16 autocast; a run's facts count in float32, also of a model in bf16."""
    mixer = FlaLayer(16, 0, 1, layer="RunningSum")
    assert mixer.state_bytes(5, torch.bfloat16) == 2 * 16
    assert mixer.bfloat16().state_bytes(5, torch.float32) == 4 * 16


@pytest.mark.parametrize("kind", [Refusing], indirect=True)
def test_a_layer_without_the_cache_of_its_signature_says_so(kind):
    lm = SequenceLM(31, 16, 1, {"fla": partial(FlaLayer, layer="Refusing")})
    assert lm.state_elements(8) is None
    with pytest.raises(UserError, match="fla's Refusing refuses this call: no cache here"):
        lm(torch.randint(0, 31, (1, 5)), state=lm.init_state(1, 5, "cpu", torch.float32))


LAYERS = {
    "GatedLinearAttention": {"num_heads": 2},
    "HGRN2Attention": {"expand_ratio": 32},
    "MultiScaleRetention": {"num_heads": 2},
    "ForgettingAttention": {"num_heads": 2},
    "Comba": {"num_heads": 2, "head_dim": 32},
    "GatedSlotAttention": {"num_heads": 2},
    "GatedDeltaProduct": {"num_heads": 2, "head_dim": 32},
    "PaTHAttention": {"num_heads": 2},
    "RWKV7Attention": {"head_dim": 32},
    "KimiDeltaAttention": {"num_heads": 2, "head_dim": 32},
}


def test_options_are_those_of_the_layer():
    mixer = FlaLayer(64, 1, 2, layer="GatedLinearAttention", options={"num_heads": 2, "expand_k": 1.0})
    layer = mixer.layer
    assert (layer.num_heads, layer.key_dim, layer.hidden_size, layer.layer_idx) == (2, 64, 64, 1)
    assert mixer.capabilities == {"decode", "packed"}
    assert mixer.flops_counted
    assert mixer.flops_per_token(100) >= 2 * sum(p.numel() for p in mixer.parameters() if p.dim() > 1)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_tested_layer_takes_its_options(layer):
    assert FlaLayer(64, 0, 2, layer=layer, options=LAYERS[layer]).name == layer


@pytest.mark.parametrize(
    ("layer", "options", "message"),
    [
        ("GatedLinearAttentoin", {}, "unknown layer of fla 'GatedLinearAttentoin': did you mean GatedLinearAttention"),
        ("GatedLinearAttention", {"n_heads": 2}, "has no option 'n_heads': did you mean num_heads"),
        ("YOCOCrossAttention", {}, "unknown layer of fla"),
        ("LogLinearMamba2", {}, "needs the option num_heads"),
        ("KimiDeltaAttention", {"head_dim": 3, "expand_v": 0.5}, "refuses hidden_size=64 with"),
        ("HGRN2Attention", {}, "refuses hidden_size=64 with {}: integer modulo by zero"),
        ("HGRN2Attention", {"num_heads": 4, "expand_ratio": 32}, "takes num_heads=2, not 4: another option decides it"),
    ],
)
def test_refusals(layer, options, message):
    with pytest.raises(UserError, match=message):
        FlaLayer(64, 0, 2, layer=layer, options=options)


def test_it_needs_a_gpu_and_says_so_in_a_sentence():
    mixer = FlaLayer(64, 0, 2, layer="GatedLinearAttention", options={"num_heads": 2})
    with pytest.raises(UserError, match="GatedLinearAttention by fla's kernels, which need a CUDA GPU, not cpu"):
        mixer(torch.randn(1, 4, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_decoding_and_packing_equal_the_whole_sequence(layer):
    torch.manual_seed(0)
    mixer = FlaLayer(64, 0, 2, layer=layer, options=LAYERS[layer]).cuda().bfloat16().eval()
    x = torch.randn(1, 96, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        whole = mixer(x)
        if "decode" in mixer.capabilities:
            state = mixer.init_state(1, 96, "cuda", torch.bfloat16)
            pieces = torch.cat([mixer(x[:, :80], state=state), mixer(x[:, 80:], state=state)], dim=1)
            torch.testing.assert_close(pieces, whole, rtol=0.05, atol=0.05)
            assert sum(tensor.nbytes for tensor in state.tensors()) == mixer.state_bytes(96)
        if "packed" in mixer.capabilities:
            borders = torch.tensor([0, 40, 96], dtype=torch.int32, device="cuda")
            alone = torch.cat([mixer(x[:, :40]), mixer(x[:, 40:])], dim=1)
            torch.testing.assert_close(mixer(x, cu_seqlens=borders), alone, rtol=0.05, atol=0.05)
