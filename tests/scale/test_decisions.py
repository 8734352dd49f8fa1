"""Decision accuracy, on public losses and on made-up ones."""

from pathlib import Path

import numpy as np
import pytest

from seqarch.scale.decisions import accuracies, ranked_pairs, rungs_of
from seqarch.scale.losses import Point, read_losses
from seqarch.scale.summary import decision_rows

PUBLIC = Path(__file__).parents[2] / "benchmarks/physicslm4_linear.csv"


def rung(name, **losses):
    return {name: {model: [loss] for model, loss in losses.items()}}


def test_public_losses_of_1_3b_order_8b_in_14_of_15_pairs():
    first, second = accuracies(rungs_of(read_losses(PUBLIC)))
    assert (first.early, first.late, first.right, first.pairs) == ("1.3B", "8B", 14, 15)
    assert first.rank_correlation == pytest.approx(0.943, abs=1e-3)
    assert (second.early, second.right) == ("3.1B", 14)
    assert (first.share_low, first.share_high) == (pytest.approx(0.7, abs=0.1), 1.0)
    assert first.chance == pytest.approx(6 / 720)  # the order itself, and five with one pair swapped
    assert first.decided_from == pytest.approx(0.00252)
    assert first.decided == 13


def test_a_perfect_order_has_no_bootstrap_interval():
    (found,) = accuracies(rung("small", a=1.0, b=2.0, c=3.0) | rung("large", a=0.1, b=0.2, c=0.3))
    assert (found.right, found.pairs, found.share_low, found.decided) == (3, 3, None, 3)
    assert found.decided_from == 0
    assert found.chance == pytest.approx(1 / 6)


def test_the_wrong_pair_with_the_widest_difference_decides_from_where_on_pairs_are_right():
    (found,) = accuracies(rung("small", a=1.0, b=1.1, c=3.0) | rung("large", a=0.2, b=0.1, c=0.3))
    assert (found.right, found.decided) == (2, 2)
    assert found.decided_from == pytest.approx(0.1)


@pytest.mark.parametrize("tied", ["small", "large"])
def test_a_pair_of_equal_losses_is_neither_right_nor_wrong(tied):
    losses = {"small": {"a": 1.0, "b": 1.2, "c": 3.0, "d": 4.0}, "large": {"a": 0.2, "b": 0.3, "c": 0.1, "d": 0.4}}
    losses[tied]["b"] = losses[tied]["a"]
    (found,) = accuracies(rung("small", **losses["small"]) | rung("large", **losses["large"]))
    assert (found.right, found.pairs, found.tied) == (3, 5, 1)  # c changed its place with a and b
    assert (found.decided_from, found.decided) == (2.0, 2)
    assert decision_rows([found])[1][2] == "3 of 5 (60%), 1 undecided"


def test_a_wide_tie_hides_no_order():
    """Two models that end with one loss say nothing of how wide a difference decides."""
    (found,) = accuracies(rung("small", a=1.0, b=2.0, c=9.0) | rung("large", a=0.1, b=0.2, c=0.2))
    assert (found.right, found.pairs, found.tied, found.share_low) == (2, 2, 1, None)
    assert (found.decided_from, found.decided) == (0, 2)


@pytest.mark.parametrize("tied", ["small", "large"])
def test_equal_losses_have_no_order(tied):
    losses = {
        name: dict.fromkeys("abc", 1.0) if name == tied else {"a": 1.0, "b": 1.1, "c": 1.2}
        for name in ("small", "large")
    }
    (found,) = accuracies(rung("small", **losses["small"]) | rung("large", **losses["large"]))
    assert (found.right, found.rank_correlation, found.rank_correlation_low, found.chance) == (0, None, None, 1.0)
    assert decision_rows([found])[1][2:7] == ["0 of 0, 3 undecided", "none is wrong", "no order", "", "1"]


def test_draws_without_an_order_are_left_out_of_the_interval_of_the_rank_correlation():
    (found,) = accuracies(rung("small", a=1.0, b=1.0, c=1.0, d=1.2) | rung("large", a=0.1, b=0.2, c=0.4, d=0.3))
    shown = [found.rank_correlation, found.rank_correlation_low, found.rank_correlation_high, found.share_low]
    assert np.isfinite(np.array(shown, float)).all()


def test_an_interval_without_width_is_none():
    """All draws of three models hold the same pairs."""
    (found,) = accuracies(rung("small", a=1.0, b=1.1, c=3.0) | rung("large", a=0.2, b=0.1, c=0.3))
    assert (found.right, found.share_low, found.share_high) == (2, None, None)
    assert decision_rows([found])[1][2:6] == ["2 of 3 (67%)", "", "0.50", ""]


def test_seeds_widen_the_interval():
    losses = {"a": 1.0, "b": 1.1, "c": 1.2, "d": 1.25}
    steady = {"small": {k: [v, v] for k, v in losses.items()}, "large": {k: [v] for k, v in losses.items()}}
    noisy = {**steady, "small": {k: [v - 0.3, v + 0.3] for k, v in losses.items()}}
    (one,), (other,) = map(accuracies, (steady, noisy))
    assert (one.rank_correlation, one.rank_correlation_low) == (pytest.approx(1.0), None)
    assert other.rank_correlation_low is not None
    assert other.rank_correlation_low < 0.5
    assert other.share_low is not None
    assert other.share_low < 1


def test_models_that_the_largest_rung_lacks_are_left_out():
    rungs = rung("small", a=1, b=2, c=3, d=0) | rung("large", a=1, b=2, c=3)
    assert accuracies(rungs)[0].models == 3
    assert accuracies(rung("small", a=1, b=2) | rung("large", a=1, b=2)) == []


def test_runs_of_one_size_have_budgets_as_rungs():
    points = [Point(model, "42M", 42e6, tokens, loss=3.0) for model in "ab" for tokens in (1e6, 2e6)]
    assert list(rungs_of(points)) == ["1M tokens", "2M tokens"]
    points.append(Point("c", "42M", 42e6, 2.0001e6, loss=4.0))  # a step of another length more
    assert rungs_of(points)["2M tokens"] == {"a": [3.0], "b": [3.0], "c": [4.0]}


def test_rungs_compare_runs_at_their_ends_in_order_of_size():
    sizes = {"large": 9, "small": 5}
    points = [Point("a", name, sizes[name], tokens, 0, tokens) for name in sizes for tokens in (2, 1)]
    assert rungs_of(points) == {"small": {"a": [2]}, "large": {"a": [2]}}


def test_pairs_come_with_the_widest_difference_first():
    first, *_ = ranked_pairs({"a": [3.0], "b": [1.0, 1.2], "c": [2.0]})
    assert (first.better, first.worse) == ("b", "a")
    assert first.difference == pytest.approx(1.9)
