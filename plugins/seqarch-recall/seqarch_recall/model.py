"""The model of a recall exam: two layers without feed-forward, as Zoology and Based have them."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from seqarch.errors import unknown
from seqarch.exam.derive import Recipe, Size, from_mixer, set_option
from seqarch.experiment.checker import parse_tree
from seqarch.experiment.tree import read_plain
from seqarch.mixers.base import GIVEN_BY_THE_MODEL, Losses
from seqarch.mixers.based import GatedConvolution
from seqarch.mixers.registry import load_mixer
from seqarch.model import SequenceLM
from seqarch.model.block import ADDED
from seqarch.model.lm import MixerFactory
from seqarch_recall.settings import Settings, check_types

HEADS = 2
"""Heads of attention at every width, as in Zoology: the number that options of scale "heads" are derived for."""


class RecallLM(SequenceLM):
    """A language model with dropout of the embedding that computes logits at given places only."""

    def __init__(self, *args: Any, dropout: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.dropout = nn.Dropout(dropout)

    def answers(self, tokens: Tensor, places: Tensor, losses: Losses | None = None) -> Tensor:
        """Logits `[B, Q, V]` at the `places [B, Q]` of `tokens [B, T]`; mixers add theirs to the `losses`."""
        x, carry = self.dropout(self._embed(tokens, 0, None)), {}
        for block in self.blocks:
            x, carry = block(x, carry, losses=losses is not None, tokens=tokens)
        if losses is not None:
            losses |= {name: each for name, each in carry.items() if name.startswith(ADDED)}
        return self.head(self.norm(x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))))


def derived(settings: Settings, mixer: str, width: int, length: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a mixer class at a width: those of the class for two heads, then the given ones.

    Options that scale with the sequence take `length`, the tokens of the longest training example.

    Raises:
        UserError: the mixer has no such option.
    """
    attention: Recipe = {"mixers": {"mixer": {"class_path": "Attention", "init_args": {"n_heads": HEADS}}}}
    model = {**attention, "d_model": width, "n_layers": settings.layers}
    recipe = from_mixer(Size({"model": model, "data": {"sequence_length": length}}), mixer, ())
    if settings.positions != "own" and _has(mixer, "position"):
        set_option(recipe, "position", "none")
    for option, value in options.items():
        if not _has(mixer, option):
            raise unknown(f"option of {mixer} --mixer.", option, inspect.signature(load_mixer(mixer)).parameters)
        set_option(recipe, option, value)
    check_types("mixer", load_mixer(mixer), options, GIVEN_BY_THE_MODEL)
    return recipe["model"]["mixers"]["mixer"]["init_args"]


def build(settings: Settings, mixer: str, width: int, options: Mapping[str, Any], length: int) -> RecallLM:
    """The model, with the weights of the settings' seed.

    The options of the mixer class come from `derived`; learned positions reach to `length`, the longest test example.

    Raises:
        UserError: the mixer refuses its options.
    """
    torch.manual_seed(settings.seed)
    kind = load_mixer(mixer)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--mixer", type=MixerFactory)
    asked = read_plain({"mixer": {"class_path": mixer, "init_args": dict(options)}})
    mixers: dict[str, MixerFactory] = {"mixer": parser.instantiate(parse_tree(parser, asked)).mixer}
    pattern = ["mixer"]
    if settings.conv and settings.layers > 1 and not kind.in_every_layer:
        mixers["conv"] = partial(GatedConvolution, expand=1)
        pattern = ["conv"] * (settings.layers - 1) + ["mixer"]
    learned = settings.positions == "learned" and _has(mixer, "position")
    return RecallLM(
        settings.vocab_size,
        width,
        settings.layers,
        mixers,
        pattern,
        norm="rmsnorm" if kind.in_every_layer else "layernorm",
        learned_positions=length if learned else 0,
        dropout=settings.dropout,
    )


def _has(mixer: str, option: str) -> bool:
    return option in inspect.signature(load_mixer(mixer)).parameters
