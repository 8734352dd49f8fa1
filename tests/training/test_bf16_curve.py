"""A model trained as on a GPU (compiled, in bf16, with the fastest kernels) learns like the float32 reference."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from seqarch.exam.derive import find_model, load_size
from seqarch.experiment.experiment import Experiment
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.model import SequenceLM
from tests.texts import prose

MIXERS = sorted(entry.name for entry in mixer_entries() if entry.package == "seqarch")
SHELL = "RWKV7Shell"
"""It needs a core, so it has the options of its recipe."""


@functools.cache
def text() -> torch.Tensor:
    """Drawn where a test runs: it takes a second."""
    return torch.tensor(list("\n".join(prose(60)).encode()[:200_000]))


@functools.cache
def recipe_of(mixer: str, size: str) -> dict[str, Any]:
    options = {"trainer.accelerator": "cpu", "trainer.precision": "32-true", "model.n_layers": "2"}
    word = "rwkv7_shell_softmax_100k" if mixer == SHELL else mixer
    return find_model(load_size(size, options), word, {})[1]


def build(mixer: str, size: str, *, reference: bool) -> SequenceLM:
    """Two layers (or one repetition of the pattern) at the shapes of a size, in the mixer's published shell."""
    recipe = copy.deepcopy(recipe_of(mixer, size))
    recipe["model"] |= {"vocab_size": 257, "compile": False}
    for each in recipe["model"]["mixers"].values():
        if reference and "backend" in inspect.signature(load_mixer(each["class_path"].rpartition(".")[2])).parameters:
            each["init_args"]["backend"] = "reference"
    torch.manual_seed(0)
    return Experiment.from_recipe(recipe).model.build()


def loss_of(lm: SequenceLM, batch: torch.Tensor, *, bf16: bool) -> torch.Tensor:
    with torch.autocast(batch.device.type, dtype=torch.bfloat16) if bf16 else nullcontext():
        return lm(batch[:, :-1], batch[:, 1:])


def train(lm: SequenceLM, steps: int, length: int, *, bf16: bool, device: str) -> Iterator[tuple[torch.Tensor, float]]:
    """The batch of each step and its loss in nats per byte, before the step changes the weights.

    Batches are random windows of text. All models see the same windows.
    """
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text()) - length - 1, (8,), generator=random)
        batch = torch.stack([text()[start : start + length + 1] for start in starts]).to(device)
        loss = loss_of(lm, batch, bf16=bf16)
        yield batch, float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
        optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", MIXERS)
def test_compiled_bf16_training_follows_the_float32_reference(mixer: str) -> None:
    """50 steps at the shapes of `draft`, 512 bytes per sequence. Both losses fall by nats, hundredths apart.

    The first five losses are compared at the reference's weights. On courses of their own, those of Top1Element part by
    up to 0.12, because rounding decides between keys with nearly equal scores.
    """
    torch._dynamo.reset()
    reference = build(mixer, "draft", reference=True).to("cuda")
    fast = build(mixer, "draft", reference=False).to("cuda")
    start = copy.deepcopy(reference.state_dict())
    fast.compile_parts()
    exact = []
    for batch, loss in train(reference, 50, 512, bf16=False, device="cuda"):
        exact.append(loss)
        if len(exact) <= 5:
            fast.load_state_dict(reference.state_dict())
            assert abs(float(loss_of(fast, batch, bf16=True).detach()) - loss) < 0.02
    fast.load_state_dict(start)
    found = [loss for _, loss in train(fast, 50, 512, bf16=True, device="cuda")]
    assert np.mean(exact[-5:]) < exact[0] - 1.5
    assert np.abs(np.subtract(found, exact)).mean() < 0.04


@pytest.mark.parametrize("mixer", ["Attention", "DeltaNet"])
def test_bf16_training_follows_float32_for_three_steps_on_a_cpu(mixer: str) -> None:
    reference, other = (build(mixer, "tiny", reference=True) for _ in range(2))
    exact, found = (
        np.array([loss for _, loss in train(lm, 3, 64, bf16=lm is other, device="cpu")]) for lm in (reference, other)
    )
    assert exact[-1] < exact[0] - 0.05
    assert not np.array_equal(exact, found)
    assert np.abs(found - exact).max() < 0.01
