"""The HTML page of a report, from `page.html`: one file, pictures embedded, readable in light and dark."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import escape

from seqarch.report.capabilities import Measured
from seqarch.report.draft import EARLY, MIN_OVERLAP
from seqarch.report.figures import FIGURES
from seqarch.report.findings import Findings
from seqarch.report.panels import Picture
from seqarch.report.roles import OOD
from seqarch.report.runs import Group
from seqarch.report.tables import budget_rows, gap_rows, models
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
            models=_models(findings),
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


def _models(findings: Findings) -> Table:
    """`models.csv` with a column per model, without rows that are empty."""
    header, rows = models(findings)
    head, *facts = zip(header, *rows, strict=True)
    return head, [[Cell(name, "name"), *map(_fact, values)] for name, *values in facts if {*values} - {None, ""}]


def _differences(groups: Sequence[Group]) -> Table | None:
    """The settings in which the configurations differ, so that the comparison compares them."""
    if len(groups) < 2:
        return None
    flat = [{key: str(value) for key, value in flatten(group.runs[0].config).items()} for group in groups]
    every = dict.fromkeys(key for one in flat for key in one if not may_differ(key, "report"))
    keys = [key for key in every if len({one.get(key) for one in flat}) > 1]
    rows = [[Cell(key, "key"), *(Cell(one.get(key, "not set")) for one in flat)] for key in keys]
    return ["setting", *(group.name for group in groups)], rows


def _fact(value: Any) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(readable(value) if value >= 1000 else f"{value:.4g}", "number")
    text = "" if value is None else str(value)
    return Cell(text, "number" if len(text) < 32 else "long")


def _weights(train: Mapping[str, float]) -> str:
    weighted = [f"{name} {weight:g}" for name, weight in train.items()]
    return ", ".join(weighted) if len(train) > 1 else next(iter(train), "unknown")
