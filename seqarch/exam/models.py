"""Which models an exam means, and that each of them can be built before any is trained."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError, unknown
from seqarch.exam.derive import ARCHITECTURE, SHAPES, Recipe, Size, from_mixer, from_recipe, set_option
from seqarch.experiment.checker import check_tree
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.parser import recipe_parser
from seqarch.experiment.recipes import SIZE, bundled_recipes, find_recipe, merged_recipe, read_recipe
from seqarch.experiment.tree import put, read_text
from seqarch.mixers.registry import mixer_entries

ALIASES = {"TransformerPlusPlus": "transformer_pp", "Transformer++": "transformer_pp", "Transformer": "transformer"}
EXAMINED = ("model.mixers", "model.vocab_size", *(f"model.{key}" for key in ARCHITECTURE))


def load_size(name: str, options: Mapping[str, str]) -> Size:
    """A size of the exam with the keys of the command line laid over its recipe.

    Raises:
        UserError: a key that only the exam sets.
    """
    tree = read_recipe(find_recipe(f"exam/{name}"))
    for key, value in options.items():
        if key.startswith("mixer."):
            continue
        if key.startswith(EXAMINED):
            raise UserError(f"--{key}: the exam compares this: set it with --mixer, or in your own recipe")
        tree = put(tree, key.split("."), read_text(value))
    return Size(tree.plain())


def find_model(size: Size, name: str, options: dict[str, str], allow: Sequence[str] = ()) -> tuple[str, Recipe]:
    """The model that a word of the command line means: its name in the exam, and the exam's recipe for it.

    Raises:
        UserError: the word is neither a mixer nor a recipe, something in the recipe is wrong, or the options fit none.
    """
    word = ALIASES.get(name, name)
    mixers = [entry.name for entry in mixer_entries()]
    recipes = bundled_recipes()
    if word in mixers:
        title, recipe = word, from_mixer(size, word, published(recipes))
    elif word.endswith((".yaml", ".yml")) or word in recipes or word + SIZE in recipes:
        path = find_recipe(word)
        tree = read_recipe(path)
        check_tree(recipe_parser(), tree, allow)
        title, recipe = path.stem.removesuffix(SIZE), from_recipe(size, tree.plain())
    else:
        found = unknown("mixer or recipe", name, {*mixers, *(stem.removesuffix(SIZE) for stem in recipes), *ALIASES})
        raise UserError(f"{found} (`seqarch mixers` and `seqarch recipes` list all)")
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
    found = {key.removeprefix("mixer."): value for key, value in options.items() if key.startswith("mixer.")}
    if found and len(mixers) > 1:
        raise UserError("--mixer.OPTION belongs to one mixer, but --mixer names several: examine each by itself")
    return found


def published(recipes: dict[str, Path]) -> list[Recipe]:
    """The recipes that define a mixer's shell: first those of 110M parameters, then those of long sequences."""
    paths = [path for ending in ("_110m", "_100k") for stem, path in recipes.items() if stem.endswith(ending)]
    return [recipe for recipe in map(merged_recipe, paths) if recipe["model"].get("d_model") in SHAPES]


class Checked(NamedTuple):
    """The facts of a checked recipe: parameters, the packages next to seqarch and torch in its model, and its data."""

    parameters: int
    state: int | None
    """Numbers in its decoding state after a sequence; `None` where there is none, or only a GPU can tell."""
    packages: set[str]
    data: TextDataModule


def check(name: str, recipe: Recipe, allow: Sequence[str] = ()) -> Checked:
    """Parse a recipe and build its model without memory.

    Raises:
        UserError: what is wrong in it.
    """
    try:
        experiment = Experiment.from_recipe(recipe, allow_code=allow)
        experiment.check()
        model = experiment.build_on_meta()
    except UserError as error:
        raise UserError(f"{name}: {error}") from error
    packages = {type(part).__module__.partition(".")[0] for part in model.modules()}
    state = model.state_elements(recipe["data"]["sequence_length"])
    return Checked(model.n_parameters(), state, packages - {"seqarch", "torch"}, experiment.data)
