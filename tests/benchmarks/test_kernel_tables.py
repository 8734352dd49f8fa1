"""The page of kernel speed has the tables of its rows."""

from pathlib import Path

import pytest

from benchmarks.kernel_tables import Rows, digits, markdown, tables
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
ROWS = read_csv(ROOT / "benchmarks/kernels_h200.csv")


@pytest.mark.parametrize("table", tables(ROWS), ids=lambda table: table[0][0] or "loss")
def test_the_page_has_the_table(table):
    assert f"\n\n{markdown(table)}\n\n" in PAGE


def test_every_table_of_the_page_is_made_from_rows():
    made = {markdown(table).splitlines()[0] for table in tables(ROWS)}
    blocks = [block for block in PAGE.split("\n\n") if block.startswith("|")]
    assert [block.splitlines()[0] for block in blocks if block.splitlines()[0] not in made] == [
        "| tokens | d | forward | backward |"  # floors, which are computed
    ]


def row(name: str, p50: str, step: str = "time") -> dict[str, str]:
    return {"step": step, "name": name, "B": "1", "T": "8", "H": "2", "D": "4", "p50": p50}


def test_a_row_that_is_missing_or_ambiguous_is_an_error():
    rows = Rows([row("a", "1.5"), row("b", "1"), row("b", "2"), row("a", "9", "skew")], "time")
    assert rows.of("a", ("8", "2", "4")) == rows.of("a", ("1", "8", "2", "4")) == 1.5
    for name, shape in (("b", ("8", "2", "4")), ("c", ("8", "2", "4")), ("a", ("8", "2", "5"))):
        with pytest.raises(ValueError, match=f"{name!r}"):
            rows.of(name, shape)


def test_three_digits():
    assert [digits(each) for each in (0.01499, 0.47, 11, 129.811, 1249.4)] == [
        "0.0150",
        "0.470",
        "11.0",
        "130",
        "1,249",
    ]
