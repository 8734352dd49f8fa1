"""A mixer adds a loss: in the training loss however a step is computed, logged by name, in no hold-out loss."""

from __future__ import annotations

import copy
import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from seqarch.data.packing import NO_TARGET, as_documents
from seqarch.errors import UserError
from seqarch.mixers.base import Losses, Mixer
from seqarch.mixers.rwkv7 import RWKV7Shell
from seqarch.model import GeGLU, SequenceLM
from seqarch.testing import MixerSuite
from seqarch.training import fsdp
from seqarch.training.module import LanguageModel


class Balanced(Mixer):
    """Sums values by two experts, and adds a loss for uneven use and one for large choices."""

    capabilities = frozenset({"packed"})

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, weight: float = 0.1) -> None:
        super().__init__(d_model, layer_idx, n_layers)
        self.weight = weight
        self.router, self.experts = nn.Linear(self.d_model, 2), nn.Linear(self.d_model, 2 * self.d_model)
        self.guess = nn.Linear(self.d_model, 1)  # which only the loss uses

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, losses: Losses | None = None) -> Tensor:
        share = self.router(x).softmax(dim=-1)
        if losses is not None:
            losses["balance"] = self.weight * share.mean(dim=(0, 1)).square().sum()
            losses["guess"] = self.weight * self.guess(x).square().mean()
        return (self.experts(x).unflatten(-1, (2, -1)) * share[..., None]).sum(dim=-2)


class TestBalanced(MixerSuite):
    mixer = Balanced


class Drawn(Balanced):
    """Adds a loss that draws random numbers."""

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, losses: Losses | None = None) -> Tensor:
        if losses is not None:
            losses["drawn"] = (self.guess.weight * torch.randn_like(self.guess.weight)).mean()
        return super().forward(x, cu_seqlens=cu_seqlens, losses=losses)


def build(weight: float = 0.1, **options: Any) -> SequenceLM:
    torch.manual_seed(0)
    mixers = {"mixer": partial(Balanced, weight=weight)}
    return SequenceLM(50, 16, 2, mixers, feed_forward=GeGLU, **options)  # pyright: ignore[reportArgumentType]


ROWS = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(1))


def gradients(lm: SequenceLM, rows: Tensor = ROWS) -> dict[str, Tensor]:
    lm(rows[:, :-1], rows[:, 1:], added=1.0).backward()
    found = {name: parameter.grad for name, parameter in lm.named_parameters() if parameter.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


@pytest.mark.parametrize("loops", [1, 2])
def test_layers_and_loops_are_summed_by_name(loops: int) -> None:
    lm = build(loops=loops)
    plain = lm(ROWS[:, :-1], ROWS[:, 1:])
    assert lm.added == {}
    seen: list[Losses] = []
    blocks: Any = lm.blocks
    for block in blocks:
        block.mixer.register_forward_hook(lambda _, args, kwargs, out: seen.append(kwargs["losses"]), with_kwargs=True)
    total = lm(ROWS[:, :-1], ROWS[:, 1:], added=0.5)
    assert len(seen) == 2 * loops
    for name in ("balance", "guess"):
        torch.testing.assert_close(lm.added[name], 0.5 * torch.stack([losses[name].detach() for losses in seen]).sum())
    torch.testing.assert_close(total, plain + lm.added["balance"] + lm.added["guess"])


class ByToken(Balanced):
    """Adds the losses of a mixer whose output depends on the ids of the tokens."""

    def forward(self, x: Tensor, *, losses: Losses | None = None, tokens: Tensor | None = None) -> Tensor:
        assert tokens is not None
        return super().forward(x, losses=losses) * tokens[..., None]


def test_the_shell_of_a_mixer_hands_it_losses_and_tokens() -> None:
    shell = partial(RWKV7Shell, n_heads=2, core=ByToken)
    lm = SequenceLM(50, 16, 2, {"shell": shell}, feed_forward=GeGLU)
    plain = lm(ROWS[:, :-1], ROWS[:, 1:])
    total = lm(ROWS[:, :-1], ROWS[:, 1:], added=1.0)
    assert set(lm.added) == {"balance", "guess"}
    torch.testing.assert_close(total, plain + lm.added["balance"] + lm.added["guess"])


@pytest.mark.parametrize("way", ["checkpointed", "compiled", "sharded"])
def test_all_ways_of_training_have_the_same_gradients(way: str) -> None:
    expected, lm = gradients(build()), build()
    assert expected["blocks.0.mixer.guess.weight"].any()
    if way == "sharded":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        if way in ("checkpointed", "sharded"):
            lm.checkpoint_activations()
        if way == "sharded":
            fsdp.shard(lm, init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",)), None)
        if way == "compiled":
            for block in lm.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(gradients(lm), expected)
        assert set(lm.added) == {"balance", "guess"}
    finally:
        if way == "sharded":
            dist.destroy_process_group()


def trained_by(lm: SequenceLM) -> LanguageModel:
    module = LanguageModel(vocab_size=50)
    module.lm = lm
    return module


def test_micro_batches_of_documents_add_the_losses_of_one_batch() -> None:
    """A loss that is a mean over tokens has the value and the gradient of one batch, as the model's own loss."""
    segments = torch.ones(2, 13, dtype=torch.int32)
    segments[0, 5:] = 0  # padding
    found = []
    for size in (2, 1):
        module, values = trained_by(build()), []
        for row, each in zip(ROWS.split(size), segments.split(size), strict=True):
            batch = {"tokens": row, **as_documents(row, each)}
            targets = int((batch["targets"] != NO_TARGET).sum())
            assert targets == {2: (16,), 1: (4, 12)}[size][len(values)]
            batch["loss_scale"] = torch.tensor(2 / size / 16)  # as the loader gives it
            (module.loss(batch) / (2 / size)).backward()
            values.append(module.built().added["guess"])
        gradient: Any = module.built().get_parameter("blocks.1.mixer.guess.weight").grad
        found.append((torch.stack(values).mean(), gradient))
    torch.testing.assert_close(found[1], found[0])
    alone = build()
    alone(ROWS[:, :-1], ROWS[:, 1:], added=1.0)
    torch.testing.assert_close(found[0][0], alone.added["guess"])


@pytest.mark.parametrize(
    ("loss", "what"), [(lambda x: x[..., 0], r"\(2, 12\) in torch.float32"), (lambda x: 0.5, "float")]
)
def test_a_loss_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, loss: Any, what: str) -> None:
    def forward(self: Any, x: Tensor, losses: Losses) -> Tensor:
        losses["balance"] = loss(x)
        return x

    lm = copy.deepcopy(build())
    monkeypatch.setattr(Balanced, "forward", forward)
    monkeypatch.setattr(Balanced, "takes", frozenset({"losses"}))
    with pytest.raises(UserError, match=f"Balanced adds a loss 'balance' of {what}, not a 0-d tensor"):
        lm(ROWS[:, :-1], ROWS[:, 1:], added=1.0)


def column(run_dir: Path, tag: str) -> list[float]:
    with (run_dir / "curves.csv").open(newline="") as file:
        return [float(row[tag]) for row in csv.DictReader(file) if row[tag]]


def test_fit_logs_them_by_name_and_measures_without_them(fit) -> None:
    def run(name: str, weight: float, **options: Any) -> Path:
        mixer = f"{{a: {{class_path: {__name__}.Balanced, init_args: {{weight: {weight}}}}}}}"
        return fit(name, **{"model.mixers": mixer, "allow_code": "tests", "trainer.max_steps": 2, **options})

    one, two = run("one", 0.5), run("two", 0.5, **{"data.micro_batch_size": 1})
    without = run("without", 0.0)
    for tag in ("balance", "guess"):
        values = column(one, f"loss/train/{tag}")
        assert len(values) == 2
        assert values[0] > 0
        assert column(without, f"loss/train/{tag}") == [0, 0]
    added = column(one, "loss/train/balance")[0] + column(one, "loss/train/guess")[0]
    assert column(one, "loss/train")[0] - added == pytest.approx(column(without, "loss/train")[0], rel=1e-5)
    # a mean over tokens does not depend on the micro-batches, and a square of means only a little
    assert column(two, "loss/train/guess")[0] == pytest.approx(column(one, "loss/train/guess")[0], rel=1e-5)
    assert column(two, "loss/train/balance")[0] == pytest.approx(column(one, "loss/train/balance")[0], rel=0.02)
