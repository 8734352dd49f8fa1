"""The reference of every verdict, written out: what Transformer++ computes, how it starts, and how it is trained."""

import math

import pytest
import torch
from torch.nn import functional as F

from seqarch.experiment.experiment import Experiment
from seqarch.mixers.attention import Attention
from seqarch.model import GELUMLP, GeGLU, SequenceLM
from seqarch.training import LanguageModel

D_MODEL, HEADS, HEAD_DIM = 16, 2, 8


def attention(**options) -> Attention:
    torch.manual_seed(0)
    return Attention(D_MODEL, 0, 2, n_heads=HEADS, **options).double()


def rotated(x: torch.Tensor, base: float) -> torch.Tensor:
    """RoPE of `x [T, H, D]` with complex numbers: pair i turns by `position * base^(-2 i / D)`."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0, 10.0])
def test_attention_turns_queries_and_keys_by_its_own_base(base):
    mixer = attention(position="rope", rope_base=base)
    x = torch.randn(1, 50, D_MODEL, dtype=torch.float64)
    q, k, v = mixer.qkv(x)[0].chunk(3, dim=-1)
    q, k, v = (part.view(50, HEADS, HEAD_DIM) for part in (q, k, v))
    scores = torch.einsum("ihd,jhd->hij", rotated(q, base), rotated(k, base)) / HEAD_DIM**0.5
    weights = scores.masked_fill(torch.ones(50, 50).triu(1).bool(), -math.inf).softmax(dim=-1)
    expected = mixer.out(torch.einsum("hij,jhd->ihd", weights, v).flatten(1))
    torch.testing.assert_close(mixer(x)[0], expected)


def test_geglu_gates_by_gelu():
    layer = GeGLU(D_MODEL, 0, 2)
    x = torch.randn(5, D_MODEL)
    expected = layer.down(F.gelu(layer.gate(x), approximate="tanh") * layer.up(x))
    torch.testing.assert_close(layer(x), expected)


def test_projections_into_the_residual_stream_start_smaller_by_depth():
    torch.manual_seed(0)
    for layers in (2, 8):
        wide = Attention(256, 0, layers, n_heads=4), GeGLU(256, 0, layers), GELUMLP(256, 0, layers)
        for written in (wide[0].out, wide[1].down, wide[2].down):
            assert float(written.weight.detach().std()) == pytest.approx(0.02 / (2 * layers) ** 0.5, rel=0.05)
        for read in (wide[0].qkv, wide[1].gate, wide[1].up, wide[2].up):
            assert float(read.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_learned_positions_are_added_by_position():
    lm = SequenceLM(31, D_MODEL, 1, {"attention": lambda d, i, n: Attention(d, i, n, n_heads=2)}, learned_positions=9)
    tokens = torch.full((1, 9), 3)
    assert lm.positions is not None
    seen: list[torch.Tensor] = []
    lm.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    lm(tokens)
    torch.testing.assert_close(seen[0][0], lm.embedding.weight[3] + lm.positions.weight)


def test_adamw_takes_the_options_of_the_model():
    mixers = {"attention": lambda d, i, n: Attention(d, i, n, n_heads=2)}
    model = LanguageModel(vocab_size=31, d_model=16, n_layers=1, mixers=mixers, betas=(0.8, 0.7), learning_rate=0.03)
    model.configure_model()
    matrices, vectors = model.new_optimizer().param_groups
    assert (matrices["betas"], matrices["lr"], matrices["weight_decay"]) == ((0.8, 0.7), 0.03, 0.1)
    assert (matrices["eps"], vectors["eps"]) == (1e-8, 1e-8)
    assert (vectors["betas"], vectors["lr"], vectors["weight_decay"]) == ((0.8, 0.7), 0.03, 0.0)


@pytest.mark.parametrize(
    ("recipe", "rate", "warmup", "sequences", "length"),
    [
        ("transformer_pp_110m", 2e-4, 2500, 256, 2048),
        ("transformer_pp_1b", 5e-5, 5000, 128, 2048),
        ("rwkv7_shell_softmax_100k", 2e-4, 2500, 8, 102_400),
    ],
)
def test_recipes_train_as_the_paper_does(recipe, rate, warmup, sequences, length):
    """arXiv 2505.18522, table of training settings: betas (0.9, 0.95), 100B tokens; decay and clipping are ours."""
    config = Experiment.from_recipe(recipe).config
    model, data, trainer = config["model"], config["data"], config["trainer"]
    assert (model["learning_rate"], model["warmup_steps"], model["weight_decay"]) == (rate, warmup, 0.1)
    assert list(model["betas"]) == [0.9, 0.95]
    assert (data["sequences_per_step"], data["sequence_length"]) == (sequences, length)
    assert trainer["max_steps"] * sequences * length == pytest.approx(100e9, rel=1e-4)
    assert trainer["gradient_clip_val"] == 1.0
