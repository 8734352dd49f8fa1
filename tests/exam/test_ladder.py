"""The learning-rate ladder: which rates are tried, which one is chosen, and what an exam makes of it."""

import json
import math
import shutil
from dataclasses import replace

import pytest

from seqarch.errors import DivergedError, UserError
from seqarch.exam.plan import Entrant, Exam
from seqarch.exam.pool import Pool
from seqarch.exam.train import climb, rung_of, train
from seqarch.runs.folder import has_diverged, read_config, write_note, write_record
from tests.report.runs_for_tests import write_run

RECIPE = {"model": {"learning_rate": 1e-3}, "trainer": {"max_steps": 800}, "branches": {"at": [0.5, 0.125]}}


@pytest.fixture
def bare(tmp_path):
    """An exam of two models that nobody trains."""
    models = [Entrant(name, RECIPE, 1, "code", remembered=name == "base") for name in ("base", "it")]
    return Exam(tmp_path, "small", models[0], models[1:], 2, {}, ladder=True)


def climbed(exam, loss, seen=None):
    """The exam after its ladder, where the in-domain loss at a rate is `loss(name, rate)`, or what went wrong.

    The OOD losses fall as that loss rises.
    """

    def make(runs):
        failed = {}
        for entrant, seed in runs:
            said = loss(entrant.name.partition("/")[0], entrant.rate)
            if seen is not None:
                seen.append((entrant.name, seed))
            if isinstance(said, str):
                failed[str(exam.run(entrant, seed))] = said
                exam.run(entrant, seed).mkdir(parents=True)
                write_record(exam.run(entrant, seed), {"status": "failed", "diverged": said == NAN})
                write_note(exam.run(entrant, seed), fingerprint=exam.key(entrant, seed))
            else:
                write_run(exam.run(entrant, seed), entrant.name, steps=4, every=4, noise=0.0, level=said, gap=-9 * said)
        return failed

    return climb(exam, make)


NAN = "the loss is nan at step 3"


def parabola(best):
    """The in-domain loss of a model by the logarithm of its rate."""
    return lambda name, rate: 3 + math.log(rate / best) ** 2


def test_the_best_rate_is_bracketed_and_the_neighbour_is_the_next_best(bare):
    seen = []
    exam, failed = climbed(bare, parabola(1.6e-3), seen)
    assert failed == {}
    assert [rung.factor for rung in exam.rungs["it"]] == [1.0, 1.5, 2.2]
    assert exam.reference.rate == exam.candidates[0].rate == 1.5e-3
    assert exam.neighbour is not None
    assert exam.neighbour.rate == 2.2e-3  # log(2.2 / 1.6) is less than log(1.6 / 1)
    assert exam.neighbour.name == "base-learning_rate=0.0022"
    assert exam.neighbour.recipe["trainer"]["max_steps"] == 800
    assert {seed for _, seed in seen} == {0}


@pytest.mark.parametrize(
    ("best", "factors"),
    [
        (5e-3, [1.0, 1.5, 2.2, 3.3, 3.3 * 1.5, 3.3 * 1.5**2]),
        (0.9e-3, [2 / 3, 1.0, 1.5, 2.2]),
        (0.5e-3, [2 / 3 / 1.5**2, 2 / 3 / 1.5, 2 / 3, 1.0, 1.5, 2.2]),
    ],
)
def test_the_ladder_grows_while_the_best_lies_at_an_end(bare, best, factors):
    exam, _ = climbed(bare, parabola(best))
    assert [rung.factor for rung in exam.rungs["it"]] == pytest.approx(factors)
    at = [rung.in_domain for rung in exam.rungs["it"]]
    assert min(at) not in (at[0], at[-1])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_ladder_ends_with_the_first_factor_of_thirty(bare, sign):
    exam, _ = climbed(bare, lambda name, rate: 3 - 0.1 * sign * math.log(rate))
    factors = [rung.factor for rung in exam.rungs["it"]][::sign]
    assert max(factors[-1], 1 / factors[-1]) > 30 > max(factors[-2], 1 / factors[-2])


def test_each_model_has_its_own_rate(bare):
    exam, _ = climbed(bare, lambda name, rate: parabola(1e-3 if name == "it" else 3.3e-3)(name, rate))
    assert (exam.candidates[0].rate, exam.reference.rate) == (1e-3, 3.3e-3)


def test_ood_losses_choose_nothing(bare):
    exam, _ = climbed(bare, parabola(1.5e-3))
    lowest = min(exam.rungs["it"], key=lambda rung: rung.compared)
    assert lowest.rate != exam.candidates[0].rate == 1.5e-3


def test_a_rate_at_which_training_diverges_is_not_chosen_and_no_failure(bare):
    exam, failed = climbed(bare, lambda name, rate: NAN if rate > 1.4e-3 else 3.0 + rate)
    assert failed == {}
    assert exam.candidates[0].rate < 1e-3  # the lowest rate is the best here, down to where the ladder ends
    assert [math.isinf(rung.in_domain) for rung in exam.rungs["it"]][-2:] == [True, True]


def test_a_rate_that_diverged_is_not_trained_again(bare):
    before, _ = climbed(bare, lambda name, rate: NAN if rate > 1.4e-3 else 3.0 + rate)

    def trained(exam):
        """The rates that the same command trains, or finds finished."""
        rates = []
        again, failed = climb(exam, lambda runs: rates.extend(entrant.rate for entrant, _ in runs) or {})
        assert (again.rungs, failed) == (before.rungs, {})
        return rates

    assert max(trained(bare)) == 1e-3
    assert max(trained(replace(bare, checksums={"other": "data"}))) == 2.2e-3


def test_a_rung_that_fails_otherwise_stops_its_model_only(bare):
    out = "its process was ended by SIGKILL"
    exam, failed = climbed(
        bare, lambda name, rate: out if name == "it" and rate > 2e-3 else parabola(1.5e-3)(name, rate)
    )
    (run,) = failed
    assert run.endswith("it/ladder/rate_2.20e-03/seed_0")
    assert list(exam.rungs) == ["base"]


def test_a_rung_is_the_shortest_branch_as_a_run_of_its_own():
    rung = rung_of(Entrant("it", RECIPE, 1, "code"), 1.5)
    assert rung.name == "it/ladder/rate_1.50e-03"
    assert rung.recipe["trainer"]["max_steps"] == 100
    assert rung.recipe["branches"]["at"] == []
    assert rung.recipe["model"]["learning_rate"] == 1.5e-3
    assert rung.recipe["ood_loss"]["at"] == [1.0]
    assert rung.recipe["attention_entropy"]["every_n_steps"] == 0
    assert RECIPE["trainer"]["max_steps"] == 800


SHORT = {"trainer.max_steps": "4", "branches.at": "[0.5]", "model.decay_share": "0.5", "model.warmup_steps": "0"}
SHORT |= {"model.learning_rate": "0.04"}
SHORT |= {"attention_entropy.every_n_steps": "0", "ood_loss.at": "[0.5, 1.0]", "data.eval_tokens": "96"}


@pytest.mark.commands
def test_an_exam_with_a_ladder_trains_at_the_chosen_rates_and_goes_on(exam, capsys, monkeypatch):
    """Eight runs of two to four steps: short ladders, the whole runs, the reference at the neighbouring rate."""
    monkeypatch.setattr("seqarch.exam.train.FIRST", (1.0, 1.5))
    monkeypatch.setattr("seqarch.exam.train.FACTORS", (2 / 3, 1.0, 1.5))
    folder = exam("--mixer", "Attention", "--mixer.window", "8", "--ladder", "true", **SHORT)
    verdict = json.loads((folder / "Attention-window=8/verdict.json").read_text(), parse_constant=pytest.fail)
    for name, side in (("transformer_pp", "reference"), ("Attention-window=8", "candidate")):
        rungs = verdict["rates"][side]
        chosen = min(rungs, key=lambda rung: rung["in_domain"])
        assert chosen["chosen"]
        assert read_config(folder / name / "seed_0")["model"]["learning_rate"] == chosen["rate"]
        for rung in rungs:
            run = folder / name / "ladder" / f"rate_{rung['rate']:.2e}/seed_0"
            assert read_config(run)["trainer"]["max_steps"] == 2
    best = read_config(folder / "transformer_pp/seed_0")["model"]["learning_rate"]
    assert verdict["floor"]["rate"] in {rung["rate"] for rung in verdict["rates"]["reference"]} - {best}
    said = (folder / "Attention-window=8/verdict.md").read_text()
    assert "(shared)" in said
    assert "Floor: the standardised gap of transformer_pp at " in said
    capsys.readouterr()
    exam("--mixer", "Attention", "--mixer.window", "8", "--ladder", "true", **SHORT)
    assert "finished after" not in capsys.readouterr().out


def test_a_run_at_no_rate_of_the_ladder_is_refused_before_a_trial(bare, monkeypatch):
    tried = []
    monkeypatch.setattr("seqarch.exam.train._try_out", lambda *args: tried.append(args) or 1 / 0)
    run = bare.run(bare.candidates[0], 1)

    def trained(entrant):
        write_run(run, "it", steps=4, every=4, noise=0.0)
        write_note(run, fingerprint=bare.key(entrant, 1))
        train(bare, Pool([None]))

    for rate in (1.5e-3, 0.026e-3, 37.6e-3):
        with pytest.raises(ZeroDivisionError):
            trained(bare.candidates[0].at_rate(rate))
    assert len(tried) == 3
    with pytest.raises(UserError, match="it/seed_1 is not a run of this exam"):
        trained(bare.candidates[0])  # made without a ladder, which may choose another rate
    shared = rung_of(bare.candidates[0], 1.0)
    write_run(bare.run(shared, 0), "it", steps=4, every=4, noise=0.0)
    write_note(bare.run(shared, 0), fingerprint=bare.key(shared, 0))
    with pytest.raises(ZeroDivisionError):
        trained(bare.candidates[0])
    assert len(tried) == 4
    with pytest.raises(UserError, match="it/seed_1 is not a run of this exam, it was made with another recipe"):
        trained(bare.candidates[0].at_rate(1.6e-3))
    shutil.rmtree(run)
    run = bare.run(rung_of(bare.reference, 3.3), 0)
    with pytest.raises(UserError, match=r"base/ladder/rate_3.30e-03/seed_0 is not a run of this exam"):
        trained(bare.reference)
    assert len(tried) == 4


def test_a_seed_at_another_of_the_near_rates_is_a_run_of_the_exam(bare):
    near = replace(bare.reference, near_best=(1e-3, 1.5e-3))
    exam = replace(bare, reference=near, ladder=False)  # as a larger rung of a scale, which has no ladder
    run = exam.run(near, 1)
    write_run(run, "base", steps=4, every=4, noise=0.0)
    write_note(run, fingerprint=exam.key(near.for_seed(1), 1))
    exam.check_folders()
    write_note(run, fingerprint=exam.key(near, 1))
    with pytest.raises(UserError, match="base/seed_1 is not a run of this exam"):
        exam.check_folders()


def test_a_ladder_needs_branches(exam):
    with pytest.raises(UserError, match=r"--ladder needs branches: set --branches.at"):
        exam("--mixer", "Attention", "--mixer.window", "8", "--ladder", "true", **{"branches.at": "[]"})


def test_seeds_take_the_rates_that_one_run_cannot_tell_apart_in_turn(bare):
    losses = {1e-3: 3.02, 1.5e-3: 3.0, 2.2e-3: 3.011, 0.667e-3: 4.0, 3.3e-3: 4.0}
    exam, _ = climbed(bare, lambda name, rate: losses[rate])
    it = exam.candidates[0]
    assert it.rate == 1.5e-3
    assert [it.for_seed(seed).rate for seed in range(3)] == [1.5e-3, 2.2e-3, 1.5e-3]
    exam, _ = climbed(bare, lambda name, rate: losses[rate] + 0.002 * (rate == 2.2e-3))
    assert [exam.candidates[0].for_seed(seed).rate for seed in range(2)] == [1.5e-3, 1.5e-3]


def test_a_run_that_diverged_says_so(fit, tmp_path):
    with pytest.raises(DivergedError):
        fit("far", **{"model.learning_rate": "1e30"})
    assert has_diverged(tmp_path / "far")
    assert not has_diverged(fit("near"))
