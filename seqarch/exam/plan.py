"""The plan of an exam: which models it means, their runs and the folder of each.

OUT/<size>/<name>/recipe.yaml               the recipe that the runs follow
OUT/<size>/<name>/seed_<n>/                 a run folder
OUT/<size>/<name>/ladder/rate_<rate>/       the same for each rate of the learning-rate ladder (`seqarch.exam.train`)
OUT/<size>/<name>/verdict.*                 of a candidate, with its figures (`seqarch.exam.verdict`)
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError, unknown
from seqarch.exam.cache import checksums, code_digest, find_shards, fingerprint
from seqarch.exam.derive import ARCHITECTURE, SHAPES, Recipe, Size, from_mixer, from_recipe, set_option
from seqarch.experiment.checker import check_tree
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.parser import recipe_parser
from seqarch.experiment.recipes import SIZE, bundled_recipes, find_recipe, merged_recipe, read_recipe
from seqarch.experiment.tree import put, read_text
from seqarch.mixers.registry import mixer_entries
from seqarch.runs.record import is_finished

ALIASES = {"TransformerPlusPlus": "transformer_pp", "Transformer++": "transformer_pp", "Transformer": "transformer"}
EXAMINED = ("model.mixers", "model.vocab_size", *(f"model.{key}" for key in ARCHITECTURE))
"""What an exam compares, so that no option sets it for all models."""
LIMITS = {
    "tiny": "A tiny exam shows only large effects and settles nothing",
    "draft": "A draft shows what a model learns first and settles nothing",
}
"""What the sizes that are too short to settle anything can show."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of an exam. `seqarch exam` takes them and their help from here.

    Args:
        mixers: what is examined: mixers by their class, or recipes by name or file.
        against: the reference, named like --mixer.
        size: tiny (minutes on a CPU), draft (minutes on a GPU, a first look), small (a GPU, 340M tokens per run) or
            medium (110M parameters, 1.05B tokens per run).
        data: folder of shards, or of text files called <domain>; by default the data of the size's recipe.
        seeds: runs of each model.
        ladder: whether each model trains at its own best learning rate, chosen in domain; by default at small and
            medium, if they have branches.
        workers: runs made at the same time; by default one on each GPU. More share the GPUs.
        out: folder of exams; exams of one size share a folder in it.
        allow_code: packages whose classes the recipes may name.
        options: values by dotted keys: `mixer.chunk_size` for the one mixer, `trainer.max_steps` for every model.
    """

    mixers: Sequence[str]
    against: str = "TransformerPlusPlus"
    size: str = "tiny"
    data: str | None = None
    seeds: int = 3
    ladder: bool | None = None
    workers: int | None = None
    out: str = "runs/exam"
    allow_code: Sequence[str] = ()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A model that sits the exam: its name, its recipe, its size, and the digest of its code (`seqarch.exam.code`)."""

    name: str
    recipe: Mapping[str, Any]
    parameters: int
    code: str
    state_share: float | None = None
    """Numbers in its state after a sequence, over those in the key/value cache of full attention at this size."""
    remembered: bool = False
    """Whether later exams take its runs from the cache, as for the reference."""
    near_best: tuple[float, ...] = ()
    """The learning rates that the ladder cannot tell apart, the best first; the seeds take them in turn."""

    @property
    def rate(self) -> float:
        """Its learning rate."""
        return float(self.recipe["model"]["learning_rate"])

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of its seeds."""
        return self.near_best or (self.rate,)

    def of_seed(self, seed: int) -> "Entrant":
        """The same model at the learning rate of a seed."""
        return self.at_rate(self.rates[seed % len(self.rates)])

    def at_rate(self, rate: float) -> "Entrant":
        """The same model at another learning rate."""
        model = {**self.recipe["model"], "learning_rate": rate}
        return dataclasses.replace(self, recipe={**self.recipe, "model": model})


@dataclasses.dataclass(frozen=True)
class Rung:
    """A learning rate of a model's ladder and its losses at the smallest budget, nats per token."""

    factor: float
    """The rate as a multiple of the size's: 1 is the rate that all models share."""
    rate: float
    in_domain: float
    """Loss on the in-domain hold-out, by which the rate is chosen; infinite where the training diverged."""
    compared: float
    """Mean loss on the OOD domains (or hold-outs) that the exam compares; it chooses nothing."""


@dataclasses.dataclass(frozen=True)
class Exam:
    """An exam: the reference, the candidates, and how many seeds of each, in the folder OUT/<size>."""

    folder: Path
    size: str
    reference: Entrant
    candidates: Sequence[Entrant]
    seeds: int
    checksums: Mapping[str, str]
    allow_code: Sequence[str] = ()
    """Packages whose classes the recipes may name."""
    ladder: bool = False
    """Whether each model trains at its own best learning rate."""
    rungs: Mapping[str, Sequence[Rung]] = dataclasses.field(default_factory=dict)
    """The ladder of each model, by name."""
    neighbour: Entrant | None = None
    """The reference at its second-best rate. Its gap to itself is the floor: smaller gaps mean nothing."""

    @property
    def entrants(self) -> list[Entrant]:
        return [self.reference, *self.candidates]

    def run(self, entrant: Entrant, seed: int) -> Path:
        """The run folder."""
        return self.folder / entrant.name / f"seed_{seed}"

    def key(self, entrant: Entrant, seed: int) -> str:
        """The run's fingerprint."""
        return fingerprint(entrant.recipe, seed, self.checksums, entrant.code)

    def finished(self, entrant: Entrant) -> list[Path]:
        """The run folders that are finished, in order of seeds."""
        return [run for run in (self.run(entrant, seed) for seed in range(self.seeds)) if is_finished(run)]


def make_plan(request: Request) -> Exam:
    """The exam that a user asks for, with every model built once without memory and every domain opened.

    Raises:
        UserError: what is wrong in a name, an option, a recipe or the data.
    """
    options = mixer_options(request.mixers, request.options)
    size = load_size(request.size, request.options)
    if request.options:
        check(f"size {request.size}", size.recipe, request.allow_code)  # models are derived from numbers that it gives
    models = [find_model(size, request.against, {}, request.allow_code)]
    models += [find_model(size, name, options, request.allow_code) for name in request.mixers]
    for (name, recipe), (later, same) in itertools.combinations(models, 2):
        if name == later or recipe == same:
            again = "named twice" if name == later else f"the same model as '{name}'"
            raise UserError(f"'{later}' is {again}, which compares it with itself: name another --mixer or --against")
    ladder = _has_ladder(request, size)
    checked = {name: check(name, recipe, request.allow_code) for name, recipe in models}
    root, sums = _open_data(request, size, checked[models[0][0]].data)
    entrants = []
    for name, recipe in models:
        recipe["data"] = {**recipe["data"], "root": root}
        facts = checked[name]
        share = facts.state and facts.state / size.cache
        entrants.append(Entrant(name, recipe, facts.parameters, code_digest(facts.packages), share))
    return Exam(
        folder=Path(request.out) / request.size,
        size=request.size,
        reference=dataclasses.replace(entrants[0], remembered=True),
        candidates=entrants[1:],
        seeds=request.seeds,
        checksums=sums,
        allow_code=tuple(request.allow_code),
        ladder=ladder,
    )


def _has_ladder(request: Request, size: Size) -> bool:
    budgets = (size.recipe.get("branches") or {}).get("at")
    ladder = bool(budgets) and request.size not in LIMITS if request.ladder is None else request.ladder
    if ladder and not budgets:
        raise UserError(
            "--ladder compares rates after the shortest branch: set --branches.at '[0.125, 0.25, 0.5]' and "
            "--model.decay_share 0.2"
        )
    return ladder


def _open_data(request: Request, size: Size, data: TextDataModule) -> tuple[str, dict[str, str]]:
    """The folder of the shards, which text files become first, and the checksums of its domains."""
    train, ood = list(size.recipe["data"]["train"]), list(size.recipe["data"]["ood"])
    if len(train) == 1 and not ood:
        raise UserError(
            f"only {train[0]} and no OOD domain leave nothing to compare: name some with --data.ood, "
            "or several with --data.train, whose hold-outs are then compared"
        )
    if request.data is not None:
        tokenizer = "byte" if request.size == "tiny" else "mixtral"
        data.root = str(find_shards(Path(request.data), train, ood, tokenizer, Path(request.out) / "shards"))
    data.prepare_data()
    data.setup("fit")
    data.evaluation_sets()
    if data.tokenizer.vocab_size > (most := size.model["vocab_size"]):
        raise UserError(
            f"the data's tokenizer '{data.tokenizer.name}' has {data.tokenizer.vocab_size:,} entries and models of "
            f"size {request.size} have {most:,}: prepare the data with another tokenizer, or take another --size"
        )
    return data.root, checksums(data.root, [*train, *ood])


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
