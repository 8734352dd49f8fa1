"""The models of an exam: each an architecture as it was published, at the exam's size.

Everything here is plain mappings, as recipes hold them once `extends` is resolved.

The architecture's own recipe gives mixers, pattern, feed-forward and norms. The exam's recipe gives the size, training
and data. Options that depend on the size keep their proportion to Transformer++ of
the same width (`shape_of`). A mixer's `scales` names its options that do:

* layers: 24 where Transformer++ has 12 become twice the exam's, rounded to whole repetitions of the pattern;
* "heads": the divisor of `d_model` nearest to their share of its heads;
* "state": the divisor of `d_model` nearest to the number that keeps the state's share of a key/value cache;
* "length": their share of its sequence length (windows, chunks, positions); unchanged if the recipe has the size's;
* "head": sizes of heads, states and low ranks, which are published alike for all widths. They are unchanged if the
  heads of Transformer++ have 64 channels or more, else in proportion to these heads;
* widths of feed-forward layers (`hidden`), if the recipe gives them: their share of `d_model`.
"""

import copy
import dataclasses
import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqarch.arguments import divide
from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError, refused
from seqarch.exam.request import Models, meant
from seqarch.experiment.checker import check_tree
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.parser import recipe_parser
from seqarch.experiment.recipes import (
    SIZE,
    bundled_recipes,
    class_path,
    find_recipe,
    merged_recipe,
    mixer_classes,
    mixers_of,
    read_recipe,
)
from seqarch.experiment.tree import put, read_text
from seqarch.mixers.base import Mixer, Scale
from seqarch.mixers.registry import load_mixer, mixer_entries
from seqarch.runs.keys import flatten

Recipe = dict[str, Any]
ARCHITECTURE = (
    *("pattern", "norm", "feed_forward", "no_feed_forward", "embedding_norm", "learned_positions", "loops"),
    *("residual_in_fp32", "canon", "looping"),
)
"""Options of the model that an architecture brings along with its mixers."""
HEAD = 64
"""Options that scale with the "head" stay the same down to this number of channels."""
EXAMINED = ("model.mixers", "model.vocab_size", *(f"model.{key}" for key in ARCHITECTURE))
"""What an exam compares, so that no option sets it for all models."""
WIDEST = 2**20
USUAL_WIDTH = 768
"""The width that a mixer's defaults are for, unless the mixer gives its published widths."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Layers, heads and tokens per sequence of Transformer++."""

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
"""By width, rising: the exam's sizes, the quickstart, and those of arXiv 2505.18522 (table of configurations)."""


def shape_of(d_model: int) -> Shape:
    """Transformer++ of a width: from `SHAPES`, or between the two nearest entries."""
    known = [(each.n_layers, width / each.n_heads, each.sequence_length) for width, each in SHAPES.items()]
    layers, head, length = (float(np.interp(d_model, list(SHAPES), column)) for column in zip(*known, strict=True))
    return Shape(round(layers), _heads(d_model / head, d_model), round(length))


@dataclasses.dataclass(frozen=True)
class Size:
    """A size of the exam: its recipe, which is Transformer++."""

    recipe: Recipe

    @property
    def model(self) -> Mapping[str, Any]:
        return self.recipe["model"]

    @property
    def cache(self) -> int:
        """Numbers in the key/value cache of full attention in all layers, for one sequence of the size's length."""
        return 2 * self.shape.n_layers * self.shape.sequence_length * int(self.model["d_model"])

    @property
    def shape(self) -> Shape:
        (attention,) = self.model["mixers"].values()
        n_heads = int(attention["init_args"]["n_heads"])
        return Shape(int(self.model["n_layers"]), n_heads, int(self.recipe["data"]["sequence_length"]))


def from_recipe(size: Size, recipe: Recipe) -> Recipe:
    """The exam's recipe with the architecture of a published one.

    Raises:
        UserError: the recipe has no mixers or no width.
    """
    model = recipe.get("model") or {}
    if not (model.get("mixers") and 1 <= (d_model := int(model.get("d_model") or 0)) <= WIDEST):
        raise UserError(f"the recipe needs model.mixers, and model.d_model, their width, of at most {WIDEST:,}")
    usual, here = shape_of(d_model), size.shape
    if (recipe.get("data") or {}).get("sequence_length") == here.sequence_length:
        usual = dataclasses.replace(usual, sequence_length=here.sequence_length)  # its windows and chunks are for it
    hidden = int(_options(model.get("feed_forward")).get("hidden") or 0)
    n_layers = int(model.get("n_layers", usual.n_layers))
    derived = copy.deepcopy(size.recipe)
    target = derived["model"]
    for key in ("mixers", *ARCHITECTURE):
        target.pop(key, None)
        if key in model:
            target[key] = copy.deepcopy(model[key])
    if hidden:
        options = {**_options(target["feed_forward"]), "hidden": max(1, round(hidden * target["d_model"] / d_model))}
        target["feed_forward"] = {**target["feed_forward"], "init_args": options}
    target["mixers"] = {name: _resized(mixer, d_model, usual, size) for name, mixer in model["mixers"].items()}
    if target.get("learned_positions"):
        target["learned_positions"] = here.sequence_length
    repeat = len(model.get("pattern") or [0])
    layers = here.n_layers * n_layers / usual.n_layers
    target["n_layers"] = max(1, round(layers / repeat)) * repeat
    return derived


def from_mixer(size: Size, name: str, published: Sequence[Recipe]) -> Recipe:
    """The exam's recipe for a mixer by its class: in its published shell, else in the shell of Transformer++.

    Without a recipe, the mixer has the options at which it was published, or its defaults, at the exam's size.

    Args:
        size: the size.
        name: the class, as the registry has it.
        published: recipes of architectures; those with only this mixer count, the one nearest to its defaults first.

    Raises:
        UserError: there is no such mixer.
    """
    mixer = load_mixer(name)
    if alone := [recipe for recipe in published if mixer_classes(recipe) == [name]]:
        return from_recipe(size, min(alone, key=lambda recipe: _distance(mixer, recipe)))
    width = min(mixer.published, key=lambda width: abs(width - size.model["d_model"]), default=USUAL_WIDTH)
    defaults = _defaults(mixer)
    options = {option: defaults[option] for option in mixer.scales if isinstance(defaults.get(option), int)}
    if "n_heads" in defaults:
        options["n_heads"] = shape_of(width).n_heads
    options.update(mixer.published.get(width, {}))
    derived = copy.deepcopy(size.recipe)
    derived["model"]["mixers"] = {
        "mixer": _resized({"class_path": name, "init_args": options}, width, shape_of(width), size)
    }
    return derived


def set_option(recipe: Recipe, option: str, value: Any) -> None:
    """Set an option of the recipe's only mixer.

    Raises:
        UserError: the recipe has several mixers.
    """
    mixers = recipe["model"]["mixers"]
    if len(mixers) > 1:
        raise UserError(f"--mixer.{option}: the recipe has several mixers ({', '.join(mixers)}): set it in your own")
    (key, mixer), *_ = mixers.items()
    mixers[key] = {"class_path": class_path(mixer), "init_args": {**_options(mixer), option: value}}


def _options(part: Any) -> dict[str, Any]:
    return dict(part.get("init_args") or {}) if isinstance(part, Mapping) else {}


def _defaults(mixer: type[Mixer]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(mixer).parameters.items()}


def _distance(mixer: type[Mixer], recipe: Recipe) -> int:
    """The number of options of the recipe's mixer that differ from the class's defaults."""
    defaults = _defaults(mixer)
    (only,) = mixers_of(recipe).values()
    fixed = {name: each for name, each in _options(only).items() if mixer.scales.get(name) not in ("heads", "state")}
    return sum(defaults.get(name) != value for name, value in fixed.items())


def _resized(mixer: Any, d_model: int, there: Shape, size: Size) -> Any:
    """A mixer of a model of this width and shape at the exam's size; unchanged if it is not registered."""
    if not _is_registered(mixer):
        return copy.deepcopy(mixer)
    here, width = size.shape, size.model["d_model"]
    usual_head = min(HEAD, d_model // there.n_heads)
    narrower = min(1.0, width // here.n_heads / usual_head)
    changes: dict[Scale, tuple[float, float]] = {
        "head": (narrower, 1),
        "heads": (here.n_heads, there.n_heads),
        "length": (here.sequence_length, there.sequence_length),
        # channels of a head, so its share of a cache, in proportion to the sequence length
        "state": (width * there.sequence_length, d_model * here.sequence_length),
    }
    inside = {name: _resized(each, d_model, there, size) for name, each in _options(mixer).items()}
    kind = load_mixer(class_path(mixer).rpartition(".")[2])
    for path, scale in kind.scales.items():
        part, dot, _ = path.partition(".")
        if dot and _is_registered(inside.get(part)):  # which has scales of its own
            continue
        options, option = _holder(inside, path)
        value = options.get(option)
        if scale == "head" and narrower < 1 and value is None:
            value = _defaults(kind).get(option)  # a default is as published, for heads of the usual size
        if isinstance(value, int) and value > 0:  # the mixer refuses others
            times, over = changes[scale]
            wanted = value * times / over
            options[option] = _heads(wanted, width) if scale in ("heads", "state") else max(1, round(wanted))
    return {"class_path": class_path(mixer), "init_args": inside} if inside or isinstance(mixer, Mapping) else mixer


def _is_registered(part: Any) -> bool:
    """Whether a part of a recipe is a mixer that the registry has."""
    path = part.get("class_path") if isinstance(part, Mapping) else part
    return isinstance(path, str) and path.rpartition(".")[2] in {entry.name for entry in mixer_entries()}


def _holder(options: dict[str, Any], option: str) -> tuple[dict[str, Any], str]:
    """The options that hold `option`, and its name there. For "core.chunk_size" these are the options of the core."""
    part, dot, inner = option.partition(".")
    if not dot:
        return options, option
    within = options.get(part)
    return _holder(within.get("init_args") or {} if isinstance(within, dict) else {}, inner)


def _heads(wanted: float, d_model: int) -> int:
    """The divisor of `d_model` nearest to `wanted` as a ratio; of two equally near, the smaller."""
    divisors = {each for n in range(1, math.isqrt(d_model) + 1) if d_model % n == 0 for each in (n, d_model // n)}
    return min(sorted(divisors), key=lambda n: max(n / wanted, wanted / n))


def load_size(name: str, options: Mapping[str, str], length: int | None = None) -> Size:
    """A size of the exam with the keys of the command line laid over its recipe, and sequences of `length` tokens.

    Raises:
        UserError: a key that only the exam sets, or a length that does not divide the tokens of a step.
    """
    tree = read_recipe(find_recipe(f"exam/{name}"))
    for key, value in options.items():
        if key.startswith("mixer."):
            continue
        if key.startswith(EXAMINED):
            raise UserError(f"--{key}: the exam compares this: set it with --mixer, or in your own recipe")
        tree = put(tree, key.split("."), read_text(value))
    recipe = tree.plain()
    if length is not None:
        data = recipe["data"]
        tokens = data["sequence_length"] * data["sequences_per_step"]
        sequences = divide(**{f"tokens of a step at size {name}": tokens, "--length": length})
        recipe["data"] = {**data, "sequence_length": length, "sequences_per_step": sequences}
    return Size(recipe)


def find_models(size: Size, request: Models) -> list[tuple[str, Recipe]]:
    """The models of an exam or a rung at a size, the reference first, each by its name in the exam.

    Args:
        size: what the models are derived for.
        request: names the models.

    Raises:
        UserError: what is wrong in a name, an option or a recipe; two of the models are the same.
    """
    options = mixer_options(request.mixers, request.options)
    named = [(request.against, {}), *((name, options) for name in request.mixers)]
    models = [find_model(size, name, own, request.allow_code) for name, own in named]
    for (name, recipe), (later, same) in itertools.combinations(models, 2):
        if name == later or recipe == same:
            raise UserError(f"'{later}' and '{name}' are one model: name another --mixer or --against")
    return models


def find_model(size: Size, name: str, options: dict[str, str], allow: Sequence[str] = ()) -> tuple[str, Recipe]:
    """The model that a word of the command line means: its name in the exam, and the exam's recipe for it.

    Raises:
        UserError: the word is neither a mixer nor a recipe, something in the recipe is wrong, or the options fit none.
    """
    word = meant(name)
    if word in {entry.name for entry in mixer_entries()}:
        title, recipe = word, from_mixer(size, word, published(bundled_recipes()))
    else:
        path = find_recipe(word)
        tree = read_recipe(path)
        check_tree(recipe_parser(), tree, allow)
        title, recipe = path.stem.removesuffix(SIZE), from_recipe(size, tree.plain())
    for option, value in options.items():
        set_option(recipe, option, read_text(value).plain())
    return titled(title, options), recipe


def titled(name: str, options: Mapping[str, Any]) -> str:
    """The name of a model in an exam, and of its folder: a mixer or recipe with its options."""
    parts = [name, *(f"{option}={value}" for option, value in options.items())]
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", "-".join(parts)).lstrip(".")


def mixer_options(mixers: Sequence[str], options: Mapping[str, str]) -> dict[str, str]:
    """The values that `--mixer.OPTION` sets, by the option.

    Raises:
        UserError: there are several mixers.
    """
    values = {key.removeprefix("mixer."): value for key, value in options.items() if key.startswith("mixer.")}
    if values and len(mixers) > 1:
        raise UserError("--mixer.OPTION belongs to one mixer, but --mixer names several: examine each by itself")
    return values


def published(recipes: dict[str, Path]) -> list[Recipe]:
    """The recipes that define a mixer's shell: first those of 110M parameters, then those of long sequences."""
    paths = [path for ending in ("_110m", "_100k") for stem, path in recipes.items() if stem.endswith(ending)]
    return [recipe for recipe in map(merged_recipe, paths) if recipe["model"].get("d_model") in SHAPES]


class Measured(NamedTuple):
    """What a recipe comes to; `packages` are those of its classes, next to seqarch, torch and Lightning."""

    parameters: int
    state: int | None
    """Numbers in its decoding state after a sequence; `None` where there is none, or only a GPU can tell."""
    packages: set[str]
    data: TextDataModule
    flops: float
    """Operations per token of training, as the model counts them."""


def measure(name: str, recipe: Recipe, allow: Sequence[str] = ()) -> Measured:
    """Check a recipe, and count what its model takes, which is built without memory.

    Raises:
        UserError: what is wrong in it.
    """
    with refused(name, UserError, why=True):
        experiment = Experiment.from_recipe(recipe, allow_code=allow)
        experiment.check()
        model = experiment.build_on_meta()
    classes = [type(part).__module__ for part in model.modules()]
    classes += [value for key, value in flatten(experiment.config).items() if key.endswith("class_path")]
    packages = {each.partition(".")[0] for each in classes} - {"seqarch", "torch", "lightning"}
    length = recipe["data"]["sequence_length"]
    flops = model.flops_per_token(length, training=True)
    return Measured(model.n_parameters(), model.state_elements(length), packages, experiment.data, flops)
