"""Recipes that are wrong: one line names the file, the line and what would be right."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from seqarch import cli

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.yaml"


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe that changes the quickstart."""

    def write(name="r.yaml", **content):
        (tmp_path / name).write_text(yaml.safe_dump({"extends": str(QUICKSTART), **content}))
        return name

    return write


def mixer(class_path, **init_args):
    return {"model": {"mixers": {"a": {"class_path": class_path, "init_args": init_args}}}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"modle": {"d_model": 3}}, "r.yaml:2: the recipe has no option 'modle': did you mean model?"),
        ({"model": {"d_modle": 3}}, "r.yaml:3: model has no option 'd_modle': did you mean d_model?"),
        ({"model": {"lr": 3}}, "r.yaml:3: model has no option 'lr': did you mean learning_rate?"),
        ({"model": {"d_model": "many"}}, "r.yaml:3: model.d_model is many: expected a whole number"),
        ({"model": {"compile": "maybe"}}, "r.yaml:3: model.compile is maybe: expected true or false"),
        ({"model": {"norm": "rms"}}, "r.yaml:3: model.norm is rms: expected rmsnorm or layernorm"),
        ({"model": {"betas": [0.9]}}, "r.yaml:3: model.betas is [0.9]: expected a list of 2 elements, such as [a, b]"),
        ({"model": "big"}, "r.yaml:2: model is big: expected a mapping of its options"),
        ({"model": {"mixers": "Top1Chunk"}}, "r.yaml:3: model.mixers is Top1Chunk: expected a mapping"),
        ({"model": {"mixers": {"a": 3}}}, "r.yaml:4: model.mixers.a is 3: expected Mixer, as NAME or {class_path"),
        ({"data": {"train": ["docs"]}}, "data.train is ['docs']: expected a mapping, such as {name: value}"),
        ({"data": {"ood": "code"}}, "data.ood is code: expected a list, such as [a, b]"),
        ({"trainer": {"precision": "bf61"}}, "r.yaml:3: trainer.precision is bf61: expected 64, 32, 16, transf"),
        ({"ood_loss": {"every": 3}}, "r.yaml:3: ood_loss has no option 'every': expected at, every_n_steps"),
        ({"ood_loss": {"every_n_steps": "often"}}, "r.yaml:3: ood_loss.every_n_steps is often: expected a whole"),
        (
            mixer("Top1Chnk", n_heads=4),
            "r.yaml:5: model.mixers.a: there is no Mixer 'Top1Chnk': did you mean Top1Chunk?",
        ),
        (mixer("Mixer"), "r.yaml:5: model.mixers.a: Mixer is a base class without forward: expected Attention, "),
        (
            mixer("Attention", n_heads=4, position="PositionEncoding"),
            "r.yaml:8: model.mixers.a.position: PositionEncoding is a base class without forward: ",
        ),
        (mixer("GeGLU"), "there is no Mixer 'GeGLU': expected Attention, "),
        (
            {"model": {"mixers": {"a": {"class_path": "Attention", "init_args": "four"}}}},
            "r.yaml:6: model.mixers.a.init_args is four: expected a mapping, such as {name: value}",
        ),
        (
            mixer("no.such.Class"),
            "r.yaml:5: model.mixers.a: 'no.such.Class' belongs neither to seqarch nor to an installed plug-in: ",
        ),
        (mixer("Top1Chunk", n_heads=4, chunk_sise=3), "Top1Chunk has no option 'chunk_sise': did you mean chunk_size?"),
        (mixer("Top1Chunk", n_heads=4, selection="best"), "model.mixers.a.selection is best: expected exact or approx"),
        (mixer("Top1Chunk", n_heads="four"), "r.yaml:7: model.mixers.a.n_heads is four: expected a whole number"),
        (mixer("Mamba1", dt_rank="foo"), "r.yaml:7: model.mixers.a.dt_rank is foo: expected auto or a whole number"),
        (mixer("Mamba2", conv_size="four"), "r.yaml:7: model.mixers.a.conv_size is four: expected a whole number"),
        (
            mixer("RWKV7Shell", n_heads=4, core={"class_path": "SoftmaxCore", "init_args": {"window": "wide"}}),
            "r.yaml:10: model.mixers.a.core.window is wide: expected a whole number",
        ),
        ({"model": {"mixers": {"a": {"class_path": "Top1Chunk", "n_heads": 4}}}}, "of a class stand in init_args"),
        (
            mixer("RWKV7Shell", n_heads=4, core="Sofmax"),
            "no AttentionCore or Mixer 'Sofmax': did you mean SoftmaxCore?",
        ),
        (
            mixer("RWKV7Shell", n_heads=4, core={"class_path": "SoftmaxCore", "init_args": {"windw": 3}}),
            "r.yaml:10: model.mixers.a.core: SoftmaxCore has no option 'windw': did you mean window?",
        ),
        ({"model": {"feed_forward": "GeGLUU"}}, "r.yaml:3: model.feed_forward: there is no FeedForward 'GeGLUU'"),
        ({"trainer": {"callbacks": ["EarlyStoping"]}}, "no Callback 'EarlyStoping': did you mean EarlyStopping?"),
        (
            {"trainer": {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"montor": "x"}}]}},
            "r.yaml:6: trainer.callbacks: EarlyStopping has no option 'montor': did you mean monitor?",
        ),
    ],
)
def test_recipe_with_a_wrong_entry(refuse, recipe, content, said):
    assert said in refuse("fit", "--config", recipe(**content), "--print_config")


HYBRID = {
    "model": {
        "mixers": {
            "near": {"class_path": "Mamba2", "init_args": {"decay": "full", "conv_size": 4}},
            "far": {"class_path": "Mamba2", "init_args": {"decay": "full", "d_state": 16}},
        }
    }
}


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("decay", "half", "r.yaml:12: model.mixers.far.decay is half: expected full, one or none"),
        ("conv_size", "four", "r.yaml:14: model.mixers.far.conv_size is four: expected a whole number"),
        ("heads", 3, "r.yaml:14: model.mixers.far: Mamba2 has no option 'heads': did you mean head_dim?"),
    ],
)
def test_hybrid_with_a_wrong_option_names_the_mixer(refuse, recipe, option, value, said):
    content = copy.deepcopy(HYBRID)
    content["model"]["mixers"]["far"]["init_args"] |= {option: value}
    (Path.cwd() / "r.yaml").write_text(yaml.safe_dump({"extends": str(QUICKSTART), **content}, sort_keys=False))
    assert said in refuse("fit", "--config", "r.yaml", "--print_config")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("far.init_args.decay=half", "model.mixers.far.decay is half: expected full, one or none"),
        ("near.init_args.conv_size=four", "model.mixers.near.conv_size is four: expected a whole number"),
        ("near.init_args.conv_siz=4", "model.mixers.near: Mamba2 has no option 'conv_siz': did you mean conv_size?"),
        ("far=Mamb2", "model.mixers.far: there is no Mixer 'Mamb2': did you mean Mamba2?"),
        ("far={class_path: Mamba2, init_args: {decay: [half}}", "model.mixers.far is {class_path: Mamba2, init_args: "),
    ],
)
def test_wrong_option_of_a_mixer_on_the_command_line(refuse, recipe, flag, said):
    assert refuse("fit", "--config", recipe(**HYBRID), f"--model.mixers.{flag}").startswith(said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"model:\n  d_model: [1,\n", "r.yaml:3: is not valid YAML"),
        (b"model:\n\td_model: 1\n", "that cannot start any token; indent with spaces"),
        (b"- 1\n", "r.yaml holds no keys: a recipe looks like"),
        (b"", "r.yaml holds no keys: a recipe looks like"),
        (bytes(range(100)), "r.yaml is not text: a configuration is a YAML file"),
        (bytes(range(200)), "r.yaml is not text: a configuration is a YAML file, saved as UTF-8"),
        (
            "extends: quickstart\n".encode("utf-16"),
            "r.yaml is not text: a configuration is a YAML file, saved as UTF-8",
        ),
        (b"model:\n  d_model: 3\n  d_model: 4\n", "r.yaml:3: 'd_model' is already in line 2"),
        (b"extends: nope.yaml\n", "r.yaml:1: extends nope.yaml, but there is no file 'nope.yaml'"),
        (b"extends: r.yaml\n", "r.yaml extends r.yaml, which extends it in turn"),
        (b"extends: quickstart\nseed_everything: 2001-13-45\n", "r.yaml:2: seed_everything is 2001-13-45: expected"),
        (b"run_dir: x\nextends: [a, b]\n", "r.yaml:2: extends must name one file"),
    ],
)
def test_file_that_is_no_recipe(refuse, tmp_path, content, said):
    (tmp_path / "r.yaml").write_bytes(content)
    assert said in refuse("fit", "--config", "r.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer:\n", "r.yaml:2: trainer is empty: expected a mapping"),
        ("model: 5\n", "r.yaml:2: model is 5: expected a mapping"),
        ("3: 4\n", "r.yaml:2: the recipe has no option '3'"),
        (
            "model: {feed_forward: [GeGLU]}\n",
            "r.yaml:2: model.feed_forward is ['GeGLU']: expected FeedForward, as NAME",
        ),
        ("model: {mixers: {a: {init_args: {n_heads: 2}}}}\n", "r.yaml:2: model.mixers.a: class_path is missing"),
        (
            "trainer: {callbacks: {class_path: Attention}}\n",
            "r.yaml:2: trainer.callbacks: there is no Callback 'Attention'",
        ),
        ("model: {mixers: {a: seqarch.model.GeGLU}}\n", "r.yaml:2: model.mixers.a: seqarch.model.GeGLU is not a Mixer"),
    ],
)
def test_recipe_is_judged_where_it_is_wrong(refuse, tmp_path, text, said):
    (tmp_path / "r.yaml").write_text(f"extends: {QUICKSTART}\n{text}")
    assert said in refuse("fit", "--config", "r.yaml")


def test_later_recipe_keeps_the_options_of_a_class(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(
        f"extends: {QUICKSTART}\nmodel: {{feed_forward: {{class_path: SwiGLU, init_args: {{hidden: 64}}}}}}\n"
    )
    args = ["--config", str(tmp_path / "r.yaml"), "--model.feed_forward.init_args.hidden=32", "--print_config"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", *args])
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["feed_forward"]["init_args"]["hidden"] == 32


def test_json_is_yaml_too(recipe, tmp_path, capsys):
    (tmp_path / "r.json").write_text(json.dumps({"extends": str(QUICKSTART), "model": {"d_model": 64}}))
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--config", str(tmp_path / "r.json"), "--print_config"])
    assert stop.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["d_model"] == 64
