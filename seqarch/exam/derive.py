"""The model of an exam: an architecture as it was published, at the exam's size.

Everything here is plain mappings, as recipes hold them once `extends` is resolved.

From the architecture's own recipe comes what makes the architecture: mixers, pattern, feed-forward, norms. From the
exam's comes the size and all of training and data. What depends on the size keeps its proportion to Transformer++ of
the same width (`SHAPES`):

* layers: 24 where it has 12 become twice the exam's, rounded to whole repetitions of the pattern;
* heads: the divisor of `d_model` nearest to their share of its heads;
* widths of feed-forward layers (`hidden`), where they are given: their share of `d_model`;
* lengths in tokens (windows, chunks, positions): their share of its sequence length;
* sizes that are published alike for all widths (of heads, states and low ranks): unchanged while the heads of
  Transformer++ have their usual 64 channels or more, in proportion to these heads where they are narrower.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from seqarch.errors import UserError
from seqarch.mixers.base import Mixer
from seqarch.mixers.registry import load_mixer, mixer_entries

Recipe = dict[str, Any]
ARCHITECTURE = ("pattern", "norm", "feed_forward", "no_feed_forward", "embedding_norm", "learned_positions")
"""Options of the model that an architecture brings along, beside its mixers."""
HEADS = ("n_heads", "n_kv_heads")
LENGTHS = ("window", "chunk_size", "max_length")
SIZES = ("head_dim", "d_state", "feature_dim", "mix_rank", "decay_rank")
"""Options of mixers that are published alike for all widths."""
HEAD = 64
"""Channels of a head down to which they are kept."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Layers, heads and tokens a sequence of Transformer++."""

    n_layers: int
    n_heads: int
    sequence_length: int


SHAPES = {
    64: Shape(4, 4, 256),
    128: Shape(4, 4, 256),
    512: Shape(8, 8, 1024),
    768: Shape(12, 12, 2048),
    2048: Shape(24, 16, 2048),
}
"""By width: the exam's sizes, the quickstart, and those of arXiv 2505.18522 (table of configurations)."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A size of the exam: its recipe, which is Transformer++."""

    name: str
    recipe: Recipe

    @property
    def model(self) -> Mapping[str, Any]:
        return self.recipe["model"]

    @property
    def shape(self) -> Shape:
        (attention,) = self.model["mixers"].values()
        n_heads = int(attention["init_args"]["n_heads"])
        return Shape(int(self.model["n_layers"]), n_heads, int(self.recipe["data"]["sequence_length"]))


def from_recipe(size: Size, recipe: Recipe) -> Recipe:
    """The exam's recipe with the architecture of a published one.

    Raises:
        UserError: the recipe has no mixers, or a width at which no Transformer++ is known.
    """
    model = recipe.get("model") or {}
    if not model.get("mixers"):
        raise UserError("the recipe names no mixers under model.mixers, so there is nothing to examine")
    if (there := SHAPES.get(model.get("d_model", 0))) is None:
        widths = ", ".join(map(str, SHAPES))
        raise UserError(
            f"the recipe's model.d_model is {model.get('d_model')}, and an exam knows how to scale from {widths}: "
            "extend one of the recipes with such a width"
        )
    here = size.shape
    derived = copy.deepcopy(size.recipe)
    target = derived["model"]
    for key in ("mixers", *ARCHITECTURE):
        target.pop(key, None)
        if key in model:
            target[key] = copy.deepcopy(model[key])
    for options in _nested(target.get("feed_forward")):
        if options.get("hidden"):
            options["hidden"] = max(1, round(options["hidden"] * target["d_model"] / model["d_model"]))
    target["mixers"] = {
        name: _resized(mixer, there, here, target["d_model"]) for name, mixer in model["mixers"].items()
    }
    usual = min(HEAD, model["d_model"] // there.n_heads)
    if (head := target["d_model"] // here.n_heads) < usual:
        target["mixers"] = {name: _narrowed(mixer, head / usual) for name, mixer in target["mixers"].items()}
    if target.get("learned_positions"):
        target["learned_positions"] = here.sequence_length
    repeat = len(model.get("pattern") or [0])
    layers = here.n_layers * model.get("n_layers", there.n_layers) / there.n_layers
    target["n_layers"] = max(1, round(layers / repeat)) * repeat
    return derived


def from_mixer(size: Size, name: str, published: Sequence[Recipe]) -> Recipe:
    """The exam's recipe for a mixer by its class: in its published shell, else in that of Transformer++.

    Args:
        size: the size.
        name: the class, as the registry has it.
        published: recipes of architectures; those with this mixer alone count, the one nearest to its defaults first.

    Raises:
        UserError: there is no such mixer.
    """
    mixer = load_mixer(name)
    alone = [recipe for recipe in published if [class_name(each) for each in _mixers(recipe).values()] == [name]]
    if alone:
        return from_recipe(size, min(alone, key=lambda recipe: _distance(mixer, recipe)))
    derived = copy.deepcopy(size.recipe)
    options = {"n_heads": size.shape.n_heads} if "n_heads" in inspect.signature(mixer).parameters else {}
    derived["model"]["mixers"] = {"mixer": {"class_path": name, "init_args": options}}
    return derived


def set_option(recipe: Recipe, option: str, value: Any) -> None:
    """Set an option of the recipe's only mixer.

    Raises:
        UserError: the recipe has several mixers.
    """
    mixers = recipe["model"]["mixers"]
    if len(mixers) > 1:
        raise UserError(
            f"--mixer.{option}: this recipe has several mixers ({', '.join(mixers)}): set it in a recipe of your own"
        )
    (key, mixer), *_ = mixers.items()
    mixers[key] = {"class_path": _path(mixer), "init_args": {**_options(mixer), option: value}}


def class_name(mixer: Any) -> str:
    """The name of a mixer's class, as a recipe gives it: `Mamba2` or `{class_path: my_package.Mamba2}`."""
    return _path(mixer).rpartition(".")[2]


def _mixers(recipe: Recipe) -> Mapping[str, Any]:
    return (recipe.get("model") or {}).get("mixers") or {}


def _path(mixer: Any) -> str:
    return mixer if isinstance(mixer, str) else mixer["class_path"]


def _options(mixer: Any) -> dict[str, Any]:
    return {} if isinstance(mixer, str) else dict(mixer.get("init_args") or {})


def _distance(mixer: type[Mixer], recipe: Recipe) -> int:
    """How many options of the recipe's mixer are not the class's own."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(mixer).parameters.items()}
    (only,) = _mixers(recipe).values()
    return sum(defaults.get(name) != value for name, value in _options(only).items() if name not in HEADS)


def _resized(mixer: Any, there: Shape, here: Shape, d_model: int) -> Any:
    """A mixer with heads and lengths for the shape `here`, also inside its own parts."""
    resized = copy.deepcopy(mixer)
    for options in _nested(resized):
        for key, value in options.items():
            if isinstance(value, int) and key in HEADS:
                options[key] = _heads(value * here.n_heads / there.n_heads, d_model)
            elif isinstance(value, int) and key in LENGTHS:
                options[key] = max(1, round(value * here.sequence_length / there.sequence_length))
    return resized


def _narrowed(mixer: Any, share: float) -> Any:
    """A mixer with this share of its `SIZES`, given or by default; one that is not registered has those given alone."""
    known = {entry.name for entry in mixer_entries()}
    parameters = inspect.signature(load_mixer(name)).parameters if (name := class_name(mixer)) in known else {}
    sizes = {option: parameters[option].default for option in SIZES if option in parameters} | _options(mixer)
    narrow = {option: max(1, round(sizes[option] * share)) for option in SIZES if isinstance(sizes.get(option), int)}
    return {"class_path": _path(mixer), "init_args": {**_options(mixer), **narrow}} if narrow else mixer


def _nested(mixer: Any) -> Iterator[dict[str, Any]]:
    options = mixer.get("init_args") if isinstance(mixer, Mapping) else None
    if isinstance(options, dict):
        yield options
        for value in options.values():
            yield from _nested(value)


def _heads(wanted: float, d_model: int) -> int:
    """The divisor of `d_model` nearest to `wanted` as a ratio, the smaller of two as near."""
    divisors = [n for n in range(1, d_model + 1) if d_model % n == 0]
    return min(divisors, key=lambda n: max(n / wanted, wanted / n))
