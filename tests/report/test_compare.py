"""`seqarch.compare`: runs compared from Python and in a notebook."""

import csv
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import seqarch
from seqarch.errors import UserError
from seqarch.report import findings
from seqarch.report.figures import FIGURES
from seqarch.report.tables import TABLES
from tests.report.runs_for_tests import write_run

DOCS = Path(__file__).parents[2] / "docs/report.md"


def test_the_page_names_every_file_of_a_report():
    page = DOCS.read_text(encoding="utf-8")
    names = [*(f"{table}.csv" for table in TABLES), *(f"{figure.name}.png" for figure in FIGURES)]
    assert [name for name in names if f"| `{name}`" not in page] == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        write_run(folder / "pp", "transformer_pp"),
        write_run(folder / "top1", "top1_<b>_$chunk$|", gap=0.05),
        write_run(folder / "slow", "slow", speed=0.01),
    ]


@pytest.fixture(scope="module")
def comparison(runs):
    return seqarch.compare([str(run) for run in runs])


def test_the_gaps_are_rows_of_plain_values(comparison):
    code, legal, mean, refused = comparison.gaps
    assert [row["domain"] for row in (code, legal, mean)] == ["code", "legal", "mean"]
    assert code["gap"] == pytest.approx(0.05, abs=0.006)
    assert (refused["run"], refused["gap"]) == ("slow", "")
    assert "no gap for 'slow' against 'transformer_pp'" in refused["refused"]


@pytest.mark.parametrize("kind", [str, Path])
def test_one_folder_needs_no_list(runs, kind):
    assert len(seqarch.compare(kind(runs[0])).findings.groups) == 1


def test_it_reads_as_text(comparison):
    title, head, first, second, third, *refusals = comparison.table.splitlines()
    assert title.startswith("Base-capability gap to 'transformer_pp'")
    assert head.split()[:2] == ["run", "tokens"]
    assert [line.split()[0] for line in (first, second, third)] == ["transformer_pp", "top1_<b>_$chunk$|", "slow"]
    assert len(refusals) == 1
    assert str(comparison) == comparison.table


class Cells(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def test_a_notebook_shows_a_table_in_which_names_are_escaped(comparison):
    page = Cells(comparison._repr_html_())
    assert page.tags.count("tr") == 4
    assert "b" not in page.tags
    assert "top1_<b>_$chunk$|" in page.text
    assert any("no gap for 'slow' against 'transformer_pp'" in text for text in page.text)


@pytest.mark.usefixtures("unpainted")
def test_its_figures_are_those_of_the_report(comparison, tmp_path):
    figures = comparison.figures()
    assert (set(comparison.figures("gap")), comparison.figures("gap scatter")) == ({"gap"}, {})
    written = comparison.write(tmp_path)
    assert {path.stem for path in written if path.suffix == ".png"} == set(figures)
    assert set(figures) == {"scatter", "gap", "distance", "losses", "entropy"}
    figures["gap"].savefig(tmp_path / "own.png")
    assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "gap.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{key: str(value) for key, value in row.items()} for row in comparison.gaps]


def test_reference_and_domains_are_chosen_as_in_the_command(runs):
    chosen = seqarch.compare(runs[:2], reference="top1_<b>_$chunk$|", domains=["legal"])
    (row,) = chosen.gaps
    assert (row["run"], row["domain"]) == ("transformer_pp", "legal")
    assert seqarch.compare(runs[:2], domains="legal").findings.domains == ["legal"]
    with pytest.raises(UserError, match="unknown reference run"):
        seqarch.compare(runs, reference="other")


@pytest.mark.usefixtures("unpainted")
def test_each_gap_is_computed_once(runs, tmp_path, monkeypatch):
    calls = []
    draft = findings.draft_gap
    monkeypatch.setattr(findings, "draft_gap", lambda *args, **names: calls.append(args) or draft(*args, **names))
    comparison = seqarch.compare(runs[:2])
    comparison.write(tmp_path)
    assert comparison.table
    assert comparison.gaps
    assert len(calls) == 1


def test_importing_seqarch_imports_nothing_heavy(runs):
    code = (
        "import sys, seqarch; heavy = ('torch', 'lightning', 'numpy', 'matplotlib')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        f"print(len(seqarch.compare([{str(runs[0])!r}, {str(runs[1])!r}]).gaps))\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["[]", "3", "['numpy']"]


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'seqarch' has no attribute 'compair'"):
        _ = seqarch.compair  # pyright: ignore[reportAttributeAccessIssue]


def test_completion_offers_the_names_of_the_package():
    assert {*seqarch.__all__} <= {*dir(seqarch)}
