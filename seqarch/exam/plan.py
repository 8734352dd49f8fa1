"""The plan of an exam: its models, their runs, the folder of each, and when two runs are the same run.

OUT/<size>/<name>/recipe.yaml               the recipe that the runs follow
OUT/<size>/<name>/seed_<n>/                 a run folder
OUT/<size>/<name>/seed_<n>/exam.json        fingerprint, minutes, and where the run was copied from
OUT/<size>/<name>/ladder/rate_<rate>/       the same for each rate of the learning-rate ladder (`seqarch.exam.train`)
OUT/<size>/<name>/verdict.*                 of a candidate, with its figures (`seqarch.exam.verdict`)
CACHE/exam/<fingerprint>                    the run folder of the reference that later exams take
"""

import dataclasses
import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import seqarch
from seqarch.data.verified import cache_folder
from seqarch.errors import UserError
from seqarch.exam.request import MOST_RUNS
from seqarch.runs import folder
from seqarch.runs.curves import last_step
from seqarch.runs.files import read_json, write_json
from seqarch.runs.keys import without

DECIDES = ("data", "kernels", "mixers", "model", "evaluation", "training", "experiment")
"""Folders and files of seqarch that decide what a run trains and measures."""
CODE = (".py", ".json")
"""Suffixes of code files and of files with recorded kernel settings."""


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A model that sits the exam: its name, its recipe, its size, and the digest of its code (`code_digest`)."""

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
        return float(self.recipe["model"]["learning_rate"])

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of its seeds."""
        return self.near_best or (self.rate,)

    def for_seed(self, seed: int) -> "Entrant":
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


Runs = Sequence[tuple[Entrant, int]]
"""Models, each with a seed."""


@dataclasses.dataclass(frozen=True)
class Exam:
    """An exam: the reference, the candidates, and how many seeds of each are asked for, in the folder OUT/<size>."""

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
        return self.folder / entrant.name / f"seed_{seed}"

    def key(self, entrant: Entrant, seed: int) -> str:
        return fingerprint(entrant.recipe, seed, self.checksums, entrant.code)

    def seeds_of(self, entrant: Entrant) -> list[int]:
        """The seeds that are asked for, and others of which both a candidate and the reference have finished runs."""
        partners = self.candidates if entrant.name == self.reference.name else [self.reference]
        shared = self._finished_seeds(entrant) & set().union(*map(self._finished_seeds, partners))
        return [seed for seed in range(MOST_RUNS) if seed < self.seeds or f"seed_{seed}" in shared]

    def _finished_seeds(self, entrant: Entrant) -> set[str]:
        return {run.name for run in (self.folder / entrant.name).glob("seed_*") if folder.is_finished(run)}

    def runs(self, entrants: Sequence[Entrant]) -> list[tuple[Entrant, int]]:
        """The runs of some models, seed by seed."""
        return sorted(((each, seed) for each in entrants for seed in self.seeds_of(each)), key=lambda run: run[1])

    def finished(self, entrant: Entrant) -> list[Path]:
        """The run folders that are finished, in order of seeds."""
        return [run for seed in self.seeds_of(entrant) if folder.is_finished(run := self.run(entrant, seed))]

    def cached(self, entrant: Entrant, seed: int) -> Path | None:
        """The finished run of another exam that is taken in place of this run, if nothing of this run is there."""
        run = self.run(entrant, seed)
        if not entrant.remembered or folder.status(run) != "missing":
            return None
        return remembered(run, self.key(entrant, seed))

    def check_folders(self, factors: Sequence[float] = ()) -> None:
        """Refuse a run of another exam, also where a ladder of these factors has yet to choose a run's rate."""
        for entrant in self.entrants:
            for factor in factors:
                self.check_folder([rung_of(entrant, factor)], 0)
            choices = self._choices(entrant, factors)
            for seed in self.seeds_of(entrant):
                self.check_folder(choices or [entrant.for_seed(seed)], seed)

    def _choices(self, entrant: Entrant, factors: Sequence[float]) -> list[Entrant]:
        """A model at the rates that a ladder may have chosen for a run. Without its rung, the shared rate is none."""
        rungs = [rung_of(entrant, factor) for factor in factors]
        return [entrant.at_rate(rung.rate) for rung in rungs if rung.rate != entrant.rate or self.run(rung, 0).exists()]

    def check_folder(self, possible: Sequence[Entrant], seed: int) -> None:
        """Refuse a run of another exam in the folder, unless it never took a step."""
        run = self.run(possible[0], seed)
        before, now = folder.read_note(run).get("fingerprint"), [self.key(entrant, seed) for entrant in possible]
        if not run.exists() or before in now or (before and not has_begun(run)):
            return
        reason = difference(before, now[0]) if before else f"it has no {folder.EXAM_NOTE}"
        raise UserError(f"{run} is not a run of this exam, {reason}: choose another --out, or delete that folder")


def rung_of(entrant: Entrant, factor: float) -> Entrant:
    """A model at a multiple of its rate, for the steps of its shortest branch."""
    rate = float(f"{factor * entrant.rate:.3g}")
    recipe: dict[str, Any] = dict(entrant.at_rate(rate).recipe)
    steps = round(min(recipe["branches"]["at"]) * recipe["trainer"]["max_steps"])
    recipe["trainer"] = {**recipe["trainer"], "max_steps": steps}
    recipe["branches"] = {**recipe["branches"], "at": []}
    recipe["ood_loss"] = {**(recipe.get("ood_loss") or {}), "at": [1.0]}
    recipe["attention_entropy"] = {"every_n_steps": 0}
    return dataclasses.replace(entrant, name=f"{entrant.name}/ladder/rate_{rate:.2e}", recipe=recipe)


def code_digest(packages: Iterable[str], *more: Path) -> str:
    """Eight digits that change with seqarch's own code, that in `more` folders, and all code of other packages."""
    parts = [*own_parts(), *more]
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        parts += [Path(part) for part in spec.submodule_search_locations or [spec.origin] if part]
    return digest(parts)


def own_parts() -> list[Path]:
    """The folders and files of seqarch that decide a run."""
    return [Path(seqarch.__file__).parent / part for part in DECIDES]


def digest(parts: Iterable[Path]) -> str:
    """Eight digits of the names and the contents of the code in folders and files."""
    total = hashlib.sha256()
    for part in parts:
        inside = [path for path in sorted(part.rglob("*")) if path.suffix in CODE and path.is_file()]
        for path in [part] if part.is_file() else inside:
            name = "" if path == part else path.relative_to(part).as_posix()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{part.name}/{name} {content}\n".encode())
    return total.hexdigest()[:8]


def fingerprint(recipe: Mapping[str, Any], seed: int, checksums: Mapping[str, str], code: str) -> str:
    """The identity of a run: one digest of recipe, seed and the data's checksums, and one of the code."""
    parts = {"recipe": without(recipe, "exam"), "seed": seed, "data": dict(checksums)}
    return f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]}-{code}"


def difference(before: str, now: str) -> str:
    """Why two fingerprints mean different runs."""
    recipe, _, code = before.partition("-")
    if code and recipe != now.partition("-")[0]:
        return "it was made with another recipe or data"
    return "the code of seqarch or of the model has changed since it was made"


def has_begun(run: Path) -> bool:
    """Whether a run has taken a step: its curves go beyond the start, or there is a checkpoint."""
    return last_step(run / folder.CURVES) > 0 or folder.newest_checkpoint(run) is not None


def minutes_used(run: Path) -> float:
    """Minutes of all attempts at a run so far; a killed attempt counts up to the last row of its curves.

    During an attempt the note has `minutes` of earlier attempts, and `start`: its time, minus these minutes.
    """
    note = folder.read_note(run)
    before = note.get("minutes") or 0.0
    if note.get("start") and (run / folder.CURVES).is_file():
        return max(before, ((run / folder.CURVES).stat().st_mtime - note["start"]) / 60)
    return before


def remember(run: Path, key: str) -> None:
    """Let later exams find this run by its fingerprint."""
    write_json(cache_folder() / "exam" / key, {"run": str(run.resolve())})


def remembered(run: Path, key: str) -> Path | None:
    """Another finished run with this fingerprint, that later exams take in place of `run`."""
    pointer = cache_folder() / "exam" / key
    if not pointer.is_file():
        return None
    source = Path(str(read_json(pointer).get("run")))
    if source == run.resolve() or not folder.is_finished(source) or folder.read_note(source).get("fingerprint") != key:
        return None
    return source


def reuse(run: Path, source: Path) -> None:
    """Copy a finished run to `run`, without checkpoints."""
    # a copy that was cut short has no record, and counts as missing
    left_out = shutil.ignore_patterns(folder.CHECKPOINTS, folder.TENSORBOARD, f"{folder.EVENTS}*")
    last = {str(source): {folder.RECORD}}
    ignore = lambda at, names: left_out(at, names) | last.get(str(at), set())  # noqa: E731
    shutil.copytree(source, run, ignore=ignore, dirs_exist_ok=True)
    shutil.copy2(source / folder.RECORD, run / folder.RECORD)
    folder.write_note(run, **{**folder.read_note(source), "reused_from": str(source)})
