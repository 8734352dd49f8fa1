"""Predictions on models of 102,400 tokens are scored from a report."""

from pathlib import Path

import pytest

from benchmarks.tables import long
from seqarch.tables import write_csv


def test_each_kind_of_prediction_is_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long, "RESULTS", tmp_path)
    monkeypatch.setattr(long, "WRITTEN", tmp_path / "written.csv")
    rows = [("in_domain", "a", "", 4, 5), ("in_domain", "b", "a", -0.3, 0), ("gap", "b", "", 0, 0.1)]
    rows += [("passkey_8192/contains", name, "", 0, 0.1) for name in ("a", "c")]
    write_csv(tmp_path / "written.csv", ("quantity", "model", "minus", "low", "high"), rows)
    (tmp_path / "long").mkdir()
    losses = [("a", 4.5), ("b", 4.0)]
    write_csv(tmp_path / "long/models.csv", ("run", "in_domain_loss"), losses)
    gaps = [("b", 10, "mean, raw", 0.5), ("b", 20, "mean, raw", 0.05), ("b", 20, "mean", 0.7)]
    write_csv(tmp_path / "long/finished.csv", ("run", "tokens", "domain", "gap"), gaps)
    write_csv(tmp_path / "long/capabilities.csv", ("metric", "run", "value"), [("passkey_8192/contains", "a", 0.25)])
    assert [row[3:] for row in long.long_predictions()[1:]] == [
        ["+4.500", "yes"],
        ["-0.500", "no"],
        ["+0.050", "yes"],
        ["+0.250", "no"],
        ["not run", "-"],
    ]
