"""Recipes: found by file or name; `extends: base/110m.yaml` in a file is that file, then this one over it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import seqarch
from seqarch.errors import UserError, unknown
from seqarch.experiment.given import merged
from seqarch.plugins import FLAG
from seqarch.runs.files import write_text
from seqarch.safe_yaml import compose, load

FLAGS = ("--config", "-c")
SIZE = "_110m"
"""The ending of a recipe's name that may be left out."""


def expand_recipes(args: list[str]) -> list[str]:
    """The arguments with every `--config FILE` preceded by the files that FILE extends, the furthest first.

    Raises:
        UserError: a file is missing or not a recipe, or files extend each other in a circle.
    """
    expanded: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        if flag in FLAGS and (value := value if equals else next(rest, ""))[:2] in ("", "--"):
            raise UserError(f"{flag} needs a value")
        if flag in FLAGS:
            expanded += [word for path in _chain(find_recipe(value)) for word in ("--config", str(path))]
        else:
            expanded.append(arg)
    return expanded


def join_recipes(args: Sequence[str]) -> list[str]:
    """The arguments with recipes that follow each other as one: the parser would merge their classes in its own way."""
    joined, rest = [], list(args)
    while rest:
        layers = []
        while rest[:1] == ["--config"]:
            _, recipe, *rest = rest
            layers.append(yaml.safe_load(recipe) if "\n" in recipe else load(Path(recipe)))
        joined += ["--config", yaml.safe_dump(merged(layers), sort_keys=False)] if layers else [rest.pop(0)]
    return joined


def merged_recipe(path: Path) -> dict[str, Any]:
    """A recipe over what it extends as one mapping, merged as on the command line.

    Raises:
        UserError: a file is missing or no recipe.
    """
    return {key: value for key, value in merged(map(load, _chain(path))).items() if key != "extends"}


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe: a path, or a bundled recipe, whose `recipes/`, `.yaml` and `_110m` may be left out.

    Raises:
        UserError: there is no such recipe.
    """
    path = Path(name)
    if path.is_file():
        return path
    if found := _bundled(path):
        return found
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a recipe in it")
    if path.suffix or len(path.parts) > 1:
        raise UserError(f"there is no recipe {path}")
    raise _no_recipe(str(name))


def copy_recipe(name: str, target: Path | None = None) -> Path:
    """Write a recipe that comes with seqarch to a file that may be edited; return the file.

    Args:
        name: the recipe, such as "mamba2_110m".
        target: a new file, or a folder; by default a file called like the recipe.

    Raises:
        UserError: there is no such recipe, or the file exists already.
    """
    source = _bundled(Path(name))
    if source is None:
        raise _no_recipe(name)
    path = target or Path()
    path = path / source.name if path.is_dir() else path
    if path.exists():
        raise UserError(f"{path} is there already: name another file")
    text = source.read_text(encoding="utf-8")
    if extends := _extends(source):  # a path from the folder of the recipe, not of its copy
        base = (source.parent / extends).resolve().relative_to(recipes_folder().resolve())
        text = text.replace(f"\nextends: {extends}\n", f"\nextends: recipes/{base.as_posix()}\n")
    write_text(path, text)
    return path


def _no_recipe(name: str) -> UserError:
    return UserError(f"{unknown('recipe', name, bundled_recipes())} (`seqarch recipes` lists all)")


def _bundled(path: Path) -> Path | None:
    files, name = _files(), path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    return files.get(name) or files.get(name + SIZE)


def bundled_recipes() -> dict[str, Path]:
    """Return the recipes that come with seqarch by name ("quickstart"), without those that are only extended."""
    return {name: path for name, path in _files().items() if not name.startswith("base/")}


def _files() -> dict[str, Path]:
    folder = recipes_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def recipes_folder() -> Path:
    """The recipes that come with seqarch: next to the package in a checkout, inside it where a wheel installed it.

    Raises:
        UserError: neither is there.
    """
    package = Path(seqarch.__file__).parent
    folders = (package.parent / "recipes", package / "recipes")
    for folder in folders:
        if (folder / "exam").is_dir():
            return folder
    raise UserError(f"seqarch's recipes are neither in {folders[0]} nor in {folders[1]}: install seqarch again")


def _chain(path: Path) -> list[Path]:
    chain = [path]
    while (extends := _extends(chain[0])) is not None:
        base = chain[0].parent / extends
        if not base.is_file():
            base = _bundled(Path(extends)) or base
        if not base.is_file():
            raise UserError(f"{chain[0]} extends {extends}, but there is no file {base}")
        if base.resolve() in {each.resolve() for each in chain}:
            raise UserError(f"{chain[0]} extends {extends}, which extends it in turn: remove one of the two")
        chain.insert(0, base)
    return chain


def _extends(path: Path) -> str | None:
    if not path.is_file():
        raise UserError(f"there is no recipe {path}")
    root = compose(path)
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no keys: a recipe looks like 'model: ...', 'data: ...'")
    extends = None
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if key.value == FLAG.removeprefix("--") and value.value:
            raise UserError(
                f"{where}: {key.value} belongs on the command line only, because no file may decide what code runs"
            )
        if key.value == "extends" and value.value not in ("", "null", "~"):
            if not isinstance(value, yaml.ScalarNode):
                raise UserError(f"{where}: extends must name one file, not several")
            extends = value.value
    return extends


def mixers_of(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mixers of a recipe by name, each as the recipe gives it."""
    return (recipe.get("model") or {}).get("mixers") or {}


def class_path(mixer: Any) -> str:
    """The class of a mixer as a recipe gives it: `Mamba2` or `{class_path: my_package.Mamba2}`."""
    return mixer if isinstance(mixer, str) else mixer["class_path"]


def mixer_classes(recipe: Mapping[str, Any]) -> list[str]:
    """The names of the classes of a recipe's mixers."""
    return [class_path(mixer).rpartition(".")[2] for mixer in mixers_of(recipe).values()]
