"""What the page on mixers says of norms and of the suite holds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from seqarch.cli.mixers import mixer_options
from seqarch.kernels.gated_norm.op import gated_rms_norm
from seqarch.mixers.cores import SoftmaxCore
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.model import SequenceLM
from seqarch.model.feed_forward import GeGLU
from seqarch.testing import MixerSuite

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mixers.md").read_text(encoding="utf-8")
OURS = [entry.name for entry in mixer_entries() if entry.package == "seqarch"]


@pytest.mark.parametrize(
    ("name", "options", "epsilons"),
    [
        ("Attention", {"qk_norm": True}, {1e-6}),
        ("Attention", {"qk_norm": True, "qk_norm_eps": 0.5}, {0.5}),
        ("Top1Chunk", {}, {1e-6}),
        ("RWKV7Shell", {"core": SoftmaxCore(), "qk_norm": True}, {1e-6, 64e-5}),
        ("DeltaNet", {}, {1e-6}),
        ("DeltaNet", {"norm_eps": 0.5}, {0.5}),
        ("GatedDeltaNet", {}, {1e-6}),
        ("GatedDeltaNet2", {}, {1e-5}),
        ("Mamba2", {}, {1e-5}),
        *((name, {}, {64e-5}) for name in ("RWKV5", "RWKV6", "RWKV7")),
    ],
)
def test_epsilons_of_norms_are_those_of_the_authors(monkeypatch, name, options, epsilons) -> None:
    found = set()

    def spy(norm, place):
        def call(*args, **given):
            found.add(inspect.signature(norm).bind(*args, **given).arguments["eps"])
            return norm(*args, **given)

        monkeypatch.setattr(place, call)

    for norm in ("rms_norm", "group_norm"):
        spy(getattr(torch.nn.functional, norm), f"torch.nn.functional.{norm}")
    spy(gated_rms_norm, "seqarch.mixers.mamba2.gated_rms_norm")
    heads = {} if name == "Mamba2" else {"n_heads": 2}
    mixer = load_mixer(name)(128, layer_idx=0, n_layers=2, **heads, **options)
    mixer(torch.randn(1, 4, 128))
    assert found == epsilons


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(("options", "eps"), [({}, 1e-5), ({"norm_eps": 0.5}, 0.5)])
def test_epsilon_of_a_blocks_norms(norm: Any, options: dict[str, Any], eps: float) -> None:
    attention: Any = load_mixer("Attention")
    lm = SequenceLM(
        9,
        8,
        1,
        {"it": lambda *where: attention(*where, n_heads=1)},
        feed_forward=GeGLU,
        embedding_norm=True,
        norm=norm,
        **options,
    )
    assert [layer.eps for layer in lm.modules() if hasattr(layer, "eps")] == [eps] * 4


def test_each_of_ours_declares_what_tables_and_figures_show() -> None:
    for name in OURS:
        mixer = load_mixer(name)
        assert mixer.family
        assert mixer.source
        assert mixer.kernels.keys() == {"cpu", "cuda"}
        assert mixer.kernels["cpu"] == "PyTorch"
        assert mixer.capabilities >= {"decode", "packed", "entropy"}
        options = mixer_options(mixer)
        assert {option.partition(".")[0] for option in mixer.scales} <= options.keys(), name
        assert {option for at in mixer.published.values() for option in at} <= options.keys(), name


def test_the_page_names_every_attribute_of_the_suite() -> None:
    attributes = set(MixerSuite.__annotations__) - {"mixer", "options"}
    assert not {name for name in attributes if f"`{name}`" not in PAGE}
