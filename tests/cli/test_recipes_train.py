"""Every kind of model, by the options of its mixers, trains from its recipe at a reduced size."""

import json

import pytest
import torch

from seqarch.bench.training_step import draw_tokens
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.recipes import merged_recipe
from seqarch.mixers.based import GROUP
from tests.cli.test_recipes import RECIPES, one_of_each_kind, without_numbers

pytestmark = pytest.mark.commands

STEPS, LENGTH = 8, 24


def shorten(tree):
    """Make windows and chunks of mixers and their cores shorter than the sequences."""
    for key, value in tree.items():
        if key in ("window", "chunk_size") and value is not None:
            tree[key] = LENGTH // 3
        elif isinstance(value, dict):
            shorten(value)


def kind(recipe):
    """The mixers without their names and numbers, the pattern of a hybrid, and the feed-forward layer."""
    model = recipe["model"]
    mixers = [*model["mixers"].values()]
    return json.dumps(without_numbers([mixers, model.get("pattern"), model["feed_forward"]]), sort_keys=True)


@pytest.fixture
def module(request):
    """The LightningModule of a recipe, small."""
    recipe = merged_recipe(RECIPES / request.param)
    model = recipe["model"]
    heads = max(mixer["init_args"].get("n_heads", 4) for mixer in model["mixers"].values())
    model["pattern"] = list(dict.fromkeys(model.get("pattern") or [])) or None  # one layer of each kind
    kinds = {mixer["class_path"].rpartition(".")[2] for mixer in model["mixers"].values()}
    layers = len(GROUP) if kinds == {"Based"} else len(model["pattern"] or ["first", "later"])
    model |= {"vocab_size": 257, "d_model": 8 * heads, "n_layers": layers, "learning_rate": 3e-3, "compile": False}
    shorten(model["mixers"])
    module = Experiment.from_recipe(recipe).model
    module.configure_model()
    return module


@pytest.mark.no_cover
@pytest.mark.parametrize("module", one_of_each_kind(kind), indirect=True)
def test_the_loss_of_one_batch_falls_and_every_parameter_has_a_gradient(module):
    optimizer, tokens = module.new_optimizer(), draw_tokens(257, 4, LENGTH, torch.device("cpu"))
    losses = []
    for _ in range(STEPS):
        loss = module(tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    assert losses[-1] < losses[0] - 0.5, losses
    assert [name for name, parameter in module.named_parameters() if not parameter.grad.any()] == []
