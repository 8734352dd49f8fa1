"""Run folders, read back: what `seqarch fit` left in `run.json`, `config.yaml` and `curves.csv`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.errors import UserError, absent, check_known
from seqarch.report.documents import DocumentLosses, Draw, read_documents, stack_documents
from seqarch.report.roles import HOLD_OUT, OOD, Role
from seqarch.runs import tags
from seqarch.runs.curves import Curve, Curves, read_curves
from seqarch.runs.files import MOST, check_folder, is_label
from seqarch.runs.folder import CONFIG, CURVES, RECORD, branches, explain_salvage, read_config, read_record
from seqarch.runs.keys import flatten, may_differ
from seqarch.runs.tags import MEAN

FILES = (RECORD, CONFIG, CURVES)
REQUIRED = ("name", "seed")
TEXT = f"a text of at most {MOST} letters"
FACTS = {
    **dict.fromkeys(("name", "status", "tokenizer", "commit", "started", "finished", "imported"), TEXT),
    **dict.fromkeys(("seed", "parameters", "max_steps", "sequence_length", "state_elements"), "a whole number"),
    **dict.fromkeys(("train", "unigram_entropy"), "a mapping of numbers"),
    **dict.fromkeys(("mixers", "families"), "a mapping of texts"),
    **dict.fromkeys(("hardware", "versions"), "a mapping"),
}
"""The entries of `run.json` and their kinds; only the required ones must be there."""
KINDS = {
    TEXT: is_label,
    "a whole number": lambda value: isinstance(value, int) and abs(value) < 2**63,
    "a mapping of numbers": lambda value: _is_mapping(value, _is_number),
    "a mapping of texts": lambda value: _is_mapping(value, is_label),
    "a mapping": lambda value: _is_mapping(value, lambda one: one is None or is_label(one) or _is_number(one)),
}
IN_DOMAIN = tags.loss(tags.IN_DOMAIN)
DIVERGED = "diverged"
Tag = Callable[[str, str], str]
"""The tag of a loss on a domain: `tag(role, domain)`."""
PARTS: Mapping[str, Tag] = {"recallable": tags.loss_recallable, "other": tags.loss_other}


@dataclass(frozen=True)
class Evaluations:
    """The evaluation points of one run: tokens seen, in-domain loss and each compared domain's loss, all `[K]`, nats.

    `losses` are those of the OOD domains or, if there is none, of the training domains' hold-outs. The gap does not
    depend on the order of the points. `documents` are the same losses by document, if the run kept them. `of_mix` says
    that the in-domain loss is a mean of the losses.
    """

    tokens: np.ndarray
    in_domain: np.ndarray
    losses: dict[str, np.ndarray]
    step: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    documents: DocumentLosses | None = None
    of_mix: bool = False

    def at(self, kept: np.ndarray) -> "Evaluations":
        """The points `kept`: a mask or indices."""
        losses = {name: loss[kept] for name, loss in self.losses.items()}
        documents = self.documents[kept] if self.documents else None
        step = self.step[kept] if len(self.step) else self.step
        return Evaluations(self.tokens[kept], self.in_domain[kept], losses, step, documents, self.of_mix)

    def resampled(self, draw: Draw) -> "Evaluations":
        """The losses over drawn documents; `documents` must be there."""
        assert self.documents is not None
        inside, losses = self.documents.resampled(draw)
        losses = {name: losses[name] for name in self.losses}
        return Evaluations(self.tokens, inside, losses, self.step, of_mix=self.of_mix)

    def with_mean(self) -> dict[str, np.ndarray]:
        """The losses, followed by their unweighted mean if there are several domains."""
        if len(self.losses) == 1:
            return dict(self.losses)
        return {**self.losses, MEAN: np.mean(list(self.losses.values()), axis=0)}


@dataclass(frozen=True)
class Run:
    """One run folder. `facts` is `run.json`, `config` is `config.yaml`, `curves` maps a tag to what was logged.

    `only` are the domains to compare, if not all that were evaluated.
    """

    folder: Path
    name: str
    seed: int
    facts: dict[str, Any]
    config: dict[str, Any]
    curves: Curves
    steps: int
    tokens: int
    only: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"<Run {self.name}, seed {self.seed}: {self.steps:,} steps, {self.tokens:,} tokens ({self.status})>"

    @property
    def role(self) -> Role:
        """The compared domains: OOD domains or, if the run has none, the hold-outs of its training domains."""
        return OOD if tags.domains(self.curves, OOD.name) else HOLD_OUT

    @property
    def modelled(self) -> dict[str, Any]:
        """What the seeds of a model share: its options, and its steps unless they run at a constant rate."""
        options = {
            key: each for key, each in flatten(self.config.get("model"), "model").items() if key.startswith("model.")
        }
        # at a constant rate, a longer run passes through the shorter one
        length = () if options.get("model.decay_share") else ("max_steps",)
        return {**{key: self.facts.get(key) for key in ("mixers", "pattern", "parameters", *length)}, **options}

    @property
    def measured(self) -> dict[str, Any]:
        """What its losses depend on, next to the model; entropies are those of hold-outs that are compared."""
        facts = flatten(self.config.get("data"), "data") | self.facts
        of_earlier_runs = {"data.eval_documents": 1, "data.document_mask": False, "data.pack": "cut"}
        keys = ("tokenizer", "train", "data.sequence_length", "data.eval_tokens", *of_earlier_runs)
        known = facts.get("unigram_entropy") or {}
        texts = sorted({*self.domains, *(facts.get("train") or ())} & known.keys())
        return {
            **{key: facts.get(key, of_earlier_runs.get(key)) for key in keys},
            "OOD domains": ", ".join(self.domains) if self.role is OOD else "none",
            **{f"unigram entropy of the hold-out of {name}": known[name] for name in texts},
        }

    @property
    def narrow(self) -> bool:
        """Whether it has one training domain and no OOD domain: at the same in-domain loss there is no other loss."""
        return self.role is HOLD_OUT and len(self.evaluated) == 1

    @property
    def evaluated(self) -> list[str]:
        """The domains of that role that `curves.csv` has a column for, sorted."""
        return tags.domains(self.curves, self.role.name)

    @property
    def domains(self) -> list[str]:
        """The domains that are compared, sorted."""
        return sorted(set(self.only)) or self.evaluated

    @cached_property
    def ended(self) -> list["Run"]:
        """The finished branches of the run, shortest first, then the run itself if it is finished."""
        every = (*(load_run(branch, self.only) for branch in branches(self.folder)), self)
        ended = [each for each in every if each.status == "finished"]
        for each in ended:
            _check_comparable(self, each)
        return ended

    def finished_models(self, tag: Tag = tags.loss) -> Evaluations | None:
        """The last evaluation of each run in `ended`: the finished models, whose learning rate has decayed.

        `None` if none is finished yet. Another `tag` gives the losses on a part of the tokens. These are nan where
        they were not measured, and have no documents.
        """
        if not self.ended:
            return None
        last = [each.evaluations.at(np.array([-1])) for each in self.ended]
        models = Evaluations(
            tokens=np.concatenate([each.tokens for each in last]),
            in_domain=np.concatenate([each.in_domain for each in last]),
            losses={name: np.concatenate([each.losses[name] for each in last]) for name in last[0].losses},
            step=np.concatenate([each.step for each in last]),
            documents=stack_documents([each.documents() for each in self.ended]),
            of_mix=self.role is HOLD_OUT,
        )
        if tag is tags.loss:
            return models
        losses = {
            name: np.array([each.last(tag(self.role.name, name)) for each in self.ended]) for name in models.losses
        }
        return replace(models, losses=losses, documents=None)

    def last(self, tag: str) -> float:
        """The last value of a curve, or nan if it has none."""
        curve = self.curves.get(tag)
        return float(curve.value[-1]) if curve is not None and len(curve.value) else float("nan")

    def entropy_layers(self, *, implied: bool = False) -> dict[int, Curve]:
        """The attention entropy by layer (mean of its heads), or that of the implied weights of recurrent layers."""
        layers = tags.entropy_layers(self.curves, implied=implied)
        return {layer: self.curves[tag] for layer, tag in layers.items() if len(self.curves[tag].value)}

    @cached_property
    def evaluations(self) -> Evaluations:
        """The steps at which the in-domain loss and each compared domain's loss were logged and finite, in order.

        Raises:
            UserError: there is no such step yet.
        """
        if self.facts.get("imported"):
            raise UserError(f"'{self.name}' ({self.folder}) was imported and has no curves: seqarch eval measures it")
        wanted = [IN_DOMAIN, *map(self.role.tag, self.domains)]
        chosen = [self.curves[tag] for tag in wanted if tag in self.curves]
        finite = [curve.step[np.isfinite(curve.value)] for curve in chosen]
        steps = reduce(np.intersect1d, finite) if len(chosen) == len(wanted) > 1 else np.empty(0, dtype=np.int64)
        if not len(steps):
            so_far = f"{self.steps} of {self.facts.get('max_steps', '?')} steps and no complete evaluation"
            more = "wait for one, or evaluate more often (ood_loss.every_n_steps)"
            raise UserError(f"'{self.name}' ({self.folder}) has {so_far}: {more}")
        rows = [np.searchsorted(curve.step, steps) for curve in chosen]
        values = [curve.value[row] for curve, row in zip(chosen, rows, strict=True)]
        return Evaluations(
            tokens=chosen[0].tokens[rows[0]],
            in_domain=values[0],
            losses=dict(zip(self.domains, values[1:], strict=True)),
            step=steps,
        )

    @property
    def steady(self) -> Evaluations:
        """The evaluations before the learning rate decays, if the run has finished models of several lengths."""
        share = (self.config.get("model") or {}).get("decay_share")
        if len(self.ended) < 2 or not share:
            return self.evaluations
        kept = self.evaluations.step <= (1 - share) * (self.facts.get("max_steps") or self.steps)
        return self.evaluations.at(kept) if kept.any() else self.evaluations

    def documents(self) -> DocumentLosses | None:
        """The losses of the last evaluation by document, `None` if the run did not keep them."""
        domains = self.domains if self.role is OOD else ()
        return read_documents(self.folder, int(self.evaluations.step[-1]), self.facts.get("train") or {}, domains)

    @property
    def status(self) -> str:
        """The status of `run.json`, or `DIVERGED` if a loss of the last evaluation is not finite."""
        names = [IN_DOMAIN, *map(self.role.tag, self.domains)]
        last = [curve for curve in map(self.curves.get, names) if curve is not None and len(curve.step)]
        step = max((curve.step[-1] for curve in last), default=0)
        if any(curve.step[-1] == step and not np.isfinite(curve.value[-1]) for curve in last):
            return DIVERGED
        return str(self.facts.get("status", "unknown"))

    @property
    def evaluations_left_out(self) -> int:
        """The number of steps with an in-domain loss but without a complete, finite evaluation."""
        return len(self.curves[IN_DOMAIN].step) - len(self.evaluations.step)


@dataclass(frozen=True)
class Group:
    """The runs of one name: one run, or several that differ in their seed."""

    name: str
    runs: list[Run]

    @property
    def average(self) -> str:
        """Which domains the mean covers, in words."""
        domains, role = self.runs[0].domains, self.runs[0].role
        return role.every if set(domains) == set(self.runs[0].evaluated) else role.some + ", ".join(domains)

    @property
    def tokens(self) -> int:
        """The training tokens of its longest run."""
        return max(run.tokens for run in self.runs)

    @property
    def evaluations(self) -> list[Evaluations]:
        """The evaluation points of each run."""
        return [run.evaluations for run in self.runs]

    @property
    def steady(self) -> list[Evaluations]:
        """The same before the learning rate decays (`Run.steady`)."""
        return [run.steady for run in self.runs]

    def final_losses(self) -> dict[str, float]:
        """The losses of the last evaluation, nats per token, averaged over the seeds that have come to it.

        First `in_domain`, then the compared domains, last their mean if there are several.
        """
        end = max(one.tokens[-1] for one in self.evaluations)
        ended = [one for one in self.evaluations if one.tokens[-1] == end]
        last = [{tags.IN_DOMAIN: one.in_domain, **one.with_mean()} for one in ended]
        return {name: float(np.mean([losses[name][-1] for losses in last])) for name in last[0]}

    def copying_gains(self) -> dict[int, float]:
        """Nats per token that finished models save by copying, by their training tokens, averaged over the seeds."""
        gains: dict[int, list[float]] = {}
        for each in (each for run in self.runs for each in run.ended):
            if np.isfinite(gain := each.last(tags.COPYING_GAIN)):
                gains.setdefault(each.tokens, []).append(gain)
        return {tokens: float(np.mean(each)) for tokens, each in gains.items()}


def load_run(folder: Path, domains: Sequence[str] = ()) -> Run:
    """Reads one run folder, to compare `domains` (or all); a run that is still going can be read too.

    Raises:
        UserError: the folder is not a run, one of its files is malformed (named with the line), or there is no such
            domain to compare.
    """
    folder = Path(folder)
    _check_files(folder)
    curves, steps, tokens = Curves(), 0, 0
    with explain_salvage(folder):
        facts = _read_facts(folder)
        config = read_config(folder)
        if (folder / CURVES).is_file():
            ended = facts.get("status") == "finished"
            curves, steps, tokens = read_curves(
                folder / CURVES, *(facts.get(key) for key in ("curves", "max_steps") if ended)
            )
    run = Run(folder, facts["name"], facts["seed"], facts, config, curves, steps, tokens, domains)
    for domain in domains if run.evaluated else ():
        check_known("OOD domain" if run.role is OOD else "training domain", domain, run.evaluated)
    return run


def read_groups(folders: Iterable[Path], domains: Sequence[str] = ()) -> list[Group]:
    """Reads run folders and puts runs of one name together, in order of appearance.

    Raises:
        UserError: as `load_run`; no folder; two runs of the same name and seed; runs of one name whose models differ.
    """
    if not (runs := [load_run(folder, domains) for folder in folders]):
        raise UserError("a report needs at least one run folder")
    groups: dict[str, Group] = {}
    for run in runs:
        group = groups.setdefault(run.name, Group(run.name, []))
        for other in group.runs:
            _check_seeds(other, run)
        group.runs.append(run)
    return list(groups.values())


def check_losses(groups: Sequence[Group]) -> None:
    """Checks that the runs have losses by domain that can be compared.

    Raises:
        UserError: a run has no evaluation, or its losses are not the same quantity as those of the first (tokenizer,
            training mixture, sequence length, evaluation tokens, hold-out or compared domains differ), or several
            models have one training domain and no OOD domain.
    """
    first = groups[0].runs[0]
    if len(groups) > 1 and first.narrow:
        raise UserError(f"'{first.name}' ({first.folder}) has one domain, so nothing to compare: name some in data.ood")
    for run in (run for group in groups for run in group.runs):
        assert run.evaluations
        _check_comparable(first, run)


def pick_reference(groups: Sequence[Group], reference: str | None) -> Group:
    """The group called `reference`, by default the first.

    Raises:
        UserError: no group has that name.
    """
    by_name = {group.name: group for group in groups}
    if reference is not None:
        check_known("reference run", reference, by_name)
    return groups[0] if reference is None else by_name[reference]


def _check_files(folder: Path) -> None:
    """Refuse a folder that holds no run; only one that was imported has no curves."""
    if not folder.is_dir():
        raise absent("run folder", folder)
    if (folder / RECORD).exists():
        check_folder(folder, written=False)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing and not (missing == [CURVES] and read_record(folder).get("imported")):
        inside = " ".join(str(path.parent) for path in sorted(folder.glob("*/run.json"))[:4])
        hint = f"did you mean the runs inside it: {inside}" if inside else "name one that seqarch fit wrote"
        raise UserError(f"{folder} is not a run folder, it has no {' and no '.join(missing)}: {hint}")


def _read_facts(folder: Path) -> dict[str, Any]:
    facts = read_record(folder)
    for key, kind in FACTS.items():
        if not (KINDS[kind](facts.get(key)) or (facts.get(key) is None and key not in REQUIRED)):
            raise UserError(f"{folder / RECORD}: '{key}' must be {kind}, found {facts.get(key)!r:.80}")
    return facts


def _is_mapping(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(is_label(key) and fits(one) for key, one in value.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _check_seeds(run: Run, other: Run) -> None:
    """Two runs of one name must be seeds of the same model."""
    if run.seed == other.seed:
        raise UserError(f"{run.folder} and {other.folder} are both '{run.name}' of seed {run.seed}: leave one out")
    one, two = run.modelled, other.modelled
    for key in [key for key in one if key in two and one[key] != two[key] and not may_differ(key, "seeds")]:
        pair = f"{run.folder}: {one[key]}, {other.folder}: {two[key]}"
        raise UserError(f"two seeds are called '{run.name}', but they differ in {key} ({pair}): rename one")


def _check_comparable(run: Run, other: Run) -> None:
    """Losses of two runs are one quantity only with the same tokens, hold-out, context and domains."""
    one, two = run.measured, other.measured
    for what in [what for what in one if what in two]:
        if one[what] != two[what] and not (isinstance(one[what], float) and abs(one[what] - two[what]) < 1e-6):
            pair = f"'{run.name}' ({run.folder}) and '{other.name}' ({other.folder}) cannot be compared, they differ"
            raise UserError(f"{pair} in {what} ({one[what]} and {two[what]}): evaluate both alike, or set --domains")
