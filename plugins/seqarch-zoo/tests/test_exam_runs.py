"""The recipes of the README's exam: one for each mixer of the package, with the same training for all."""

import json
import runpy
from importlib.metadata import entry_points
from pathlib import Path

import yaml

RUNS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks/exam_runs.py"))


def test_each_mixer_of_the_package_has_a_recipe_with_the_same_training(tmp_path):
    RUNS["write_recipes"](tmp_path, "small", "shards", RUNS["SETTINGS"])
    recipes = {path.parent.name: yaml.safe_load(path.read_text()) for path in tmp_path.glob("*/recipe.yaml")}
    named = {mixer["class_path"] for recipe in recipes.values() for mixer in recipe["model"]["mixers"].values()}
    mixers = entry_points(group="seqarch.mixers")
    assert named == {"Attention", *(point.name for point in mixers if point.value.startswith("seqarch_zoo."))}
    layers = {
        name.removeprefix("FlaLayer-"): recipe["model"]["mixers"]["mixer"]["init_args"]
        for name, recipe in recipes.items()
        if name.startswith("FlaLayer-")
    }
    assert layers.keys() == RUNS["FLA"].keys()
    assert layers == {
        "GatedLinearAttention": {"layer": "GatedLinearAttention"},
        "HGRN2Attention": {"layer": "HGRN2Attention"},
        "ForgettingAttention": {"layer": "ForgettingAttention", "options": {"num_heads": 8}},
        "GatedLinearAttention-short_conv": {"layer": "GatedLinearAttention", "options": {"use_short_conv": True}},
    }
    for recipe in recipes.values():
        assert recipe["trainer"]["max_steps"] == 2595
        assert recipe["branches"] == {"at": [0.25, 0.5]}
        assert recipe["model"]["learning_rate"] == 2.25e-3
        assert recipe["data"]["root"] == "shards"
        del recipe["model"]["mixers"]
        assert recipe["model"].pop("norm", "rmsnorm") == "rmsnorm"  # the default, which only one recipe names
    first, *others = recipes.values()
    assert all(other == first for other in others)


def test_each_record_is_of_a_model_that_can_be_run_again():
    records = Path(__file__).parents[1].glob("benchmarks/exam_small/*.tar.xz")
    names = {path.name.rpartition("-seed_")[0] for path in records}
    assert len(names) > 5
    assert names <= RUNS["MODELS"].keys()


def test_a_key_set_on_the_command_line_wins(tmp_path):
    RUNS["write_recipes"](tmp_path, "tiny", "embedded", RUNS["SETTINGS"] | {"trainer.max_steps": "40"})
    assert yaml.safe_load((tmp_path / "DLR/recipe.yaml").read_text())["trainer"]["max_steps"] == 40


def test_a_run_counts_the_minutes_of_all_its_processes_and_keeps_no_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "DLR").mkdir()
    run, statuses = tmp_path / "DLR/seed_0", iter(("interrupted", "finished"))

    def fit(args):
        assert f"--run_dir={run}" in args
        (run / "checkpoints").mkdir(exist_ok=True)
        (run / "run.json").write_text(json.dumps({"status": next(statuses)}))
        clock[0] += 120
        return ""

    clock = [1000.0]
    monkeypatch.setitem(RUNS["train"].__globals__, "fit", fit)
    monkeypatch.setattr(RUNS["time"], "time", lambda: clock[0])
    assert "the same command resumes it" in RUNS["train"](tmp_path, "DLR", 0)
    assert (run / "checkpoints").is_dir()
    assert RUNS["train"](tmp_path, "DLR", 0) == ""
    assert RUNS["train"](tmp_path, "DLR", 0) == "", "a finished run is not trained again"
    assert json.loads((run / "exam.json").read_text())["minutes"] == 4
    assert not (run / "checkpoints").exists()
