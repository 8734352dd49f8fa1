"""The rungs: sizes, compute, learning rates, and the whole command on models that train for a second."""

import pytest
import yaml

from seqarch import cli
from seqarch.errors import UserError
from seqarch.exam.plan import check, load_size
from seqarch.scale.rungs import rung_size, transferred, without_embedding
from seqarch.tables import read_csv
from tests.conftest import flags
from tests.exam.conftest import SHRUNK, InProcess, InTurn

CPU = {"trainer.accelerator": "cpu", "trainer.precision": "32-true", "model.compile": "false"}
OPTIONS = {key: value for key, value in SHRUNK.items() if key.startswith(("data.", "trainer.a", "trainer.e"))}


@pytest.mark.parametrize(("like", "wanted", "width"), [("small", 42e6, 512), ("small", 10e6, 192), ("tiny", 0.2e6, 64)])
def test_a_rung_has_the_width_that_comes_nearest_to_its_parameters(like, wanted, width):
    base = load_size(like, CPU)
    size = rung_size(base, wanted)
    assert size.model["d_model"] == width
    assert size.shape.sequence_length == base.shape.sequence_length
    assert 0.8 < check("it", size.recipe).parameters / wanted < 1.25


def test_the_size_of_the_exam_is_a_rung():
    assert rung_size(load_size("small", CPU), 42e6).recipe == load_size("small", CPU).recipe


def test_eight_times_the_parameters_halve_the_rate():
    assert transferred(2e-3, 1e6, 8e6) == pytest.approx(1e-3)


@pytest.fixture
def scale(shards, tmp_path, monkeypatch):
    """A function that runs `seqarch scale` in this process."""
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("seqarch.exam.pool.Worker", InProcess)
    monkeypatch.setattr("seqarch.exam.pool.ThreadPoolExecutor", InTurn)
    monkeypatch.setattr("seqarch.report.panels.save", lambda figures, out: {})

    def run(*args, **options):
        cli.run(["scale", *args, "--data", str(shards), "--out", str(tmp_path / "out"), *flags(**OPTIONS, **options)])
        return tmp_path / "out"

    return run


def recipes(folder):
    """The recipe of each model by rung and name."""
    return {path.parts[-3:-1]: yaml.safe_load(path.read_text()) for path in folder.glob("*/*/recipe.yaml")}


def test_rungs_match_compute_and_carry_the_rates(scale, capsys):
    out = scale("--mixer", "Top1Chunk", "--sizes", "0.05M", "0.1M", "--tokens_per_parameter", "0.1")
    made = recipes(out)
    small, large = sorted({rung for rung, _ in made}, key=lambda rung: float(rung[:-1]))
    for rung in (small, large):
        facts = {name: check(name, made[rung, name]) for name in ("transformer_pp", "Top1Chunk")}
        steps = {name: made[rung, name]["trainer"]["max_steps"] for name in facts}
        compute = {name: steps[name] * facts[name].flops for name in facts}
        assert compute["Top1Chunk"] == pytest.approx(compute["transformer_pp"], rel=1.5 / min(steps.values()))
        assert steps["transformer_pp"] == round(0.1 * facts["transformer_pp"].parameters / (48 * 4))
    assert any((out / small / "transformer_pp/ladder").iterdir())
    assert not (out / large / "transformer_pp/ladder").exists()
    for name in ("transformer_pp", "Top1Chunk"):
        low, high = (made[rung, name] for rung in (small, large))
        inside = [without_embedding(check(name, recipe).parameters, recipe) for recipe in (low, high)]
        rate = low["model"]["learning_rate"] * (inside[1] / inside[0]) ** (-1 / 3)
        assert high["model"]["learning_rate"] == pytest.approx(rate, rel=0.01)
    predictions = read_csv(out / "predictions.csv")
    assert [row["rung"] for row in predictions] == [small, large]
    assert "1 of 1 hold" in (said := capsys.readouterr().out) or "0 of 1 hold" in said
    assert {row["model"] for row in read_csv(out / "losses.csv")} == {"transformer_pp", "Top1Chunk"}
    # the same again from the files, without training
    cli.run(["scale", "--losses", str(out / "losses.csv")])
    assert f"| model          | {small} " in capsys.readouterr().out
    cli.run(["scale", *map(str, sorted(out.glob("*/*/seed_0")))])
    assert "Top1Chunk" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--mixer", "Top1Chunk", "--sizes", "1M"], "--sizes names one size"),
        (["--mixer", "Top1Chunk", "--sizes", "1M", "big"], "--sizes big: give parameters between 1k and 100B"),
        (["--mixer", "Top1Chunk", "--sizes", "0.05M", "0.051M"], "two of the --sizes lead to the same width"),
        (["--mixer", "Top1Chunk", "--like", "huge"], "--like huge: choose one of tiny, small"),
        (["--mixer", "Top1Chunk", "--match", "time"], "--match time: choose flops or tokens"),
        (["--mixer", "Top1Chunk", "--loss", "gap"], "--loss gap compares models with the same tokens"),
        (["--mixer", "Top1Chunk", "--tokens_per_parameter", "0"], "--tokens_per_parameter 0: give a number above zero"),
        (["--mixer", "Top1Chunk", "--trainer.max_steps", "3"], "--trainer.max_steps: each rung sets this"),
        (["--mixer", "Top1Chunk", "--reference", "a"], "to train, set --against"),
        (["--mixer", "TransformerPlusPlus"], "a model is named twice"),
        (["--losses", "none.csv"], "there is no file none.csv"),
        (["runs/a", "--data.eval_tokens", "3"], "--data.eval_tokens is for training"),
        ([], "name either --mixer M... to train, or run folders, or --losses"),
    ],
)
def test_nonsense_is_refused_before_anything_is_trained(args, said):
    with pytest.raises(UserError, match=said.replace("...", r"\.\.\.")):
        cli.run(["scale", *args])
