"""Gaps of exams of several lengths become one table and one figure."""

import json

import pytest

from benchmarks.lengths import HEADER, main
from seqarch.errors import UserError
from seqarch.tables import read_csv


def test_each_length_is_a_row_of_each_model(tmp_path, monkeypatch):
    for folder, gap, half in (("small", 0.1, 0.02), ("small-8192", -0.05, None), ("small-2048", 0.0, 0.01)):
        verdict = {
            "candidate": "hybrid",
            "finished": {"budgets": [{}, {"raw": {"value": gap, "half_width": half}}]},
            "final": {"candidate": {"in_domain": 3.1}, "reference": {"in_domain": 3.2}},
        }
        (tmp_path / folder / "hybrid").mkdir(parents=True)
        (tmp_path / folder / "hybrid/verdict.json").write_text(json.dumps(verdict))
    monkeypatch.setattr("sys.argv", ["lengths.py", str(tmp_path), "small", str(tmp_path / "figures")])
    main()
    found = read_csv(tmp_path / "figures/lengths.csv")
    assert tuple(found[0]) == HEADER
    assert [(int(row["length"]), float(row["gap"])) for row in found] == [(1024, 0.1), (2048, 0.0), (8192, -0.05)]
    assert "</svg>" in (tmp_path / "figures/lengths.svg").read_text()
    monkeypatch.setattr("sys.argv", ["lengths.py", str(tmp_path), "medium", str(tmp_path / "figures")])
    with pytest.raises(UserError, match="no verdict between finished models"):
        main()
