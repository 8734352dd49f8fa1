"""Tests of constructors that pass arguments to their parent's constructor."""

import dataclasses
import inspect

import pytest
import torch

from seqarch.arguments import Count
from seqarch.cli.mixers import mixer_options
from seqarch.errors import UserError
from seqarch.experiment.checker import options_of, parser_of_class
from seqarch.mixers.attention import Attention, CoreAttention
from seqarch.mixers.base import GIVEN_BY_THE_MODEL


@dataclasses.dataclass
class Sizes:
    """Options of an option."""

    small: int = 1


class Sized(Attention):
    """Takes a dataclass."""

    def __init__(self, d_model: int, layer_idx: int, n_layers: int, *, sizes: Sizes | None = None, of: Sizes = Sizes()):  # noqa: B008
        super().__init__(d_model, layer_idx, n_layers, n_heads=2)


class Norms(Attention):
    """Has an option that holds classes."""

    def __init__(self, *args, norms: tuple[type, ...] = (torch.nn.LayerNorm,), **kwargs):
        super().__init__(*args, **kwargs)


class PassesOn(Attention):
    """Hands on what it does not know, as PyTorch users do."""

    def __init__(self, *args, reach: Count = 3, **kwargs):
        super().__init__(*args, window=8, **kwargs)
        self.reach = reach


def test_a_constructor_has_the_place_and_the_required_options_of_its_parent_first():
    names, of_parent = (list(inspect.signature(kind).parameters) for kind in (Attention, CoreAttention))
    assert names[:5] == ["d_model", "layer_idx", "n_layers", "n_heads", "window"]
    assert set(of_parent) - set(names) == {"core"}


def test_the_place_goes_by_position_and_by_name():
    by_name = Attention(d_model=8, layer_idx=1, n_layers=2, n_heads=2)
    by_position = Attention(8, 1, 2, n_heads=2)
    assert (by_name.d_model, by_name.layer_idx) == (by_position.d_model, by_position.layer_idx) == (8, 1)


@pytest.mark.parametrize("options", [{}, {"n_heads": 2, "windw": 3}, {"n_heads": 2, "core": None}])
def test_missing_and_unknown_options_are_refused(options):
    with pytest.raises(TypeError, match=r"n_heads|windw|core"):
        Attention(8, 1, 2, **options)


def test_a_constructor_with_args_has_its_own_options_and_those_of_its_parent():
    options = options_of(parser_of_class(PassesOn, len(GIVEN_BY_THE_MODEL)))
    assert {"reach", "n_heads", "position"} <= options.keys()
    assert not {"window", *GIVEN_BY_THE_MODEL} & options.keys()
    assert PassesOn(8, 0, 2, n_heads=2).reach == 3
    with pytest.raises(UserError, match="reach must be at least 1, not 0"):
        PassesOn(8, 0, 2, n_heads=2, reach=0)


def test_the_fields_of_a_dataclass_are_listed_and_not_its_section():
    listed = mixer_options(Sized)
    assert {name: each["default"] for name, each in listed.items()} == {"sizes": None, "of.small": 1}


def test_a_class_is_listed_by_the_name_that_a_recipe_has():
    assert mixer_options(Norms)["norms"]["default"] == ["torch.nn.LayerNorm"]
