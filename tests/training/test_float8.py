"""FP8 matrix products while training. Tests of their results need torchao, tests of refusals do not."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.load import module_of
from seqarch.mixers.attention import Attention
from seqarch.training import LanguageModel
from seqarch.training.float8 import check_float8, takes_float8

ROOT = Path(__file__).parents[2]
ATTENTION = {"class_path": "Attention", "init_args": {"n_heads": 4}}
OPTIONS = {"vocab_size": 64, "d_model": 512, "n_layers": 1, "mixers": {"m": ATTENTION}}


def module(float8, **options):
    torch.manual_seed(0)
    built = LanguageModel(
        **{**OPTIONS, "mixers": {"m": lambda d, i, n: Attention(d, i, n, n_heads=4)}, **options}, float8=float8
    )
    built.configure_model()
    return built


def trainer(precision="bf16-mixed", device="cuda", batch_size=4, sequence_length=4) -> Any:
    data = SimpleNamespace(batch_size=lambda world_size: batch_size, sequence_length=sequence_length)
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(precision=precision, strategy=strategy, datamodule=data, world_size=1)


@pytest.mark.parametrize(
    ("inputs", "outputs", "taken"),
    [
        (768, 2304, True),
        (2048, 2048, True),
        (8192, 1024, True),
        (768, 768, False),  # slower than in bf16
        (2048, 1024, False),
        (128, 4096, False),  # the step of a Mamba-1
        (4096, 160, False),
        (768, 3352, False),  # no multiple of 16
        (5456, 2048, True),
        (5460, 2048, False),
    ],
)
def test_which_layers_multiply_in_fp8(inputs, outputs, taken):
    assert takes_float8(nn.Linear(inputs, outputs, device="meta")) is taken


@pytest.mark.parametrize(
    ("options", "capability", "message"),
    [
        ({"precision": "32-true"}, (9, 0), "needs trainer.precision bf16-mixed, not 32-true"),
        ({"precision": "bf16-true"}, (9, 0), "bf16-mixed, not bf16-true"),
        ({"device": "cpu"}, (9, 0), "needs a GPU that multiplies in FP8"),
        ({}, (8, 6), "needs a GPU that multiplies in FP8"),
        ({"batch_size": 3}, (9, 0), "needs a multiple of 16 tokens at once, not 12"),
    ],
)
def test_what_cannot_train_in_fp8_is_refused(monkeypatch, options, capability, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError, match=message):
        check_float8(trainer(**options))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_a_gpu_with_fp8_may_train(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_float8(trainer())


def test_without_torchao_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UserError, match=r"needs torchao: pip install 'seqarch\[float8\]'"):
        module("tensorwise")


def test_a_checkpoint_of_a_training_in_fp8_is_read_without_torchao(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    weights = module(None).state_dict()
    read = module_of({"hyper_parameters": {**OPTIONS, "float8": "tensorwise"}})
    read.load_state_dict(weights)
    assert read.lm is not None
    assert {type(layer) for layer in read.lm.modules() if isinstance(layer, nn.Linear)} == {nn.Linear}


def test_a_model_of_small_layers_is_refused():
    pytest.importorskip("torchao.float8")
    with pytest.raises(UserError, match="no linear layer here is large enough"):
        module("tensorwise", d_model=64)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_in_fp8_rounds_only_large_layers(scaling, checkpointing):
    """torch also multiplies in FP8 on a CPU. e5m2 has two bits of mantissa, so products are off by some per cent."""
    pytest.importorskip("torchao.float8")
    plain, rounded = module(None), module(scaling, activation_checkpointing=checkpointing)
    rounded.load_state_dict(plain.state_dict())
    kinds = {name: type(layer).__name__ for name, layer in rounded.named_modules() if isinstance(layer, nn.Linear)}
    assert kinds == {"lm.blocks.0.mixer.qkv": "Float8Linear", "lm.blocks.0.mixer.out": "Linear", "lm.head": "Linear"}
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    for each in (plain, rounded):
        with torch.autocast("cpu", torch.bfloat16):
            each(tokens).backward()
    for (name, weight), expected in zip(rounded.named_parameters(), plain.parameters(), strict=True):
        assert weight.grad is not None
        assert expected.grad is not None
        assert weight.dtype == weight.grad.dtype == torch.float32
        error = (weight.grad - expected.grad).norm() / expected.grad.norm()
        assert error < 0.15, name
        if name == "lm.blocks.0.mixer.qkv.weight":
            assert error > 1e-3


def share(recipe: str) -> float:
    """Weights in layers that FP8 takes, over all weights in linear layers of the blocks."""
    built = Experiment.from_recipe(ROOT / f"recipes/{recipe}.yaml").model
    with torch.device("meta"):
        built.configure_model()
    assert built.lm is not None
    layers = [layer for layer in built.lm.blocks.modules() if isinstance(layer, nn.Linear)]
    taken = sum(layer.weight.numel() for layer in layers if takes_float8(layer))
    return taken / sum(layer.weight.numel() for layer in layers)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [("transformer_pp_1b", 1.0), ("mamba1_1b", 0.96), ("rwkv7_110m", 0.31), ("mamba2_110m", 0.0)],
)
def test_shares_of_weights_that_fp8_takes(recipe: str, expected: float):
    assert share(recipe) == pytest.approx(expected, abs=0.005)
