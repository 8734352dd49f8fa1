"""`model.base_width`: with it the best learning rate stays the same at all widths, so nothing grows with the width.

The coordinate check of Yang et al. 2022, arXiv 2203.03466, appendix D.1: the size of activations at the start and after
some steps, and of their change, as a power of the width. What is random in a step shrinks and leaves the rest at 0.
"""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

from seqarch.errors import UserError
from seqarch.mixers.base import Mixer
from seqarch.mixers.registry import load_mixer
from seqarch.model.block import Block
from seqarch.model.feed_forward import GeGLU, RWKVChannelMix
from seqarch.training import LanguageModel, optimizers
from seqarch.training import module as training
from seqarch.training.optimizers import Muon

BASE, STEPS, V, RATE = 64, 3, 64, 1e-2
MODELS = {
    "Attention": (lambda width: {"n_heads": width // 16}, {}),
    "Mamba2": (lambda width: {"head_dim": 16, "d_state": 16}, {"feed_forward": None}),
    "RWKV7": (
        lambda width: {"n_heads": width // 16},
        {"feed_forward": RWKVChannelMix, "norm": "layernorm", "embedding_norm": True},
    ),
    "DeltaNet": (lambda width: {"n_heads": width // 16}, {"tie_embeddings": False}),
}


WRONG = [
    ("Attention", "mixer.qkv", "initial"),
    ("Attention", "mixer.qkv", "rate"),
    ("Attention", "mixer.out", "initial"),
    ("Attention", "mixer.out", "rate"),
    ("Attention", "feed_forward", "initial"),
    ("Attention", "feed_forward", "rate"),
    ("Attention", "norm.weight", "initial"),
    ("Attention", "norm.weight", "rate"),
    ("Mamba2", "in_proj", "rate"),
    ("Mamba2", "out_proj", "rate"),
    ("DeltaNet", "qkv", "initial"),
    ("DeltaNet", "qkv", "rate"),
    ("DeltaNet", "beta", "rate"),
    ("RWKV7", "mixer.value.", "rate"),
    ("RWKV7", "mixer.gate.up", "initial"),
    ("RWKV7", "mixer.gate.up", "rate"),
    ("RWKV7", "mixer.gate.down", "rate"),
    ("RWKV7", "embedding.weight", "initial"),
]


def module(name, width, optimizer=None, **options) -> Any:
    heads, model = MODELS[name]
    mixer = functools.partial(load_mixer(name), **heads(width))
    torch.manual_seed(0)
    made = LanguageModel(
        vocab_size=V,
        d_model=width,
        n_layers=2,
        mixers={"mixer": mixer},
        **{"feed_forward": GeGLU, **model},
        optimizer=optimizer,
        learning_rate=RATE,
        **options,
    )
    made.configure_model()
    return made


def rows():
    return torch.randint(0, V, (2, 17), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def activations(made):
    """What comes out of the layers, and the weight of the last norm as many times as the rule makes it smaller."""
    parts = {name: part for name, part in made.lm.named_modules() if isinstance(part, nn.Linear | Block | Mixer)}
    del parts["head"]  # the logits
    parts |= {"embedding_norm": made.lm.embedding_norm} if made.lm.embedding_norm else {}
    found = {}
    hooks = [part.register_forward_hook(functools.partial(keep, found, name)) for name, part in parts.items()]
    found["logits"] = made.lm(rows()[:, :-1])
    for hook in hooks:
        hook.remove()
    found["gain"] = made.lm.norm.weight * made.lm.d_model / (made.base_width or made.lm.d_model)
    return found


def keep(found, name, _, __, output):
    found[name] = (output[0] if isinstance(output, tuple) else output).clone()


def train(made, steps=STEPS):
    optimizer = made.new_optimizer()
    for _ in range(steps):
        optimizer.zero_grad()
        made(rows()).backward()
        optimizer.step()


def sizes(name, optimizer, base_width, width):
    """The size of activations at the start and after some steps, and of their changes."""
    made = module(name, width, optimizer, base_width=base_width)
    before = activations(made)
    train(made)
    after = activations(made)
    seen = {f"{key} before": each for key, each in before.items() if key != "gain"}
    seen |= {f"{key} after": each for key, each in after.items()}
    seen |= {f"{key} changed": each - before[key] for key, each in after.items()}
    return {key: float(each.square().mean().sqrt()) for key, each in seen.items()}


@functools.cache
def at_base(name, optimizer):
    """The sizes at the base width, where all factors of AdamW are 1, as a test below says."""
    return sizes(name, optimizer, BASE, BASE)


def powers(name, optimizer, base_width, wide=256):
    """The power of the width with which these sizes grow from the base width to a `wide` model."""
    wider = sizes(name, optimizer, base_width, wide)
    ratios = {key: wider[key] / each for key, each in at_base(name, optimizer).items() if each}
    return {key: math.log(each) / math.log(wide / BASE) for key, each in ratios.items()}


def wrong_ones(found):
    """The activations that grow, or whose start or sum over blocks depends on the width."""
    bounds = {"before": (-0.2, 0.1), "after": (-0.65, 0.15), "changed": (-0.65, 0.15)}
    whole = {f"{name} {when}": (-0.3, 0.15) for name in ("blocks.1", "logits", "gain") for when in ("after", "changed")}
    limits = {key: whole.get(key, bounds[key.split()[1]]) for key in found} | {"logits before": (-0.65, 0.1)}
    return {key: each for key, each in found.items() if not limits[key][0] < each < limits[key][1]}


@pytest.mark.parametrize("optimizer", [None, Muon], ids=["AdamW", "Muon"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_activations_and_their_changes_keep_their_size(name, optimizer, monkeypatch):
    in_bf16 = optimizers.orthogonalise  # a processor takes ten times as long for products of bf16 as of float32
    monkeypatch.setattr(optimizers, "orthogonalise", lambda x, *args: in_bf16(x.float(), *args).to(x.dtype))
    found = powers(name, optimizer, BASE, wide=128 if optimizer else 256)
    assert not wrong_ones(found)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_without_the_rule_they_grow(name):
    found = powers(name, None, None)
    assert min(found["blocks.1 changed"], found["logits changed"]) > 0.3, found


@pytest.mark.parametrize(("name", "part", "factor"), WRONG)
def test_a_factor_that_is_wrong_shows(name, part, factor, monkeypatch):
    right = training.transfer_factors

    def wrong(*args):
        found = right(*args)
        changed = [key for key in found if part in key]
        assert changed
        return found | {key: found[key]._replace(**{factor: 1.0}) for key in changed}

    monkeypatch.setattr(training, "transfer_factors", wrong)
    assert wrong_ones(powers(name, None, BASE))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_at_the_base_width_nothing_changes(name):
    plain, same = module(name, BASE), module(name, BASE, base_width=BASE)
    for made in (plain, same):
        train(made)
    assert all(torch.equal(each, same.lm.state_dict()[key]) for key, each in plain.lm.state_dict().items())


def test_no_factor_is_left_in_the_model():
    """Export, import and evaluation need not know the rule."""
    made, plain = module("Attention", 128, base_width=BASE), module("Attention", 128)
    train(made)
    plain.lm.load_state_dict(made.lm.state_dict())
    assert torch.equal(plain.lm(rows()), made.lm(rows()))


def test_weights_decay_alike_at_all_widths_and_the_first_rate_is_the_run_s():
    for optimizer in (None, Muon):
        groups = module("RWKV7", 256, optimizer, base_width=BASE).new_optimizer().param_groups
        assert groups[0]["lr"] == RATE
        assert len({group["lr"] for group in groups}) > 2
        decays = [group["lr"] * group["weight_decay"] for group in groups if group["weight_decay"]]
        assert decays == pytest.approx([0.1 * RATE] * len(decays))


def test_a_square_matrix_takes_the_step_of_muon_at_the_base_width():
    plain, same = module("Attention", BASE, Muon), module("Attention", BASE, Muon, base_width=BASE)
    start = plain.lm.blocks[0].mixer.out.weight.detach().clone()
    for made in (plain, same):
        train(made, steps=1)
    ours, theirs = (made.lm.blocks[0].mixer.out.weight.detach() - start for made in (same, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * float(theirs.abs().max()))  # steps in bf16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model.base_width": 0}, "model.base_width must be at least 1, not 0"),
        ({"model.optimizer": "SGD"}, "model.base_width has a rule for AdamW, Adam and Muon, not for SGD"),
        (
            {"model.optimizer": "{class_path: Muon, init_args: {adjust_lr_fn: original}}"},
            "base_width chooses adjust_lr_fn",
        ),
    ],
)
def test_what_the_rule_cannot_do_is_said_in_a_line(fit, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        fit(**{"model.base_width": 16, **options})
    assert not (tmp_path / "run").exists()
