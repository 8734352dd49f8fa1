"""The interface to reports: compared runs as a small object for Python and notebooks, and as a folder of files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqarch.arguments import typed
from seqarch.errors import UserError, several
from seqarch.report.findings import Findings
from seqarch.report.tables import TABLES, gap_rows, gap_title, gaps, write_tables
from seqarch.runs.files import replaced
from seqarch.tables import aligned

if TYPE_CHECKING:
    from seqarch.report.panels import Picture


class Comparison:
    """Some runs compared with a reference. A notebook shows it as a table.

    Args:
        findings: the findings, each of which is computed once.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    @property
    def gaps(self) -> list[dict[str, Any]]:
        """The rows of `gap.csv`: the gap during training per model and domain, nats per token, or why there is none
        (`refused`). `findings.finished` has the gaps between finished models."""
        head, rows = gaps(self.findings)
        return [dict(zip(head, row, strict=True)) for row in rows]

    @property
    def table(self) -> str:
        """The gaps as plain text for a terminal."""
        return "\n".join([*self._title(), *aligned(gap_rows(self.findings)), *self._refusals()])

    @typed
    def figures(self, names: str | Sequence[str] = ()) -> "dict[str, Picture]":
        """The figures of the report by name, or only `names`, without figures for which these runs have no data."""
        from seqarch.report.figures import FIGURES, OF_LOSSES
        from seqarch.report.panels import own_style

        names = several(names)
        with own_style():
            figures = [each for each in FIGURES if not (self.findings.no_losses and each in OF_LOSSES)]
            drawn = {each.name: each.draw(self.findings) for each in figures if not names or each.name in names}
        return {name: figure for name, figure in drawn.items() if figure is not None}

    @typed
    def write(self, out: str | Path) -> list[Path]:
        """Writes the report into a folder, made if needed, and returns the files, the page `index.html` first.

        Next to the page: each figure as PNG and SVG, and the numbers in `models.csv`, `gap.csv`, `convergence.csv`,
        `scatter.csv` and `entropy.csv`, and `capabilities.csv` if there are results of `seqarch eval`. Older files
        of these names are replaced or removed.

        Raises:
            UserError: `out` is a file.
        """
        from seqarch.report.figures import FIGURES
        from seqarch.report.page import render
        from seqarch.report.panels import save

        out = Path(out)
        if out.is_file():
            raise UserError(f"{out} is a file: a report needs a folder to write into")
        names = [f"{figure.name}.{kind}" for figure in FIGURES for kind in ("png", "svg")]
        figures = self.figures()
        with replaced(out, [*names, *(f"{table}.csv" for table in TABLES)]) as new:
            files = save(figures, new)
            tables = write_tables(self.findings, new)
            html = new / "index.html"
            pictures = {name: (svg, figures[name]) for name, (_, svg) in files.items()}
            html.write_text(render(self.findings, pictures), encoding="utf-8")
        return [out / path.name for path in (html, *(path for each in files.values() for path in each), *tables)]

    def _title(self) -> list[str]:
        return [gap_title(self.findings)] if self.findings.comparisons else []

    def _refusals(self) -> list[str]:
        if self.findings.no_losses:
            return [self.findings.no_losses]
        refusals = [one.refusal for one in self.findings.comparisons.values() if one.refusal and one.finished is None]
        return [*refusals, *self.findings.diverged, *self.findings.unended]

    def __repr__(self) -> str:
        return self.table

    def _repr_html_(self) -> str:
        from seqarch.report.page import render_gaps

        return render_gaps(self.findings, self._refusals())


@typed
def compare(runs: Sequence[str | Path] | Path, reference: str | None = None, domains: Sequence[str] = ()) -> Comparison:
    """Compares run folders; several with one name and different seeds count as seeds of one model.

    Args:
        runs: run folders, or the name of one.
        reference: name of the model that the others are compared with, by default the first.
        domains: which domains to compare; by default all OOD domains, or the hold-outs of all training domains if the
            runs were given no OOD domain.

    Raises:
        UserError: a folder is not a run or malformed, the runs cannot be compared, no run is called `reference`, or
            they have no such domain. If the in-domain losses overlap too little for a gap, the result
            says so and nothing is raised. It also says so if runs with results of `seqarch eval` have no losses that
            can be compared.
    """
    return Comparison(Findings.read([Path(run) for run in several(runs)], reference, several(domains)))


def report(runs: str | Path | Sequence[str | Path], out: str | Path, reference: str | None = None) -> list[Path]:
    """Writes the report of some run folders into `out`: `compare` and `Comparison.write` in one call."""
    return compare(runs, reference).write(out)
