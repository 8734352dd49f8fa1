"""The findings of a report: the models, the reference and every gap, each computed once."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from seqarch.errors import UserError
from seqarch.report.capabilities import Measured, capabilities
from seqarch.report.draft import Draft, draft_gap
from seqarch.report.estimates import Gap
from seqarch.report.gap import FinishedModels, Seeds, seed_pairs
from seqarch.report.roles import Role
from seqarch.report.runs import DIVERGED, PARTS, Group, Run, Tag, check_losses, pick_reference, read_groups
from seqarch.report.styles import FEW, Style, kind, styles
from seqarch.runs.folder import branches, result_paths
from seqarch.runs.tags import MEAN, loss


@dataclass(frozen=True)
class ModelGaps:
    """A model against the reference: the gap between finished models, which decides, and the gap during training."""

    group: Group
    reference: str
    finished: Gap | None = None
    """`None` where `unfinished` says why, and for runs without branches: their gap during training is a draft."""
    draft: Draft | None = None
    refusal: str = ""
    """The reason why there is no gap during training."""
    unfinished: str = ""
    """The reason why there is no gap between finished models, if any run has branches."""

    @property
    def by_domain(self) -> dict[str, float]:
        """The gap of each domain and, last, of their mean (or of the one domain), of finished models if there are."""
        if self.finished is None:
            return self.draft.gaps if self.draft else {}
        last = self.finished.headline
        return last.domains if len(last.domains) == 1 else {**last.domains, MEAN: last.raw.value}

    @property
    def sentence(self) -> str:
        """The verdict, the draft in a sentence, or the reason why there is neither."""
        name, role = self.group.name, self.group.runs[0].role
        if self.finished is not None:
            return f"{self.finished.sentence(name, self.reference)}."
        if self.draft is None:
            return f"{self.refusal[:1].upper()}{self.refusal[1:]}."
        domain, value = list(self.draft.gaps.items())[-1]
        where = f"averaged over {self.group.average}" if domain == MEAN else f"on {role.one}{domain}"
        why = self.unfinished or "finished models (--branches.at) give one"
        return (
            f"{name} against {self.reference}, a draft: {value:+.3f} nats per token {where} at the same {role.equal} "
            f"during training. It has no interval; {why}."
        )


@dataclass(frozen=True)
class Findings:
    """The models of a report and what follows from them.

    Args:
        groups: the models, in order of appearance.
        reference: the one among them that the others are compared with.
        no_losses: the reason why the losses by domain are not compared, for runs that have results of `seqarch eval`.
        whole: the findings on all models of the exam if these are some of them (`only`).
        neighbour: the name of the reference at its second-best rate, if that is one of the models.
        limits: why these runs can settle nothing, as a clause; empty if they can.
    """

    groups: list[Group]
    reference: Group
    no_losses: str = ""
    whole: "Findings | None" = None
    neighbour: str | None = None
    limits: str = ""

    @classmethod
    def read(cls, runs: Sequence[Path], reference: str | None = None, domains: Sequence[str] = ()) -> "Findings":
        """Reads some run folders; arguments and errors as for `seqarch.report.compare`."""
        groups, no_losses = read_groups(runs, domains), ""
        try:
            check_losses(groups)
        except UserError as error:
            if not any(map(result_paths, runs)):
                raise
            no_losses = f"The report shows no losses and no gap: {error}."
        return cls(groups, pick_reference(groups, reference), no_losses)

    def only(self, names: Container[str]) -> "Findings":
        """The findings on some models; the gaps between finished models have the weights and intervals of all."""
        return replace(self, groups=[group for group in self.groups if group.name in names], whole=self)

    @property
    def role(self) -> Role:
        """The role of the compared domains: OOD domains or hold-outs."""
        return self.reference.runs[0].role

    @property
    def others(self) -> list[Group]:
        """All models but the reference."""
        return [group for group in self.groups if group is not self.reference]

    @property
    def runs(self) -> list[tuple[Group, Run]]:
        """All runs, each with its model."""
        return [(group, run) for group in self.groups for run in group.runs]

    @property
    def many(self) -> bool:
        """Whether there are more models than colours."""
        return len(self.groups) > FEW

    @cached_property
    def domains(self) -> list[str]:
        """The compared domains, then their mean if there are several."""
        return [] if self.no_losses else list(self.reference.evaluations[0].with_mean())

    @property
    def diverged(self) -> list[str]:
        """A sentence for each run that diverged."""
        return [
            f"'{run.name}' ({run.folder}) diverged: a loss of its last evaluation is not a finite number. "
            f"The report shows the run up to step {run.evaluations.step[-1]}."
            for _, run in self.runs
            if run.status == DIVERGED and not self.no_losses
        ]

    @property
    def unended(self) -> list[str]:
        """A sentence for each run that has not taken all its steps."""
        words = {"failed": "failed", "stopped": "was stopped", "running": "is not finished: it is"}
        return [
            f"'{run.name}' ({run.folder}) {words[run.status]} at step {run.steps} of {run.facts.get('max_steps', '?')}."
            for _, run in self.runs
            if run.status in words
        ]

    @cached_property
    def comparisons(self) -> dict[str, ModelGaps]:
        """Every other model against the reference, by name. A report is made even if runs overlap too little."""
        return {} if self.no_losses else {group.name: self._compare(group) for group in self.others}

    def _compare(self, group: Group) -> ModelGaps:
        names, draft, refusal = (f"'{group.name}'", f"'{self.reference.name}'"), None, ""
        try:
            draft = draft_gap(group.steady, self.reference.steady, names=names)
        except UserError as error:
            refusal = str(error)
        finished, unfinished = self.finished.get(group.name), self.unfinished.get(group.name, "")
        return ModelGaps(group, self.reference.name, finished, draft, refusal, unfinished)

    @cached_property
    def finished(self) -> dict[str, Gap]:
        """The gaps between finished models by name, for runs with branches; see `unfinished` for the others."""
        if self.whole is not None:
            return {each.name: gap for each in self.groups if (gap := self.whole.finished.get(each.name))}
        return self.finished_models.gaps() if self.finished_models else {}

    @cached_property
    def finished_models(self) -> FinishedModels | None:
        """The finished models of all that have a gap, next to the reference's; `None` if no model has one."""
        models, reference = self._finished_models()
        candidates = {name: each for name, each in models.items() if name not in self.unfinished}
        if not candidates:
            return None
        parts = {part: self._finished_models(tag) for part, tag in PARTS.items()}
        gains = {group.name: group.copying_gains() for group in self.groups}
        of_reference = gains[self.reference.name]
        return FinishedModels(candidates, reference, parts, gains, of_reference, self.neighbour, self.limits)

    @cached_property
    def unfinished(self) -> dict[str, str]:
        """The reason why a model has no gap between finished models, by name, for reports with branches."""
        models, reference = self._finished_models()
        reasons = {}
        for name, each in models.items():
            try:
                seed_pairs(name, each, reference)
            except UserError as error:
                reasons[name] = str(error)
        return reasons

    def _finished_models(self, tag: Tag = loss) -> tuple[Mapping[str, Seeds], Seeds]:
        """The finished models of every other model and of the reference, by seed; nothing where no run has branches."""
        if self.no_losses or not any(branches(run.folder) for _, run in self.runs):
            return {}, {}
        by_seed = {
            group.name: {run.seed: models for run in group.runs if (models := run.finished_models(tag)) is not None}
            for group in self.groups
        }
        reference = by_seed.pop(self.reference.name)
        return by_seed, reference

    @cached_property
    def capabilities(self) -> dict[str, dict[str, Measured]]:
        """Results of `seqarch eval`, by metric, then by the name of the model."""
        return capabilities(self.groups, self.reference, losses=bool(self.no_losses))

    @cached_property
    def ranked(self) -> list[Group]:
        """The models by their gap, the best first and the reference at zero. Models without a gap come last."""
        gaps = {name: list(one.by_domain.values())[-1] for name, one in self.comparisons.items() if one.by_domain}
        gaps[self.reference.name] = 0.0
        return sorted(self.groups, key=lambda group: gaps.get(group.name, np.inf))

    @cached_property
    def styles(self) -> dict[str, Style]:
        """The style of each model, by name."""
        return styles({group.name: kind(group) for group in self.groups})
