"""A recipe names SquaredReLU by its module, and a shell and a position encoding by their classes."""

from pathlib import Path

import pytest
import torch
from seqarch_zoo.squared_relu import SquaredReLU

from seqarch import Experiment


def test_formula_and_cost():
    layer, x = SquaredReLU(8, 0, 2, hidden=12), torch.randn(3, 8)
    hidden = (x @ layer.up.weight.T).clamp_min(0)
    torch.testing.assert_close(layer(x), hidden**2 @ layer.down.weight.T)
    assert layer.flops_per_token() == 2 * 2 * 8 * 12


@pytest.mark.parametrize("recipe", ["squared_relu", "seqpe", "seqpe_attention", "gated_attention", "xlstm_7_1"])
def test_recipes_of_parts_parse_and_their_models_run(recipe):
    lm = Experiment.from_recipe(Path(__file__).parents[1] / "recipes" / f"{recipe}.yaml").model.build()
    tokens = torch.randint(0, 257, (1, 16))
    assert lm(tokens[:, :-1], tokens[:, 1:]).isfinite()
