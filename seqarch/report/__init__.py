"""Reports from run folders: in-domain against OOD loss, loss and entropy curves, the base-capability gap.

Reads files alone: neither torch nor lightning is imported, so a report can be made anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seqarch.errors import UserError
from seqarch.report.gap import Gap, OverlapError, base_capability_gap
from seqarch.report.runs import Evaluations, Group, Run, load_groups, load_run, pick_reference
from seqarch.report.tables import (
    Comparison,
    compare,
    gap_table,
    write_convergence,
    write_entropy,
    write_gaps,
    write_models,
    write_scatter,
)

__all__ = [
    "Evaluations",
    "Findings",
    "Gap",
    "Group",
    "OverlapError",
    "Run",
    "base_capability_gap",
    "find",
    "load_groups",
    "load_run",
    "pick_reference",
    "report",
    "summary",
    "write_report",
]


class Findings(NamedTuple):
    """What `report` draws and `summary` prints: the models, the reference and the comparisons."""

    groups: list[Group]
    reference: Group
    comparisons: list[Comparison]


def find(runs: Sequence[Path], reference: str | None = None, domains: Sequence[str] = ()) -> Findings:
    """Reads some run folders and compares them; arguments and errors as for `report`."""
    groups = load_groups(runs, domains)
    base = pick_reference(groups, reference)
    return Findings(groups, base, compare(groups, base))


def report(runs: Sequence[Path], out: Path, reference: str | None = None, domains: Sequence[str] = ()) -> list[Path]:
    """Writes the report of some run folders and returns the files, the page `index.html` first.

    Beside the page, as PNG and SVG: `scatter`, `gap` and `distance` (of runs that could be compared), `losses`,
    `entropy` and `implied_entropy` (where logged); and the numbers: `models.csv`, `gap.csv`,
    `convergence.csv`, `scatter.csv` and `entropy.csv`. Older files of these names are replaced or removed.

    Args:
        runs: run folders; several with one name and different seeds count as seeds of one model.
        out: folder to write into, made if it is not there.
        reference: name of the run that the others are compared with, by default the first.
        domains: which domains to compare: by default all OOD domains, or where the runs were given none the hold-outs
            of all training domains.

    Raises:
        UserError: a folder is no run or malformed, the runs cannot be compared, no run is called `reference`, they have
            no such domain, or `out` is a file. Runs whose in-domain losses overlap too little are told in the page and
            stop nothing.
    """
    return write_report(find(runs, reference, domains), out)


def write_report(found: Findings, out: Path) -> list[Path]:
    """Writes the report of what `find` found; files and errors as for `report`."""
    from seqarch.report import figures, gap_figure, page, panels

    groups, base, comparisons = found
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: a report needs a folder to write into")
    out.mkdir(parents=True, exist_ok=True)
    drawings = {
        "scatter": lambda: figures.scatter(groups, base, comparisons),
        "gap": lambda: gap_figure.gaps(groups, base, comparisons),
        "distance": lambda: figures.distances(groups, base, comparisons),
        "losses": lambda: figures.losses(groups, base, comparisons),
        "entropy": lambda: figures.entropies(groups),
        "implied_entropy": lambda: figures.entropies(groups, implied=True),
    }
    written = []
    for stem, draw in drawings.items():
        for old in (out / f"{stem}.png", out / f"{stem}.svg"):
            old.unlink(missing_ok=True)
        written += panels.save(draw, out / stem)
    tables = [
        write_models(out / "models.csv", groups),
        write_gaps(out / "gap.csv", comparisons, base),
        write_convergence(out / "convergence.csv", groups, base),
        write_scatter(out / "scatter.csv", groups),
        write_entropy(out / "entropy.csv", groups),
    ]
    html = out / "index.html"
    pictures = [path for path in written if path.suffix == ".svg"]
    html.write_text(page.render(groups, base, comparisons, pictures), encoding="utf-8")
    return [html, *written, *tables]


def summary(runs: Sequence[Path], reference: str | None = None, domains: Sequence[str] = ()) -> str:
    """The gaps of some run folders as a text table for the terminal; arguments and errors as for `report`."""
    return gap_table(*find(runs, reference, domains))
