"""Recipes with DeltaNet and Based: the parameters of a model are the sum of its published parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seqarch.experiment.experiment import Experiment

RECIPES = Path(__file__).parents[2] / "recipes"
D, VOCABULARY = 768, 32000

# Query, key, value and output; beta of 8 heads; convolutions of 4 taps; the norm of heads of 96.
DELTA_NET = 4 * D * D + 8 * D + 3 * 4 * D + 96
# Query and key of 6 x 96, value, gate and output of twice that; beta and decay of 6 heads with A and its bias;
# convolutions of 4 taps; the norm of heads of 192. The paper's 12 layers of 6 D^2 parameters make 124M, 13 % above the
# name.
KEYS = 6 * 96
GATED_DELTA_NET = 2 * KEYS * D + 3 * 2 * KEYS * D + 2 * 6 * D + 2 * 6 + 4 * 4 * KEYS + 192
# Query and key of 12 x 16, value and output.
TAYLOR = 2 * 12 * 16 * D + 2 * D * D
# Two halves of 2 D and back, with biases; 3 taps.
CONVOLUTION = D * 4 * D + 4 * D + 3 * 2 * D + 2 * D * D + D
ATTENTION = 4 * D * D


def model(mixers: list[int], hidden: int) -> int:
    """Tied embeddings, the last norm, and blocks of a mixer, a gated MLP and two norms."""
    return VOCABULARY * D + D + sum(mixers) + len(mixers) * (3 * D * hidden + 2 * D)


SIZES = [
    ("delta_net_110m", model(12 * [DELTA_NET], 2048), 0.12),
    ("gated_delta_net_110m", model(12 * [GATED_DELTA_NET], 2048), 0.13),
    ("hybrid_gated_delta_net_top1_chunk_110m", model(9 * [GATED_DELTA_NET] + 3 * [ATTENTION], 2048), 0.12),
    ("based_110m", model(3 * [TAYLOR] + 3 * [ATTENTION] + 9 * [CONVOLUTION], 1536), 0.12),
]


def count(recipe: str) -> int:
    return Experiment.from_recipe(recipe).build_on_meta().n_parameters()


@pytest.mark.parametrize(("recipe", "parameters", "margin"), SIZES)
def test_the_recipe_has_the_published_parts(recipe: str, parameters: int, margin: float) -> None:
    assert count(recipe) == parameters
    assert parameters == pytest.approx(110e6, rel=margin)


@pytest.mark.parametrize(
    ("recipe", "name", "options"),
    [
        ("delta_net_110m", "DeltaNet", {"num_heads": 8}),
        ("gated_delta_net_110m", "GatedDeltaNet", {"num_heads": 6, "head_dim": 96}),
    ],
)
def test_the_recipe_is_as_large_as_the_model_of_fla(recipe: str, name: str, options: dict[str, int]) -> None:
    models = pytest.importorskip("fla.models")
    sizes = {"hidden_size": D, "num_hidden_layers": 12, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    config = getattr(models, f"{name}Config")(**sizes, **options)
    with torch.device("meta"):
        published = getattr(models, f"{name}ForCausalLM")(config)
    assert count(recipe) == sum(parameter.numel() for parameter in published.parameters())
