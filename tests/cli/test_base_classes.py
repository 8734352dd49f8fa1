"""A recipe that names a class which subclasses must complete is refused in one line; models of the others run."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

import seqarch
from seqarch import Experiment
from seqarch.evaluation import Task
from seqarch.experiment.checker import options_of, parser_of_class
from seqarch.experiment.parser import recipe_parser
from seqarch.mixers import Mixer
from seqarch.mixers.cores import AttentionCore
from seqarch.mixers.positions import PositionEncoding
from seqarch.model.feed_forward import FeedForward

OPTIONS = {"n_heads": 4, "core": "SoftmaxCore"}
"""Of the options without a default."""


def mixer(class_path: Any, **init_args: Any) -> dict[str, Any]:
    return {"model": {"mixers": {"a": {"class_path": class_path, "init_args": init_args}}}}


RECIPES = {
    Mixer: lambda name: mixer(name, **{key: OPTIONS[key] for key in OPTIONS if key in needed(name)}),
    FeedForward: lambda name: {"model": {"feed_forward": name}},
    AttentionCore: lambda name: mixer("RWKV7Shell", n_heads=4, core=name),
    PositionEncoding: lambda name: mixer("Attention", n_heads=4, position=name),
    Task: lambda name: {"ood_loss": {"tasks": [name]}},
    L.Callback: lambda name: {"trainer": {"callbacks": [name]}},
}
"""For each base class a recipe that names a class made from it."""


def classes(base: type, module: str = "seqarch.") -> Iterator[type]:
    """The base class and all that are made from it, in modules whose name begins so."""
    if base.__module__.startswith(module):
        yield base
    for child in base.__subclasses__():
        yield from classes(child, module)


recipe_parser()  # imports them all
CLASSES = {each: recipe for base, recipe in RECIPES.items() for each in classes(base)}
UNFINISHED = [each for each in CLASSES if inspect.isabstract(each)]
MODELS = [each for each in CLASSES if issubclass(each, Mixer | FeedForward | AttentionCore) and each not in UNFINISHED]


def dotted(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def needed(name: str) -> set[str]:
    kind = next(each for each in CLASSES if name in (each.__name__, dotted(each)))
    return {key for key, option in options_of(parser_of_class(kind, 3)).items() if option.required}


@pytest.mark.parametrize("kind", UNFINISHED)
def test_a_class_that_lacks_methods_is_refused(refuse, tmp_path, kind):
    for name in (kind.__name__, dotted(kind)):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump({"extends": "quickstart", **CLASSES[kind](name)}))
        said = refuse("fit", "--config", "r.yaml")
        *_, line = said.partition(f": {name} is a base class without ")
        methods, _, right = line.partition(": ")
        assert methods.replace(" or ", ", ").split(", ") == sorted(kind.__abstractmethods__)
        expected = {each.__name__ for each in classes(kind, "") if not inspect.isabstract(each)}  # of other tests too
        names = set(re.findall(r"\w+", right.removeprefix("expected ").removeprefix("did you mean "))) - {"or"}
        assert names <= expected if expected else right == "name a subclass"


def test_it_is_refused_as_a_flag_too(refuse):
    said = refuse("fit", "--config", "quickstart", "--model.mixers.attention", "RecurrentMixer")
    assert "RecurrentMixer is a base class without finish, project or recur: expected DeltaNet, " in said


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_any_other_class_runs(kind):
    lm = Experiment.from_recipe({"extends": "quickstart", **CLASSES[kind](dotted(kind))}).model.build()
    tokens = torch.randint(257, (1, 17))
    lm(tokens[:, :-1], tokens[:, 1:]).backward()


def test_only_an_abstract_method_is_left_to_subclasses():
    for path in Path(seqarch.__file__).parent.rglob("*.py"):
        assert "raise NotImplementedError" not in path.read_text(encoding="utf-8"), path
