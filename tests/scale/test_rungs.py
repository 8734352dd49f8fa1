"""The rungs: sizes, compute, learning rates, and the whole command on models that train for a second."""

import re
from dataclasses import replace

import pytest

from seqarch import cli
from seqarch.errors import UserError
from seqarch.exam.derive import load_size, measure
from seqarch.exam.plan import Entrant, Exam
from seqarch.scale.law import Laws
from seqarch.scale.request import Request
from seqarch.scale.rungs import rung_size, train_rungs, transferred, without_embedding
from seqarch.scale.summary import train
from seqarch.tables import read_csv
from tests.conftest import flags
from tests.exam.checked import checking_once
from tests.exam.conftest import SHRUNK, InProcess, InTurn
from tests.report.runs_for_tests import write_run

CPU = {"trainer.accelerator": "cpu", "trainer.precision": "32-true", "model.compile": "false"}
OPTIONS = {
    key: value for key, value in SHRUNK.items() if key.startswith(("data.", "trainer.a", "trainer.e", "ood_loss.tasks"))
}


@pytest.mark.parametrize(("like", "wanted", "width"), [("small", 42e6, 512), ("small", 10e6, 192), ("tiny", 0.2e6, 64)])
def test_a_rung_has_the_width_that_comes_nearest_to_its_parameters(like, wanted, width):
    base = load_size(like, CPU)
    size = rung_size(base, wanted)
    assert size.model["d_model"] == width
    assert size.shape.sequence_length == base.shape.sequence_length
    assert 0.8 < measure("it", size.recipe).parameters / wanted < 1.25


def test_the_size_of_the_exam_is_a_rung():
    assert rung_size(load_size("small", CPU), 42e6).recipe == load_size("small", CPU).recipe


def test_eight_times_the_parameters_halve_the_rate():
    assert transferred(2e-3, 1e6, 8e6) == pytest.approx(1e-3)


@pytest.fixture(autouse=True, scope="module")
def models_are_checked_once():
    check_once = checking_once()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("exam.run", "scale.rungs"):
            patch.setattr(f"seqarch.{module}.measure", check_once)
        yield


@pytest.fixture
def scale(shards, tmp_path, monkeypatch):
    """A function that runs `seqarch scale` in this process."""
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("seqarch.exam.pool.Worker", InProcess)
    monkeypatch.setattr("seqarch.exam.pool.ThreadPoolExecutor", InTurn)
    monkeypatch.setattr("seqarch.report.panels.save", lambda figures, out: {})
    monkeypatch.setattr(Laws.__init__, "__defaults__", (20,))  # draws: 400 take longer than the training

    def run(*args, **options):
        cli.run(["scale", *args, "--data", str(shards), "--out", str(tmp_path / "out"), *flags(**OPTIONS, **options)])
        return tmp_path / "out"

    return run


def asked_of(shards, **options):
    return Request(["Top1Chunk"], sizes=["0.05M", "0.1M"], data=str(shards), options=OPTIONS, **options)


@pytest.mark.commands
@pytest.mark.parametrize(("more", "power"), [({}, -1 / 3), ({"model.base_width": "32"}, 0)])
def test_rungs_match_compute_and_carry_the_rates(more, power, shards, tmp_path, monkeypatch):
    plans = []

    def train(exam, *_, **__):
        """A ladder that finds twice the rate, and half of that nearly as good."""
        plans.append(exam)
        best = [replace(each.at_rate(2 * each.rate), near_best=(2 * each.rate, each.rate)) for each in exam.entrants]
        chosen = replace(exam, reference=best[0], candidates=best[1:], rungs={each.name: [] for each in best})
        return (chosen if exam.ladder else exam), {}

    monkeypatch.setattr("seqarch.scale.rungs.train", train)
    asked = asked_of(shards, tokens_per_parameter=1.0)
    list(train_rungs(replace(asked, options={**OPTIONS, **more}), tmp_path))
    small, large = plans
    assert (small.ladder, large.ladder) == (True, False)
    for exam in plans:
        facts = {each.name: measure(each.name, dict(each.recipe)) for each in exam.entrants}
        steps = {each.name: each.recipe["trainer"]["max_steps"] for each in exam.entrants}
        assert steps["transformer_pp"] == round(exam.reference.parameters / (48 * 4))
        compute = {name: steps[name] * facts[name].flops for name in facts}
        assert compute["Top1Chunk"] == pytest.approx(compute["transformer_pp"], rel=1 / steps["Top1Chunk"])
    for before, after in zip(small.entrants, large.entrants, strict=True):
        inside = [without_embedding(each.parameters, each.recipe) for each in (before, after)]
        wanted = 2 * before.rate * (inside[1] / inside[0]) ** power
        assert after.for_seed(0).rate == pytest.approx(wanted, rel=0.01)
        assert after.for_seed(1).rate == pytest.approx(wanted / 2, rel=0.01)


def test_the_same_tokens_on_demand(shards, tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr("seqarch.scale.rungs.train", lambda exam, *_, **__: plans.append(exam) or (exam, {}))
    list(train_rungs(asked_of(shards, match="tokens", ladder=False), tmp_path))
    assert [len({each.recipe["trainer"]["max_steps"] for each in exam.entrants}) for exam in plans] == [1, 1]


@pytest.mark.commands
def test_a_scale_trains_registers_and_is_read_again(scale, capsys):
    sizes = ("--sizes", "0.05M", "0.1M", "--tokens_per_parameter", "0.05", "--ladder", "false")
    out = scale("--mixer", "Top1Chunk", *sizes)
    said = capsys.readouterr().out
    small = min({row["rung"] for row in read_csv(out / "losses.csv")}, key=lambda rung: float(rung[:-1]))
    assert [row["rung"] for row in read_csv(out / "predictions.csv")] == [small]
    assert re.search("[01] of 1 hold", said)
    cli.run(["scale", "--losses", str(out / "losses.csv")])
    assert f"| model          | {small} " in (read := capsys.readouterr().out)
    cli.run(["scale", *map(str, sorted(out.glob("*/*/seed_0"), reverse=True)), "--reference", "transformer_pp"])
    assert set(read.splitlines()[2:6]) <= set(capsys.readouterr().out.splitlines())
    scale("--mixer", "Top1Chunk", *sizes, "--loss", "ood")
    assert [row["loss"] for row in read_csv(out / "predictions.csv")] == ["in_domain"], "all runs were there before"


def finish(plan, name, parameters):
    """Write a finished run of a plan."""
    run = write_run(plan.folder / f"{name}/seed_0", name, facts={"parameters": parameters})
    width = f"d_model: {int(parameters**0.5)}\n  learning_rate: 0.001"
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("d_model: 128", width))


def test_only_runs_that_are_not_finished_are_predicted(shards, tmp_path, monkeypatch):
    sizes = {"1M": 1_000_000, "4M": 4_000_000, "16M": 16_000_000, "64M": 64_000_000}
    models = Entrant("transformer_pp", {}, 1, ""), [Entrant("Top1Chunk", {}, 1, "")]
    plans = {size: Exam(tmp_path / "out" / size, size, *models, 1, {}) for size in sizes}

    def predicted(*names):
        """The rungs that have predictions after these were trained."""

        def rungs(*_):
            for name, following in zip(names, [*(plans[name] for name in names[1:]), None], strict=True):
                for entrant in plans[name].entrants:
                    if not plans[name].finished(entrant):
                        finish(plans[name], entrant.name, sizes[name])
                yield plans[name], {}, following

        monkeypatch.setattr("seqarch.scale.rungs.train_rungs", rungs)
        train(asked_of(shards, out=str(tmp_path / "out")), None)
        return [row["rung"] for row in read_csv(tmp_path / "out/predictions.csv")]

    monkeypatch.setattr("seqarch.report.panels.save", lambda figures, out: {})
    assert predicted("1M", "16M") == ["1M"]
    assert predicted("1M", "4M") == ["1M"]
    assert predicted("1M", "4M", "16M") == ["1M"]
    assert predicted("4M", "16M", "64M") == ["1M", "16M"]


@pytest.mark.parametrize("finished", [(), ("transformer_pp",), ("Top1Chunk",)])
@pytest.mark.parametrize("loss", ["in_domain", "gap"])
def test_what_went_wrong_is_said_if_nothing_can_be_compared(finished, loss, shards, tmp_path, monkeypatch):
    plan = Exam(
        tmp_path / "out/1M", "1M", Entrant("transformer_pp", {}, 1, ""), [Entrant("Top1Chunk", {}, 1, "")], 1, {}
    )
    for name in finished:
        finish(plan, name, 1_000_000)
    monkeypatch.setattr("seqarch.scale.rungs.train_rungs", lambda *_: [(plan, {"a/seed_0": "no memory"}, None)])
    with pytest.raises(UserError, match=r"a/seed_0 not finished \(no memory\)"):
        train(asked_of(shards, match="tokens", out=str(tmp_path / "out")), loss)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--mixer", "Top1Chunk", "--sizes", "1M"], "--sizes names one size"),
        (["--mixer", "Top1Chunk", "--sizes", "1M", "big"], "--sizes big: give parameters between 1k and 100B"),
        (["--mixer", "Top1Chunk", "--sizes", "0.05M", "0.051M"], "two of the --sizes lead to the same width"),
        (["--mixer", "Top1Chunk", "--like", "huge"], "like is huge: expected tiny or small"),
        (["--mixer", "Top1Chunk", "--match", "time"], "match is time: expected flops or tokens"),
        (["--mixer", "Top1Chunk", "--loss", "gap"], "--loss gap compares models with the same tokens"),
        (["--mixer", "Top1Chunk", "--loss", "clod"], "unknown loss 'clod': did you mean cloud?"),
        (
            ["--mixer", "Top1Chunk", "--tokens_per_parameter", "0"],
            "--tokens_per_parameter must lie in 0..1000000, 0 excluded",
        ),
        (["--mixer", "Top1Chunk", "--trainer.max_steps", "3"], "--trainer.max_steps: each rung sets this"),
        (["--mixer", "Top1Chunk", "--reference", "a"], "--reference has no effect with --mixer: leave it out"),
        (["--mixer", "TransformerPlusPlus"], "are one model"),
        (["--losses", "none.csv"], "there is no file 'none.csv'"),
        (["runs/a", "--data.eval_tokens", "3"], "--data.eval_tokens is for training"),
        ([], "name either --mixer M... to train, or run folders, or --losses"),
    ],
)
def test_nonsense_is_refused_before_anything_is_trained(args, said):
    with pytest.raises(UserError, match=said.replace("...", r"\.\.\.")):
        cli.run(["scale", *args])
