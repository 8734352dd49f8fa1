"""Every model of the paper, and every hybrid, trains from its recipe at a reduced size."""

from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from seqarch.bench.training_step import draw_tokens
from seqarch.cli.recipes import expand_recipes
from seqarch.cli.training import TrainingCLI
from seqarch.mixers.based import GROUP

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml") if not path.stem.startswith("quickstart"))
STEPS, LENGTH = 8, 48


@pytest.fixture(scope="module")
def parser():
    return TrainingCLI(["--config", str(RECIPES / "quickstart.yaml")], run=False).parser


def shorten(options):
    """Make windows and chunks of mixers, and of cores in them, shorter than the sequences."""
    for key, value in vars(options).items():
        if key in ("window", "chunk_size") and value is not None:
            options[key] = LENGTH // 3
        elif isinstance(value, Namespace):
            shorten(value)


@pytest.fixture
def module(parser, request):
    """The LightningModule of a recipe, small."""
    config = parser.parse_args(expand_recipes(["--config", str(RECIPES / f"{request.param}.yaml")]))
    model = config.model
    heads = max(mixer.init_args.get("n_heads") or 4 for mixer in model.mixers.values())
    kinds = {mixer.class_path.rpartition(".")[2] for mixer in model.mixers.values()}
    layers = len(GROUP) if kinds == {"Based"} else len(model.pattern or ["first", "later"])
    model.update(Namespace(vocab_size=257, d_model=8 * heads, n_layers=layers, learning_rate=3e-3, compile=False))
    for mixer in model.mixers.values():
        shorten(mixer.init_args)
    torch.manual_seed(0)
    module = parser.instantiate_classes(config).model
    module.configure_model()
    return module


@pytest.mark.no_cover
@pytest.mark.parametrize("module", NAMES, indirect=True)
def test_the_loss_of_one_batch_falls_and_every_parameter_has_a_gradient(module):
    optimizer, tokens = module.adamw(), draw_tokens(257, 4, LENGTH, torch.device("cpu"))
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
