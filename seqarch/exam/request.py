"""What `seqarch exam` is asked, and what its words mean. Neither PyTorch nor a mixer is imported for it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated

from seqarch.arguments import Count, Interval
from seqarch.errors import UserError, unknown
from seqarch.experiment.recipes import SIZE, bundled_recipes
from seqarch.plugins import MIXERS, entries

MOST_RUNS = 1000
Runs = Annotated[int, Interval(1, MOST_RUNS, "[]")]
"""Seeds, or workers: each is in memory before the first run."""
LIMITS = {
    "tiny": "A tiny exam shows only large effects and settles nothing",
    "draft": "A draft shows what a model learns first and settles nothing",
    "long": "A long exam shows what a model learns first and settles nothing",
}
"""What the sizes that are too short to settle anything can show."""


@dataclasses.dataclass(frozen=True)
class Models:
    """The models that `seqarch exam` or `seqarch scale` trains, and how. Both take these options and their help.

    Args:
        mixers: what is examined: mixers by their class, or recipes by name or file.
        against: the reference, named like --mixer.
        data: folder of shards, or of text files called <domain>; by default the data of the size's recipe.
        seeds: runs of each model; further seeds that both models have finished in the folder count too.
        workers: runs to make at the same time; by default one per GPU, or one per core of a CPU. More runs than GPUs
            share them.
        allow_code: packages whose classes the recipes may name.
        options: values by dotted keys: `mixer.chunk_size` for the one mixer, `trainer.max_steps` for every model.
    """

    mixers: Sequence[str]
    against: str = "TransformerPlusPlus"
    data: str | None = None
    seeds: Runs = 3
    workers: Runs | None = None
    allow_code: Sequence[str] = ()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Request(Models):
    """The options of an exam.

    Args:
        size: tiny (minutes on a CPU), draft (minutes on a GPU, a first look), small (a GPU, 340M tokens per run),
            medium (110M parameters, 1.05B tokens per run) or long (102,400 tokens per sequence, a first look).
        length: tokens per sequence, for another length than the size's; a step keeps its number of tokens.
        ladder: whether each model trains at its own best learning rate, chosen in domain; by default at small and
            medium, if they have branches.
        out: folder of exams; exams of one size share a folder in it.
    """

    size: str = "tiny"
    length: Count | None = None
    ladder: bool | None = None
    out: str = "runs/exam"


ALIASES = {"TransformerPlusPlus": "transformer_pp", "Transformer++": "transformer_pp", "Transformer": "transformer"}


def meant(name: str) -> str:
    """The mixer's class, or the recipe's name or file, that a word means.

    Raises:
        UserError: there is no such mixer or recipe; a file is not looked for.
    """
    word = ALIASES.get(name, name)
    mixers, recipes = entries(MIXERS), bundled_recipes()
    if word in mixers or word.endswith((".yaml", ".yml")) or word in recipes or word + SIZE in recipes:
        return word
    error = unknown("mixer or recipe", name, {*mixers, *(stem.removesuffix(SIZE) for stem in recipes), *ALIASES})
    raise UserError(f"{error} (`seqarch mixers` and `seqarch recipes` list all)")
