"""Predictions are written once and scored when a larger rung has both models."""

import pytest

from seqarch.errors import UserError
from seqarch.scale.decisions import register, scored
from seqarch.scale.losses import Point
from seqarch.scale.summary import Summary

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


def test_equal_losses_predict_nothing_and_refute_nothing(tmp_path):
    path = tmp_path / "predictions.csv"
    tied = {"1M": {"a": [1.0], "b": [1.0], "c": [3.0]}}
    register(path, "in_domain", tied)
    found = {(one.better, one.worse): one for one in scored(path, "in_domain", tied | {"2M": {**tied["1M"], "a": [3]}})}
    assert found.keys() == {("a", "c"), ("b", "c")}
    assert {pair: (one.is_tied, one.holds) for pair, one in found.items()} == {
        ("a", "c"): (True, False),
        ("b", "c"): (False, True),
    }


def test_the_summary_counts_no_prediction_that_ended_in_equal_losses(tmp_path):
    path = tmp_path / "predictions.csv"
    register(path, "loss", {"1M": {"a": [1.0], "b": [2.0], "c": [3.0]}})
    at_end = {"a": 1.0, "b": 0.5, "c": 1.0}
    points = [Point(model, "1M", 1e6, 1e6, loss=loss) for model, loss in zip("abc", (1.0, 2.0, 3.0), strict=True)]
    points += [Point(model, "2M", 2e6, 1e6, loss=loss) for model, loss in at_end.items()]
    text = Summary(points, "loss", register=path).text
    assert text.endswith("1 of 2 hold. Equal losses count neither way.")
    assert text.count("| equal |") == 1
    assert "A pair is undecided if its losses are equal at one of the rungs." in text


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
