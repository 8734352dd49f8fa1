"""The table of exams in the README says what the CSVs of `benchmarks/budget_tables.py` say."""

import runpy
from pathlib import Path

import pytest

TABLE = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/exam_table.py"))["table"]
GAPS = """run,reference,tokens,in_domain_loss,domain,weight,gap,low,high,seeds,pairs,settled,word,verdict
B,ref,170,3.2,"mean, raw",,0.1000,0.0500,0.1500,0,1,True,worse,B is worse
B,ref,340,3.1,"mean, raw",,0.1200,0.1100,0.1300,0,1,True,worse,B is worse
B,ref,340,3.1,mean,,0.1250,,,0,1,True,worse,B is worse
B,ref,340,3.1,"mean, other tokens",,0.0500,0.0300,0.0700,0,1,True,worse,B is worse
A,ref,170,3.2,"mean, raw",,-0.0300,nan,nan,0,1,False,not settled,train more
C,ref,,,,,,,,,,,,C has no finished model
"""
LOSSES = """model,rate,seed,tokens,in_domain,ood
A,1e-3,0,170,3.2000,4.2
B,1e-3,0,170,3.3000,4.3
B,1e-3,0,340,3.1000,4.1
B,1e-3,1,340,3.2000,4.2
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "gaps.csv").write_text(GAPS.replace("170,", "170000000,").replace("340,", "340000000,"))
    (tmp_path / "losses.csv").write_text(LOSSES)
    return tmp_path


def test_a_row_for_each_model_by_rising_gap(folder):
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in TABLE(folder, []))
    assert header[3:5] == ["gap at 170M", "gap at 340M"]
    assert rows == [
        ["`A`", "1", "3.200", "-0.030", "-", "-", "-", "-", "not settled"],
        ["`B`", "1", "3.100", "+0.100 ± 0.050", "+0.120 ± 0.010", "+0.125", "-", "+0.050 ± 0.020", "worse"],
        ["`C`", "0", "-", "-", "-", "-", "-", "-", "C has no finished model"],
    ]


def test_names_choose_the_rows_and_must_exist(folder):
    assert [line.split("`")[1] for line in TABLE(folder, ["B"])[2:]] == ["B"]
    with pytest.raises(SystemExit, match="no run of D in"):
        TABLE(folder, ["B", "D"])
