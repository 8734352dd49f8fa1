"""What models of several sizes say: laws, savings, decision accuracy and registered predictions.

OUT/scale.md           the summary in words
OUT/losses.csv         the finished models that it is made from (`seqarch scale --losses` reads it)
OUT/savings.csv        what each model needs for the reference's loss
OUT/decisions.csv      how each smaller rung predicts the order at the largest
OUT/predictions.csv    which order is expected at the next rung (`seqarch.scale.decisions`)
OUT/scale.png, .svg    the losses over the tokens, with the fitted laws
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from seqarch.errors import UserError, check_known, say
from seqarch.report.panels import Picture, log_axis, own_style, panels, save
from seqarch.report.styles import styles
from seqarch.runs.files import check_folder, replaced
from seqarch.runs.tags import IN_DOMAIN
from seqarch.scale.decisions import (
    PREDICTIONS,
    Accuracy,
    Prediction,
    Rungs,
    accuracies,
    ends_of,
    register,
    rungs_of,
    scored,
)
from seqarch.scale.law import Laws, Saving
from seqarch.scale.losses import GAP, LOSS, NATS, OOD, Point, read_losses, read_runs, write_losses
from seqarch.scale.request import Request
from seqarch.tables import markdown, write_csv

SAVINGS = ("model", "rung", "reference", "tokens_ratio", "low", "high", "time_ratio", "time_low", "time_high")


class Summary:
    """What some finished models say.

    Args:
        points: the finished models.
        loss: the name of their loss.
        reference: the model that savings are compared with, by default the first.
        register: a file with predictions to score.
        unit: the unit of the loss; "" if it is unknown, as in a CSV file.

    Raises:
        UserError: there is one model or one rung only, or no model of that name.
    """

    def __init__(
        self,
        points: Sequence[Point],
        loss: str,
        reference: str | None = None,
        register: Path | None = None,
        unit: str = "",
    ) -> None:
        self.points, self.loss, self.register = list(points), loss, register
        self.label = f"{loss}, {unit}" if unit else loss
        self.models = list(dict.fromkeys(point.model for point in points))
        if reference is not None:
            check_known("reference", reference, self.models)
        self.reference = reference or (self.models or [""])[0]
        if len(self.models) < 2 or len(self.rungs) < 2:
            raise UserError(f"a scale needs two models at two sizes or budgets, not {self.models} at {[*self.rungs]}")

    @cached_property
    def rungs(self) -> Rungs:
        """The losses of each rung."""
        return rungs_of(self.points)

    @cached_property
    def accuracies(self) -> list[Accuracy]:
        """How each smaller rung predicts the order at the largest."""
        return accuracies(self.rungs)

    @cached_property
    def laws(self) -> Laws | str:
        """The laws of the models that have the points for one, or why there are none."""
        if self.loss == GAP:
            return "a gap has no law"
        counts = {
            model: (len({p.rung for p in own}), len({p.tokens for p in own}))
            for model in self.models
            if (own := [point for point in self.points if point.model == model])
        }
        chosen = [model for model, (sizes, budgets) in counts.items() if sizes > 1 and budgets > 1]
        if self.reference not in chosen or len(chosen) < 2:
            return "laws need the reference and another model at two sizes and two budgets or more"
        try:
            return Laws([point for point in self.points if point.model in chosen])
        except UserError as error:
            return str(error)

    @cached_property
    def savings(self) -> list[tuple[str, Saving, Saving | None]]:
        """For each model what it needs for the reference's loss at its largest rung: tokens, and time if known."""
        if isinstance(self.laws, str):
            return []
        ends = {point.model: point for point in sorted(self.points, key=lambda each: (each.parameters, each.tokens))}
        end = ends[self.reference]
        savings = []
        for model in self.laws.models:
            own = ends[model]
            if model != self.reference and own.rung == end.rung:
                tokens = self.laws.saving(model, end, own.parameters)
                slower = self._speed(end) / self._speed(own)
                savings.append((model, tokens, tokens.times(slower) if math.isfinite(slower) else None))
        return savings

    def _speed(self, end: Point) -> float:
        """The median speed of a model at a rung, of all its seeds."""
        own = (each.tokens_per_second for each in self.points if (each.model, each.rung) == (end.model, end.rung))
        return float(np.median([speed for speed in own if math.isfinite(speed)] or [math.nan]))

    @cached_property
    def predictions(self) -> list[Prediction]:
        """The registered predictions with their scores."""
        return scored(self.register, self.loss, self.rungs) if self.register else []

    @property
    def text(self) -> str:
        """The summary in words, as Markdown."""
        parts = [self._losses(), self._laws(), self._decisions(), self._predictions()]
        return "\n\n".join(part for part in parts if part)

    def write(self, out: Path) -> list[Path]:
        """Write the summary into a folder and return its files, with the one that `register` writes."""
        check_folder(out, out.parent)
        with replaced(out) as new:
            (new / "scale.md").write_text(f"# Scale\n\n{self.text}\n", encoding="utf-8")
            write_losses(new / "losses.csv", self.points)
            write_csv(new / "savings.csv", SAVINGS, self._saving_rows())
            names = [each.name for each in fields(Accuracy)]
            write_csv(new / "decisions.csv", names, [astuple(each) for each in self.accuracies])
            save({"scale": self.figure()}, new)
        return [
            out / name for name in ("scale.md", "losses.csv", "savings.csv", "decisions.csv", PREDICTIONS, "scale.png")
        ]

    def figure(self) -> Picture:
        """A panel for each rung, a colour for each model: losses over training tokens; lines are the laws."""
        sizes = dict.fromkeys(point.rung for point in sorted(self.points, key=lambda point: point.parameters))
        laws = None if isinstance(self.laws, str) else self.laws
        looks = styles({model: model for model in self.models})
        with own_style():
            figure, grid = panels(len(sizes), sharey=True)
            for axes, rung in zip(grid, sizes, strict=True):
                axes.set_title(rung)
                for model in self.models:
                    own = [point for point in self.points if (point.model, point.rung) == (model, rung)]
                    own.sort(key=lambda point: point.tokens)
                    tokens = np.array([point.tokens for point in own])
                    losses = [point.loss for point in own]
                    style = looks[model].line(label=model)
                    has_law = laws is not None and model in laws.models and own
                    figure.plot(axes, model, tokens, losses, **style | ({"linestyle": "none"} if has_law else {}))
                    if has_law and laws is not None:
                        at = np.geomspace(tokens.min(), tokens.max(), 50)
                        law = [laws.loss(model, own[0].parameters, each) for each in at]
                        axes.plot(at, law, color=style["color"], linestyle=style["linestyle"], linewidth=1.0)
            log_axis(grid[0])
            figure.supxlabel("training tokens")
            figure.supylabel(self.label)
            handles, labels = grid[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside right center", fontsize=8)
        return figure

    def _losses(self) -> str:
        rows = [["model", *self.rungs]]
        for model in self.models:
            losses = (self.rungs[rung].get(model) for rung in self.rungs)
            rows.append([model, *("" if own is None else f"{np.mean(own):.4f}" for own in losses)])
        return _section(f"Loss ({self.label}) at the end of each rung", rows)

    def _laws(self) -> str:
        title = "Laws L = E + A N^-a + B D^-b, and what a model needs for the reference's loss"
        if isinstance(self.laws, str):
            return f"## {title}\n\nNone: {self.laws}."
        needs = {model: (tokens, time) for model, tokens, time in self.savings}
        rows = [["model", "a", "b", "tokens, ratio", "tokens saved", "time, ratio"]]
        for k, model in enumerate(self.laws.models):
            a, b = self.laws.fit[2 + 4 * k], self.laws.fit[4 + 4 * k]
            tokens, time = needs.get(model, (None, None))
            saved = "" if tokens is None else _percent(1 - tokens.ratio)
            shown = ["reference"] if model == self.reference else [_interval(tokens)]
            rows.append([model, f"{a:.2f}", f"{b:.2f}", *shown, saved, _interval(time)])
        between, within = self.laws.noise
        noise = f"E = {self.laws.floor:.3f} for all. Noise: {between:.2%} between runs, {within:.2%} within."
        return f"{_section(title, rows)}\n\n{noise}"

    def _decisions(self) -> str:
        if not self.accuracies:
            return "## Decision accuracy\n\nNone: it needs two rungs with the same three models or more."
        ties = any(each.tied for each in self.accuracies)
        section = _section("Decision accuracy", decision_rows(self.accuracies))
        return f"{section}\n\nA pair is undecided if its losses are equal at one of the rungs." if ties else section

    def _predictions(self) -> str:
        tested = [each for each in self.predictions if each.later]
        if not tested:
            return ""
        rows = [["written", "from", "better", "worse", "predicted", "decided", "tested at", "measured", "holds"]]
        for each in tested:
            numbers = f"{each.difference:+.4f}", each.decided, each.later, f"{each.measured:+.4f}"
            holds = "equal" if each.is_tied else "yes" if each.holds else "no"
            rows.append([each.written, each.rung, each.better, each.worse, *numbers, holds])
        told = [each for each in tested if not each.is_tied]
        held = f"{sum(each.holds for each in told)} of {len(told)} hold"
        decided = [each.holds for each in told if each.decided == "yes"]
        held += f", {sum(decided)} of the {len(decided)} decided ones." if decided else "."
        held += " Equal losses count neither way." if told != tested else ""
        return f"{_section('Registered predictions', rows)}\n\n{held}"

    def _saving_rows(self) -> list[list[object]]:
        *_, last = max((at.parameters, at.tokens, at.rung) for at in self.points if at.model == self.reference)
        empty = ("", "", "")
        return [
            [model, last, self.reference, *astuple(tokens), *(astuple(time) if time else empty)]
            for model, tokens, time in self.savings
        ]


def decision_rows(accuracies: Sequence[Accuracy]) -> list[list[str]]:
    """Decision accuracies as a table of text, its head first."""
    head = ["order at", "order at the largest", "right pairs", "95 % interval", "rank correlation", "95 % interval"]
    rows = [[*head, "by chance", "all pairs right above"]]
    for each in accuracies:
        share = "none is wrong" if each.right == each.pairs else ""
        if each.share_low is not None:
            share = f"{each.share_low:.0%} to {each.share_high:.0%}"
        right = f"{each.right} of {each.pairs}" + (f" ({each.right / each.pairs:.0%})" if each.pairs else "")
        right += f", {each.tied} undecided" if each.tied else ""
        ranks = ["no order" if each.rank_correlation is None else f"{each.rank_correlation:.2f}", ""]
        if each.rank_correlation_low is not None:
            ranks[1] = f"{each.rank_correlation_low:.2f} to {each.rank_correlation_high:.2f}"
        above = f"{each.decided_from:.4f} ({each.decided} pairs)"
        rows.append([each.early, each.late, right, share, *ranks, f"{each.chance:.2g}", above])
    return rows


def _section(title: str, rows: list[list[str]]) -> str:
    return "\n".join([f"## {title}", "", *markdown(rows)])


def _interval(saving: Saving | None) -> str:
    if saving is None:
        return ""
    low, ratio, high = map(_ratio, (saving.low, saving.ratio, saving.high))
    return f"{ratio} ({low} to {high})"


def _ratio(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f}" if value < 100 else ">100"


def _percent(share: float) -> str:
    return f"{share:+.0%}" if math.isfinite(share) else "never"


def train(request: Request, loss: str | None) -> None:
    """Train the rungs and print their summary. After each rung, what it predicts for the next is written down.

    Raises:
        UserError: what is wrong, before anything is trained; or which runs failed, after the others are summarised.
    """
    from seqarch.exam.derive import load_size
    from seqarch.exam.train import check_all_finished
    from seqarch.scale.rungs import train_rungs

    loss = loss or IN_DOMAIN
    data = load_size(request.like, request.options).recipe["data"]
    check_known("loss", loss, [IN_DOMAIN, OOD, GAP, *(data["ood"] or data["train"])])
    if loss == GAP and request.match != "tokens":
        raise UserError("--loss gap compares models with the same tokens: set --match tokens")
    out = Path(request.out or "runs/scale")
    folders: list[Path] = []
    wrong: dict[str, str] = {}
    points: list[Point] = []
    reference = ""
    for exam, failed, following in train_rungs(request, out):
        wrong |= failed
        reference = exam.reference.name
        folders += [run for entrant in exam.entrants for run in exam.finished(entrant)]
        if reference in {run.parent.name for run in folders}:
            points = read_runs(folders, loss, reference)
        later = following or exam  # the last rung predicts nothing: a larger one of another command may be finished
        if points:
            known = {each.name for each in later.entrants if later.finished(each)}
            register(out / PREDICTIONS, loss, ends_of(points), known)
    if len({point.model for point in points}) < 2:  # nothing to summarise
        check_all_finished(wrong)
    say("\n" + _write(Summary(points, loss, reference, out / PREDICTIONS, NATS), out))
    check_all_finished(wrong)


def summarize(
    runs: Sequence[Path], losses: Path | None, loss: str | None, reference: str | None, out: Path | None
) -> str:
    """The summary of run folders or of a CSV file, written to `out` if that is given.

    Raises:
        UserError: as `read_runs`, `read_losses` and `Summary`.
    """
    points = read_losses(losses, loss) if losses else read_runs(runs, loss or IN_DOMAIN, reference)
    loss = loss or (LOSS if losses else IN_DOMAIN)
    summary = Summary(points, loss, reference, out and out / PREDICTIONS, "" if losses else NATS)
    if out is None:
        return summary.text
    written = _write(summary, out)  # scores the predictions before new ones are written
    register(out / PREDICTIONS, summary.loss, summary.rungs)
    return written


def _write(summary: Summary, out: Path) -> str:
    return "\n".join([summary.text, "", *(f"wrote {path}" for path in summary.write(out))])
