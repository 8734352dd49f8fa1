import csv

import pytest

from seqarch.errors import UserError
from seqarch.tables import listed, read_csv, write_csv


def test_no_cell_is_a_formula_for_a_spreadsheet(tmp_path):
    texts = ["=cmd|' /C calc'!A0", "+1+cmd|x", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]
    plain = ["-0.25", "+0.004", "-inf", "-", "a=b", "runs/=x", "", "'"]
    path = write_csv(tmp_path / "table.csv", ["run", "=head"], [[text, -0.5] for text in (*texts, *plain)])
    with path.open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["run", "'=head"]
    assert [row[0] for row in rows] == [f"'{text}" for text in texts] + plain
    assert {row[1] for row in rows} == {"-0.5"}


def test_a_list_is_as_wide_as_the_terminal_and_has_a_line_each_in_a_pipe(monkeypatch):
    words = {"short": "one two three four", "a_long_name": "five"}
    monkeypatch.setenv("COLUMNS", "26")
    assert listed(words) == f"short{' ' * 8}one two three\n{' ' * 13}four\na_long_name  five"
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.__stdout__", None)
    assert listed(words) == f"short{' ' * 8}one two three four\na_long_name  five"


def test_a_table_of_a_spreadsheet_is_read(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes("\ufeffmodel, loss\r\na, 3\r\n".encode())
    assert read_csv(path) == [{"model": "a", "loss": "3"}]


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("model,loss,loss\na,3,4\n")
    with pytest.raises(UserError, match=r"table.csv: 2 columns are called 'loss': leave one, or rename the others"):
        read_csv(path)
