"""The pages on speed have the tables of their rows, and no others."""

from pathlib import Path

import pytest

from benchmarks import kernel_tables, performance_tables
from benchmarks.page_tables import digits, markdown, table
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
MADE = {
    "kernels.md": list(
        kernel_tables.tables(*(read_csv(ROOT / f"benchmarks/kernels_{card}.csv") for card in ("h200", "h100")))
    ),
    "performance.md": list(performance_tables.tables()),
}
COMPUTED = {
    "| tokens | d | forward | backward |",  # floors
    "| `transformer_pp_1b` | `mamba2_1b` | `mamba1_1b` |",  # shares of weights, see tests/training/test_float8.py
}


@pytest.mark.parametrize("page", MADE)
def test_the_page_has_the_tables_of_its_rows_in_their_order(page):
    blocks = (ROOT / "docs" / page).read_text(encoding="utf-8").split("\n\n")
    shown = [block.strip() for block in blocks if block.startswith("|") and not block.startswith(tuple(COMPUTED))]
    assert len(shown) == len(MADE[page])
    for block, made in zip(shown, MADE[page], strict=True):
        assert block == markdown(made)


def test_a_table_has_a_line_for_each_row_and_a_cell_for_each_column():
    made = table({"a": lambda row: row["x"], "b": lambda row: row["x"] * 2}, [{"x": "1"}, {"x": ""}])
    assert markdown(made) == "| a | b |\n| --- | --- |\n| 1 | 11 |\n| | |"


def test_three_digits():
    assert [digits(each) for each in (0.01499, 0.47, 11, 129.811, 1249.4)] == [
        "0.0150",
        "0.470",
        "11.0",
        "130",
        "1,249",
    ]
