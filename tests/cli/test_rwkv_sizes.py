"""RWKV's recipes: the parameters of a model are the sum of its published parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from seqarch.experiment.experiment import Experiment

RECIPES = Path(__file__).parents[2] / "recipes"
D, LAYERS, VOCABULARY = 768, 12, 32000
NORM = 2 * D

# Five projections; four mixes, decay and bonus; the group norm.
RWKV5 = 5 * D * D + 6 * D + NORM
# Two more mixes; ranks 5 * 32 of the token shift and 64 of the decay, down and up.
RWKV6 = RWKV5 + 2 * D + 2 * (5 * 32 + 64) * D
# Receptance, key and value of 3.5 times the width; two mixes.
GATED_CHANNEL_MIX = D * D + 2 * D * 2688 + 2 * D
# Four projections; ranks 128 of the gate, 64 of decay and rate with their biases; six mixes, two scales, the bonus; the
# group norm. Layers after the first have a value gate of rank 32 with a bias.
RWKV7 = 4 * D * D + 2 * (128 + 64 + 64) * D + 2 * D + 9 * D + NORM
VALUE_GATES = (LAYERS - 1) * (2 * 32 * D + D)
CHANNEL_MIX = 8 * D * D + D


def model(time_mix: int, channel_mix: int, embeddings: int) -> int:
    """Embeddings, the norms of the embedding and the end, and the blocks with two norms each."""
    return embeddings * VOCABULARY * D + 2 * NORM + LAYERS * (time_mix + channel_mix + 2 * NORM)


@pytest.mark.parametrize(
    ("recipe", "parameters", "millions"),
    [
        ("rwkv5_110m", model(RWKV5, GATED_CHANNEL_MIX, 1), 110),
        ("rwkv6_110m", model(RWKV6, GATED_CHANNEL_MIX, 1), 110),
        ("rwkv7_110m", model(RWKV7, CHANNEL_MIX, 1) + VALUE_GATES, 110),
        ("rwkv7_100k", model(RWKV7, CHANNEL_MIX, 2) + VALUE_GATES, 135),
    ],
)
def test_the_recipe_has_the_published_parts(recipe: str, parameters: int, millions: int) -> None:
    assert Experiment.from_recipe(recipe).build_on_meta().n_parameters() == parameters
    assert parameters == pytest.approx(millions * 1e6, rel=0.12)
