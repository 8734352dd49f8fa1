"""The kernel log says of the tests on a GPU what their row says."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_tests
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="4" time="12.75">
  <testcase name="a" time="1"/>
  <testcase name="b" time="1"><skipped message="no package"/></testcase>
  <testcase name="c" time="1"><system-out>text</system-out></testcase>{more}
</testsuite></testsuites>
"""


def test_the_kernel_log_has_the_sentence_of_its_row():
    said = " ".join((ROOT / "docs/kernels_log.md").read_text(encoding="utf-8").split())
    assert gpu_tests.sentence() in said


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command on a machine with one GPU."""

    def run(more="", commit="0123456789abcdef", files=1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
        (tmp_path / "tests.xml").write_text(JUNIT.format(more=more))
        given = [str(tmp_path / "tests.xml")] * files
        monkeypatch.setattr(sys, "argv", ["gpu_tests", *given, "--csv", str(tmp_path / "rows.csv"), "--commit", commit])
        gpu_tests.main()

    return run


def test_a_row_of_a_run_in_which_all_passed(run, tmp_path, capsys):
    run()
    (row,) = read_csv(tmp_path / "rows.csv")
    assert list(row) == list(read_csv(ROOT / "benchmarks/gpu_tests.csv")[0])
    assert [row[name] for name in ("passed", "skipped", "failed", "seconds")] == ["2", "1", "0", "12.75"]
    said = capsys.readouterr().out
    assert "at commit 0123456: 2 passed and 1 were skipped, in 13 s. The machine had one H100 (torch " in said


def test_two_commands_make_one_row(run, tmp_path):
    run(files=2)
    (row,) = read_csv(tmp_path / "rows.csv")
    assert [row[name] for name in ("passed", "skipped", "failed", "seconds")] == ["4", "2", "0", "25.5"]


def test_a_run_with_a_failure_has_a_row_and_no_sentence(run, tmp_path):
    with pytest.raises(ValueError, match="2 tests failed"):
        run('<testcase name="d"><failure/></testcase><testcase name="e"><skipped/><error/></testcase>')
    (row,) = read_csv(tmp_path / "rows.csv")
    assert [row[name] for name in ("passed", "skipped", "failed")] == ["2", "1", "2"]


@pytest.mark.parametrize("commit", ["", "0123456-dirty"])
def test_code_that_no_commit_holds_has_no_sentence(run, commit):
    with pytest.raises(ValueError, match="no commit"):
        run(commit=commit)
