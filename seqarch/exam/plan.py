"""The plan of an exam: which models it means, their runs and the folder of each.

OUT/<size>/<name>/recipe.yaml               the recipe that the runs follow
OUT/<size>/<name>/seed_<n>/                 a run folder
OUT/<size>/<name>/ladder/rate_<rate>/       the same for each rate of the learning-rate ladder (`seqarch.exam.train`)
OUT/<size>/<name>/verdict.*                 of a candidate, with its figures (`seqarch.exam.verdict`)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from seqarch.arguments import Count, Interval
from seqarch.runs.record import is_finished

Runs = Annotated[int, Interval(1, 1000, "[]")]
"""Seeds, or workers: each is in memory before the first run."""
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
        length: tokens per sequence, for another length than the size's; a step keeps its number of tokens.
        data: folder of shards, or of text files called <domain>; by default the data of the size's recipe.
        seeds: runs of each model.
        ladder: whether each model trains at its own best learning rate, chosen in domain; by default at small and
            medium, if they have branches.
        workers: runs to make at the same time; by default one per GPU. More runs than GPUs share them.
        out: folder of exams; exams of one size share a folder in it.
        allow_code: packages whose classes the recipes may name.
        options: values by dotted keys: `mixer.chunk_size` for the one mixer, `trainer.max_steps` for every model.
    """

    mixers: Sequence[str]
    against: str = "TransformerPlusPlus"
    size: str = "tiny"
    length: Count | None = None
    data: str | None = None
    seeds: Runs = 3
    ladder: bool | None = None
    workers: Runs | None = None
    out: str = "runs/exam"
    allow_code: Sequence[str] = ()
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A model that sits the exam: its name, its recipe, its size, and the digest of its code (`seqarch.exam.cache`)."""

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
        from seqarch.exam.cache import fingerprint  # half of the start of `seqarch --help`

        return fingerprint(entrant.recipe, seed, self.checksums, entrant.code)

    def finished(self, entrant: Entrant) -> list[Path]:
        """The run folders that are finished, in order of seeds."""
        return [run for run in (self.run(entrant, seed) for seed in range(self.seeds)) if is_finished(run)]
