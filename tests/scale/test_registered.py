"""Predictions are written once and scored when a larger rung has both models."""

import pytest

from seqarch.errors import UserError
from seqarch.scale.decisions import register, scored

SMALL = {"1M": {"a": [1.0], "b": [2.0], "c": [3.0]}}
MIDDLE = SMALL | {"2M": {"a": [1.0], "b": [1.9], "c": [1.5]}}
LARGE = MIDDLE | {"4M": {"a": [0.5], "b": [0.7], "c": [0.8]}}


def test_a_prediction_is_scored_at_the_next_rung(tmp_path):
    path = tmp_path / "predictions.csv"
    register(path, "in_domain", SMALL)
    assert [one.later for one in scored(path, "in_domain", SMALL)] == ["", "", ""]
    found = {(one.better, one.worse): one for one in scored(path, "in_domain", LARGE)}
    assert {one.later for one in found.values()} == {"2M"}
    assert {pair: one.holds for pair, one in found.items()} == {("a", "b"): True, ("a", "c"): True, ("b", "c"): False}
    assert found["b", "c"].measured == pytest.approx(-0.4)
    assert found["b", "c"].decided == ""


def test_pairs_above_the_widest_wrong_difference_are_decided(tmp_path):
    path = tmp_path / "predictions.csv"
    register(path, "in_domain", MIDDLE)  # b and c were 1.0 apart and changed places; all are closer now
    assert {one.decided for one in scored(path, "in_domain", MIDDLE)} == {"no"}


def test_what_was_written_stays(tmp_path):
    path = tmp_path / "predictions.csv"
    register(path, "in_domain", SMALL)
    before = path.read_text()
    register(path, "in_domain", {"1M": {"a": [9.0], "b": [2.0], "c": [3.0]}})
    assert path.read_text() == before
    register(path, "in_domain", {"1M": {**SMALL["1M"], "d": [4.0]}})
    assert path.read_text().startswith(before)
    assert len(scored(path, "in_domain", SMALL)) == 6
    assert scored(path, "ood", SMALL) == []


def test_another_file_is_refused(tmp_path):
    (tmp_path / "predictions.csv").write_text("model,seed\na,1\n")
    with pytest.raises(UserError, match="holds no predictions: its columns must be written, loss, rung"):
        scored(tmp_path / "predictions.csv", "in_domain", SMALL)
