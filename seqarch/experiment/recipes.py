"""Recipes: found by file or name; `extends: base/110m.yaml` in a file is that file, then this one over it.

`compose` lays recipes, mappings and a command line over each other in one tree, which the parser gets as data.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser  # pyright: ignore[reportPrivateImportUsage]

import seqarch
from seqarch.errors import UserError, absent, near, unknown
from seqarch.experiment.tree import NUMBER, Tree, merge, put, read_file, read_plain, read_text
from seqarch.plugins import FLAG
from seqarch.runs.files import check_new, write_text

ON_THE_COMMAND_LINE = {
    "config": ": a recipe has 'extends'",
    FLAG.removeprefix("--"): f", because no file may decide what code runs: {FLAG} PACKAGE",
}
SIZE = "_110m"
"""The ending of a recipe's name that may be left out."""


def read_recipe(path: Path, later: Sequence[Path] = ()) -> Tree:
    """A recipe over what it extends.

    Args:
        path: the recipe.
        later: the recipes that extend it.

    Raises:
        UserError: a file is missing or no recipe, or files extend each other in a circle.
    """
    tree = read_file(path)
    if not tree.entries():
        raise UserError(f"{path} holds no keys: a recipe looks like 'model: ...', 'data: ...'")
    return over_base(tree, path.parent, (path, *later))


def over_base(tree: Tree, folder: Path = Path(), later: Sequence[Path] = ()) -> Tree:
    """The content of a recipe over the recipe that it extends, which lies in `folder` or is a bundled one."""
    parts = dict(tree.entries())
    for name, why in ON_THE_COMMAND_LINE.items():
        if (part := parts.pop(name, Tree(None))).value:
            raise UserError(f"{part.where}{name} belongs on the command line only{why}")
    extends = parts.pop("extends", Tree(None))
    if not extends.value:
        return Tree(parts, tree.where)
    if not isinstance(extends.text, str):
        raise UserError(f"{extends.where}extends must name one file, not several")
    base = folder / extends.text
    if not base.is_file():
        base = _bundled(Path(extends.text)) or base
    if not base.is_file():
        raise UserError(f"{extends.where or ''}extends {extends.text}, but there is no file '{base}'")
    if base.resolve() in {path.resolve() for path in later}:
        raise UserError(f"{later[0]} extends {extends.text}, which extends it in turn: remove one of the two")
    return merge(read_recipe(base, later), Tree(parts, tree.where))


def merged_recipe(path: Path) -> dict[str, Any]:
    """A recipe over what it extends as one mapping; errors as for `read_recipe`."""
    return read_recipe(path).plain()


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
    if path.suffix or len(path.parts) > 1:
        raise absent("file", path, "name a recipe")
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
    check_new(path, "file")
    text = source.read_text(encoding="utf-8")
    if extends := read_file(source).entries().get("extends", Tree(None)).text:  # a path from the folder of the recipe
        base = (source.parent / extends).resolve().relative_to(recipes_folder().resolve())
        text = text.replace(f"\nextends: {extends}\n", f"\nextends: recipes/{base.as_posix()}\n")
    write_text(path, text)
    return path


def _no_recipe(name: str) -> UserError:
    return UserError(f"{unknown('recipe', name, bundled_recipes())} (`seqarch recipes` lists all)")


def _bundled(path: Path) -> Path | None:
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    files = [recipes_folder() / f"{stem}.yaml" for stem in (name, name + SIZE)]
    return next((file for file in files if file.is_file() and file.is_relative_to(recipes_folder())), None)


def bundled_recipes() -> dict[str, Path]:
    """Return the recipes that come with seqarch by name ("quickstart"), without those that are only extended."""
    folder = recipes_folder()
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    return {name: path for name, path in files.items() if not name.startswith("base/")}


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


def mixers_of(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mixers of a recipe by name, each as the recipe gives it."""
    return (recipe.get("model") or {}).get("mixers") or {}


def class_path(mixer: Any) -> str:
    """The class of a mixer as a recipe gives it: `Mamba2` or `{class_path: my_package.Mamba2}`."""
    return mixer if isinstance(mixer, str) else mixer["class_path"]


def mixer_classes(recipe: Mapping[str, Any]) -> list[str]:
    """The names of the classes of a recipe's mixers."""
    return [class_path(mixer).rpartition(".")[2] for mixer in mixers_of(recipe).values()]


PRINT = "--print_config"
"""The flag whose value may be left out."""
SEVERAL = ("+", "*")
"""The `nargs` of an option that takes several words."""


def compose(
    parser: ArgumentParser,
    args: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Tree, list[str]]:
    """The values of a recipe, a command line and overrides, later ones over earlier ones.

    Args:
        parser: of the command.
        args: flags, and recipes by `--config`, each over what it extends.
        recipe: a recipe as a file would hold it; its `extends` names another.
        overrides: values by their dotted keys; a text is read as on the command line.

    Returns:
        the tree, and the words that belong to no flag.

    Raises:
        UserError: a flag is unknown or has no value, or a recipe cannot be read.
    """
    tree = over_base(read_plain(recipe or {}))
    # the parser has a second flag for each list, with a + after it
    actions = {flag: each for each in parser._actions for flag in each.option_strings if flag[-1] != "+"}
    words = []
    for flag, texts in _split(args, actions):
        if not flag:
            words += texts
            continue
        name = _option(flag, actions)
        action = actions[name]
        if isinstance(action, ActionConfigFile):
            tree = merge(tree, read_recipe(find_recipe(texts[0])))
            continue
        is_file = _is_section(flag, actions) and os.path.isfile(texts[0])
        parts = [read_file(Path(part)) if is_file else read_text(part) for part in texts]
        keys = f"{action.dest}{flag.removeprefix(name)}".split(".")
        value = Tree(parts) if action.nargs in SEVERAL else parts[0]
        tree = put(tree, keys, value)
    for key, value in (overrides or {}).items():
        tree = _overridden(tree, key, value)
    return tree, words


def _split(args: Sequence[str], actions: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The flags of a command line that have values, each with these; "" with each word that belongs to no flag."""
    rest = list(args)
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if not is_flag(flag):
            yield "", [flag + equals + text]
            continue
        if flag == PRINT:
            continue
        action = actions[_option(flag, actions)]
        missing = not equals and (not rest or is_flag(rest[0]))
        if action.nargs == 0 or flag.endswith(".help") or (missing and action.nargs == "*"):
            continue
        if missing or (not text and equals and isinstance(action, ActionConfigFile)):
            raise UserError(f"{flag} needs a value")
        texts = [text if equals else rest.pop(0)]
        while action.nargs in SEVERAL and rest and not is_flag(rest[0]):
            texts.append(rest.pop(0))
        yield flag, texts


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag, not a value such as -1."""
    return word.startswith("-") and word != "-" and not NUMBER.fullmatch(word)


def _option(flag: str, actions: Mapping[str, Any]) -> str:
    """The option that a flag sets, whole or in part: `--model.mixers` of `--model.mixers.a.init_args.window`."""
    name = flag
    while name not in actions and "." in name:
        name = name.rpartition(".")[0]
    if name not in actions or (name != flag and _is_section(name, actions)):
        raise UserError(f"unknown option {flag}{near(flag, [other for other in actions if other.startswith('--')])}")
    return name


def _is_section(flag: str, actions: Mapping[str, Any]) -> bool:
    """Whether there are options below a flag; the parser takes a file of them too."""
    return any(other.startswith(f"{flag}.") and not other.endswith(".help") for other in actions)


def _overridden(tree: Tree, key: str, value: Any) -> Tree:
    """An override over what was there, a section's key by key; below, the names of a mapping stand as in a file."""
    if isinstance(value, Mapping) and "." not in key:
        for name, part in value.items():
            tree = _overridden(tree, f"{key}.{name}", part)
        return tree
    return put(tree, key.split("."), read_text(value) if isinstance(value, str) else read_plain(value, key))
