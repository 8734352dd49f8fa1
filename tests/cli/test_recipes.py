"""Every recipe goes through the real command line, at its own size (built without memory) and at a small one (run)."""

from pathlib import Path

import pytest
import torch
import yaml

from seqarch import cli
from seqarch.cli.recipes import expand_recipes, given_recipes
from seqarch.cli.training import TrainingCLI
from seqarch.report.runs import load_run
from tests.conftest import TINY, flags

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("**/*.yaml") if path.parent.name != "base")

MILLIONS = {
    "exam/tiny": (0.2, 0.3),
    "exam/small": (40, 44),
    "exam/medium": (105, 116),
    "constant_": (105, 140),
    "rwkv5_110m": (116, 118),
    "rwkv6_110m": (120, 122),
    "gated_delta_net": (118, 125),
    "based_110m": (120, 122),
    "_110m": (105, 116),
    "_1b": (1270, 1350),
    "_100k": (130, 140),
    "ablations/": (105, 116),
    "study/": (40, 44),
}
"""Parameters of the published models (arXiv 2505.18522, table of configurations); trainable constants, one vector a
position, come on top."""


def test_there_are_recipes():
    assert {"quickstart.yaml", "top1_chunk_1b.yaml", "transformer_pp_110m.yaml"} <= set(NAMES)
    assert any(name.startswith("ablations/") for name in NAMES)


@pytest.mark.no_cover
@pytest.mark.parametrize("name", NAMES)
def test_full_size_model_has_the_published_number_of_parameters(name):
    cli = TrainingCLI(["--config", str(RECIPES / name)], run=False)
    with torch.device("meta"):
        parameters = cli.model.build().n_parameters()
    low, high = next((size for part, size in MILLIONS.items() if part in name), (0.5, 1.5))
    assert low * 1e6 <= parameters <= high * 1e6, f"{parameters:,}"


@pytest.mark.no_cover
@pytest.mark.parametrize("name", NAMES)
def test_recipe_runs_one_step_at_a_small_size(name, shards, tmp_path, monkeypatch):
    monkeypatch.setattr("seqarch.cli.training.outcome", str)  # figures of one step take longer than the step
    recipe = merged(RECIPES / name)
    n_heads = max(mixer["init_args"].get("n_heads", 4) for mixer in recipe["model"]["mixers"].values())
    small = {
        **TINY,
        "data.root": shards,
        "model.d_model": 8 * n_heads,
        "model.n_layers": len(recipe["model"].get("pattern") or [0, 1]),
        "trainer.max_steps": 1,
        "attention_entropy.probe_sequences": 1,
        "run_dir": tmp_path / "run",
    }
    cli.run(["fit", "--config", str(RECIPES / name), *flags(**small)])
    run = load_run(tmp_path / "run")
    assert run.facts["status"] == "finished"
    assert {"loss/in_domain/docs", "loss/ood/code"} <= run.curves.keys()
    assert any(name.endswith("entropy/layer_00") for name in run.curves)


def merged(path):
    """The recipe over what it extends, as plain YAML merges it key by key, mixers as a whole."""
    model: dict = {}
    for each in given_recipes(expand_recipes(["--config", str(path)])):
        model.update(yaml.safe_load(each.read_text()).get("model", {}))
    return {"model": model}


@pytest.mark.parametrize("name", NAMES)
def test_recipes_write_to_folders_of_their_own(name):
    content = yaml.safe_load((RECIPES / name).read_text())
    stem = name.removesuffix(".yaml")
    if not stem.startswith("quickstart"):
        assert content["run_dir"] == f"runs/{stem}"


def test_later_files_win(tmp_path, capsys):
    (tmp_path / "base.yaml").write_text("model: {d_model: 32, n_layers: 2}\nrun_dir: base\n")
    (tmp_path / "middle.yaml").write_text("extends: base.yaml\nmodel: {d_model: 64, vocab_size: 257}\n")
    mixers = "{a: {class_path: Attention, init_args: {n_heads: 4}}}"
    (tmp_path / "top.yaml").write_text(f"extends: middle.yaml\nmodel: {{mixers: {mixers}, feed_forward: GeGLU}}\n")
    with pytest.raises(SystemExit):
        cli.run(["fit", f"--config={tmp_path / 'top.yaml'}", "--model.n_layers=3", "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["d_model"] == 64
    assert config["model"]["n_layers"] == 3
    assert config["model"]["vocab_size"] == 257
    assert config["run_dir"] == "base"
    assert "extends" not in config
