"""The HTML page of a report, from `page.html`: one file, pictures embedded, readable in light and dark."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from seqarch.errors import UserError
from seqarch.report.capabilities import Measured
from seqarch.report.costs import costs, hardware, versions
from seqarch.report.draft import EARLY, MIN_OVERLAP
from seqarch.report.figures import FIGURES
from seqarch.report.findings import Findings
from seqarch.report.panels import Picture
from seqarch.report.roles import OOD
from seqarch.report.runs import Group, Run
from seqarch.report.tables import budget_rows, gap_rows
from seqarch.runs.keys import flatten, may_differ
from seqarch.tables import readable


class Cell(NamedTuple):
    """A cell of a table; `note` is a second line, `kind` its class in the style sheet."""

    text: str
    kind: str = ""
    note: str = ""


Table = tuple[Sequence[str], Sequence[Sequence[Cell]]]


def render(findings: Findings, pictures: Mapping[str, tuple[Path, Picture]]) -> str:
    """The page, from the findings and each figure by its name, with its SVG file."""
    one = findings.reference.runs[0]
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=_title(findings),
            ood=findings.role is OOD,
            role=findings.role,
            words=asdict(findings.role),
            weights=_weights(one.facts.get("train") or {}),
            domains=one.domains,
            reference=findings.reference.name,
            no_losses=findings.no_losses,
            verdicts=[*(each.sentence for each in findings.comparisons.values()), *findings.diverged],
            gaps=_text_table(gap_rows(findings)),
            finished={name: _text_table(budget_rows(one)) for name, one in findings.finished.items()},
            early=f"{100 * EARLY:g} %",
            min_overlap=f"{MIN_OVERLAP:g}",
            figures=[(figure, *pictures[figure.name]) for figure in FIGURES if figure.name in pictures],
            capabilities=capability_table(findings),
            facts=_describe(findings, _facts),
            origins=_describe(findings, _origin),
            differences=_differences(findings.groups),
        )
    )


def render_gaps(findings: Findings, notes: Sequence[str]) -> str:
    """The table of the gaps as a piece of HTML, for a notebook, and notes below it."""
    macros: Any = _environment().get_template("table.html").module
    return str(macros.table(*_text_table(gap_rows(findings)))) + "".join(f"<p>{escape(note)}</p>" for note in notes)


def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("seqarch.report", "."), autoescape=True, undefined=StrictUndefined)
    environment.filters["capitalise"] = lambda text: text[:1].upper() + text[1:]
    environment.filters["base64"] = lambda path: base64.b64encode(path.read_bytes()).decode("ascii")
    return environment


def _title(findings: Findings) -> str:
    if not findings.others:
        return findings.reference.name
    names = [group.name for group in findings.others]
    return f"{', '.join(names) if len(names) < 3 else f'{len(names)} models'} against {findings.reference.name}"


def _text_table(rows: Sequence[Sequence[str]]) -> Table:
    """Rows of text, the head first, as a table of the page."""
    head, *rest = rows
    return head, [[Cell(row[0], "name"), *(Cell(text, "number") for text in row[1:])] for row in rest]


def capability_table(findings: Findings) -> Table | None:
    """The results of `seqarch eval`: a row per metric, a column per model."""
    names = [
        group.name for group in findings.groups if any(group.name in each for each in findings.capabilities.values())
    ]
    rows = []
    for tag, measured in findings.capabilities.items():
        first = next(iter(measured.values()))
        limit = first.facts["settings"].get("limit")
        chance = first.value.chance
        counted = f"{first.value.n} sample{'' if first.value.n == 1 else 's'}" if first.value.n else ""
        note = counted + (f", --limit {limit}" if limit else "")
        cells = [Cell(tag, "name", note), Cell("" if chance is None else f"{chance:.3g}", "number")]
        rows.append(cells + [_capability(measured.get(name)) for name in names])
    return (["metric", "chance", *names], rows) if rows else None


def _capability(one: Measured | None) -> Cell:
    if one is None:
        return Cell("not measured", "soft")
    notes = []
    if one.value.low is not None:
        notes.append(f"{one.value.low:.3g} to {one.value.high:.3g}{', at chance' if one.value.at_chance else ''}")
    if one.difference is not None:
        by, low, high = one.difference
        notes.append(f"{by:+.3g} ({low:+.3g} to {high:+.3g}){', cannot be told apart' if one.alike else ''}")
    return Cell(f"{one.value.value:.3g}", "number", "; ".join([*notes, f"step {one.step}"]))


def _describe(findings: Findings, describe: Any) -> Table:
    """A row per run with the texts that `describe` gives."""
    described = [describe(run) for _, run in findings.runs]
    rows = [
        [Cell(run.name, "name"), Cell(str(run.seed), "number"), *map(_fact, row.values())]
        for (_, run), row in zip(findings.runs, described, strict=True)
    ]
    return ["run", "seed", *described[0]], rows


def _facts(run: Run) -> dict[str, str]:
    facts, took = run.facts, costs(Group(run.name, [run]))
    counted = " (counted)" if facts.get("flops_counted") else ""
    return {
        "status": run.status,
        "parameters": _count(facts.get("parameters")),
        "steps": f"{run.steps} of {facts.get('max_steps', '?')}",
        "tokens": readable(run.tokens),
        "tokens/s": _count(took.tokens_per_second),
        "MFU": "not logged" if took.mfu is None else f"{took.mfu:.1%}{counted}",
        "peak memory": "not logged" if took.peak_gib is None else f"{took.peak_gib:.2f} GiB",
        "evaluations": _evaluations(run),
    }


def _evaluations(run: Run) -> str:
    """The number of complete evaluations, and the number that is left out."""
    try:
        complete, left_out = len(run.evaluations.step), run.evaluations_left_out
    except UserError:  # of a run without losses, which a report shows for its results of seqarch eval
        return "none to compare"
    return f"{complete}" + (f" ({left_out} incomplete, left out)" if left_out else "")


def _origin(run: Run) -> dict[str, str]:
    facts = run.facts
    commit = str(facts.get("commit") or "unknown")
    return {
        "mixers": ", ".join(f"{name}: {kind}" for name, kind in (facts.get("mixers") or {}).items()) or "unknown",
        "hardware": hardware(run),
        "started": str(facts.get("started") or "unknown")[:16].replace("T", " "),
        "commit": commit[:10] + ("-dirty" if commit.endswith("-dirty") else ""),
        "versions": versions(run) or "unknown",
    }


def _differences(groups: Sequence[Group]) -> Table | None:
    """The settings in which the configurations differ, so that the comparison compares them."""
    if len(groups) < 2:
        return None
    flat = [{key: str(value) for key, value in flatten(group.runs[0].config).items()} for group in groups]
    every = dict.fromkeys(key for one in flat for key in one if not may_differ(key, "report"))
    keys = [key for key in every if len({one.get(key) for one in flat}) > 1]
    rows = [[Cell(key, "key"), *(Cell(one.get(key, "not set")) for one in flat)] for key in keys]
    return ["setting", *(group.name for group in groups)], rows


def _fact(text: str) -> Cell:
    return Cell(text, "number" if len(text) < 32 else "long")


def _weights(train: Mapping[str, float]) -> str:
    weighted = [f"{name} {weight:g}" for name, weight in train.items()]
    return ", ".join(weighted) if len(train) > 1 else next(iter(train), "unknown")


def _count(value: float | None) -> str:
    return "not logged" if value is None else readable(float(value))
