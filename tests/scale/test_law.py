"""The laws: simulated losses with known laws give back what a mixer saves, within its interval."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from seqarch.errors import UserError
from seqarch.scale.law import Laws, Saving
from seqarch.scale.losses import Point
from seqarch.scale.summary import Summary, _interval
from seqarch.tables import read_csv

SIZES, SHARES, FLOOR = (10e6, 20e6, 42e6, 110e6), (0.25, 0.5, 1.0), 1.7
TRUE = {"reference": (400.0, 0.34, 1200.0, 0.37), "mixer": (380.0, 0.335, 1000.0, 0.372)}


def simulated(random, *, seeds=1, between=0.0, within=0.0):
    """The finished models of two mixers; relative noise is common to a run (`between`) or its own (`within`)."""
    points = []
    for model, (a, alpha, b, beta) in TRUE.items():
        for size in SIZES:
            for seed in range(seeds):
                shared = between * random.normal()
                for tokens in (20 * size * share for share in SHARES):
                    loss = FLOOR + a * size**-alpha + b * tokens**-beta
                    loss *= 1 + shared + within * random.normal()
                    points.append(Point(model, f"{size:g}", size, tokens, seed, loss))
    return points


def true_ratio():
    """Tokens with which the mixer has the reference's loss at the largest rung, over the reference's."""
    size, tokens = SIZES[-1], 20 * SIZES[-1]
    a, alpha, b, beta = TRUE["reference"]
    excess = a * size**-alpha + b * tokens**-beta
    a, alpha, b, beta = TRUE["mixer"]
    return ((excess - a * size**-alpha) / b) ** (-1 / beta) / tokens


def saved(points, draws):
    end = max((point for point in points if point.model == "reference"), key=lambda point: point.tokens)
    return Laws(points, draws).saving("mixer", end, end.parameters)


def test_exact_losses_give_the_true_saving():
    found = saved(simulated(np.random.default_rng(0)), 10)
    assert found.ratio == pytest.approx(true_ratio(), rel=0.01)


def test_a_mixer_at_a_quarter_of_the_speed_takes_four_times_the_time_for_a_token():
    speeds = {"reference": 400.0, "mixer": 100.0}
    points = [replace(each, tokens_per_second=speeds[each.model]) for each in simulated(np.random.default_rng(0))]
    summary = Summary(points, "loss", "reference")
    summary.laws = Laws(points, draws=10)
    ((model, tokens, time),) = summary.savings
    assert model == "mixer"
    assert tokens.ratio == pytest.approx(true_ratio(), rel=0.01)
    for end in ("ratio", "low", "high"):
        assert getattr(time, end) == pytest.approx(4 * getattr(tokens, end))


def test_a_model_has_the_median_speed_of_its_seeds_at_the_largest_rung_in_any_order():
    speeds = {"mixer": (100.0, 500.0, 2000.0), "reference": (500.0,) * 3}
    points = [
        replace(each, tokens_per_second=speeds[each.model][each.seed] if each.parameters == SIZES[-1] else 7.0)
        for each in simulated(np.random.default_rng(0), seeds=3)
    ]
    for ordered in (points, points[::-1]):
        summary = Summary(ordered, "loss", "reference")
        summary.laws = Laws(points, draws=2)
        ((_, tokens, time),) = summary.savings
        assert time is not None
        assert time.ratio == pytest.approx(tokens.ratio)


def test_a_saving_is_written_with_the_rung_of_the_reference_that_it_is_for(tmp_path, monkeypatch):
    points = [each for each in simulated(np.random.default_rng(0)) if each.parameters < SIZES[-1]]
    points += [replace(each, model="larger") for each in simulated(np.random.default_rng(0))]
    monkeypatch.setattr(Laws.__init__, "__defaults__", (2,))  # draws
    monkeypatch.setattr("seqarch.report.panels.save", lambda figures, out: {})
    Summary(points, "loss", "reference").write(tmp_path)
    assert [(row["model"], row["rung"]) for row in read_csv(tmp_path / "savings.csv")] == [("mixer", f"{SIZES[-2]:g}")]


@pytest.mark.parametrize("unit", [1000.0, 1e-4])
def test_the_unit_of_the_losses_changes_no_saving(unit):
    points = simulated(np.random.default_rng(0))
    scaled = [replace(point, loss=unit * point.loss) for point in points]
    assert saved(scaled, 10).ratio == pytest.approx(true_ratio(), rel=0.01)
    assert Laws(scaled).floor == pytest.approx(unit * FLOOR, rel=0.01)
    end = points[-1]
    assert Laws(scaled).loss("mixer", end.parameters, end.tokens) == pytest.approx(unit * end.loss, rel=1e-3)


def test_intervals_hold_the_true_saving():
    random = np.random.default_rng(1)
    found = [saved(simulated(random, seeds=2, between=0.001, within=0.001), 40) for _ in range(20)]
    held = sum(each.low <= true_ratio() <= each.high for each in found)
    assert held >= 17  # at 95 %, fewer come in 0.3 % of the tests
    assert np.median([each.high - each.low for each in found]) < 0.2


def test_intervals_are_as_wide_as_student_t_where_few_points_are_to_spare():
    """With 3 degrees of freedom the fits of the bootstrap have the tails of Student's t, not of a normal distribution.

    Each point is a run of its own, so that all shares of the noise give one variance. The noise is small, so that the
    parameters are linear in it.
    """
    points = simulated(np.random.default_rng(0), within=1e-5)
    chosen = [each for each in points if each.rung != "2e+07" and each.tokens != 10 * each.parameters]
    laws = Laws([replace(each, seed=seed) for seed, each in enumerate(chosen)], 1000)
    assert len(chosen) - len(laws.fit) == 3
    low, first, third, high = np.quantile(laws.refits, (0.025, 0.25, 0.75, 0.975), axis=0)
    wide, narrow = stats.t.ppf((0.975, 0.75), 3)
    assert (high - low) / (third - first) == pytest.approx(np.full(len(laws.fit), wide / narrow), rel=0.15)


def test_noise_is_split_between_runs_and_within():
    between, within = Laws(simulated(np.random.default_rng(2), seeds=8, between=0.004, within=0.001), 1).noise
    assert 0.0025 < between < 0.0055
    assert 0.0007 < within < 0.0014


def test_a_mixer_that_never_comes_to_the_loss_needs_endless_tokens():
    points = simulated(np.random.default_rng(0))
    worse = [point if point.model == "reference" else replace(point, loss=point.loss + 2.0) for point in points]
    assert math.isinf(saved(worse, 5).ratio)


def test_noise_that_the_law_does_not_explain_gives_a_wide_interval():
    random = np.random.default_rng(3)
    points = [replace(point, loss=3.0 * 2.0 ** random.normal()) for point in simulated(random)]
    found = saved(points, 50)
    assert found.high > 3 * found.low


def test_losses_that_are_not_above_zero_have_no_law():
    points = simulated(np.random.default_rng(0))
    with pytest.raises(UserError, match="they need losses above zero"):
        Laws([replace(points[0], loss=0.0), *points[1:]])
    with pytest.raises(UserError, match="no laws: they need losses above zero and below 30 times the lowest one"):
        Laws([replace(points[0], loss=1e300), *points[1:]])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [12.0, 50.0])
def test_a_run_that_diverged_leaves_nothing_certain(loss):
    points = simulated(np.random.default_rng(0))
    found = saved([*points[:-2], replace(points[-2], loss=loss), points[-1]], 40)
    assert found.low < 0.1
    assert found.high == math.inf


def test_too_few_finished_models_have_no_law():
    points = simulated(np.random.default_rng(0))
    with pytest.raises(UserError, match="no law for mixer: it has finished models at one size only"):
        Laws([point for point in points if point.model == "reference" or point.rung == "1e+07"])
    with pytest.raises(UserError, match="finished models, not 8"):
        Laws([point for point in points if point.rung in ("1e+07", "2e+07") and point.seed == 0][::3] * 2)


def test_a_large_ratio_is_not_never():
    assert _interval(Saving(40.0, 20.0, 175.0)) == "40.00 (20.00 to >100)"
    assert _interval(Saving(math.inf, 200.0, math.inf)) == "never (>100 to never)"
