"""Every recipe is parsed and built at its own size, without memory. The command line runs one of each kind at a small
size.
"""

import functools
import json
from pathlib import Path

import pytest
import yaml

from seqarch import cli, safe_yaml
from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.load import module_of
from seqarch.experiment.parser import read_options, recipe_parser
from seqarch.experiment.recipes import merged_recipe
from seqarch.mixers.short_convolution import ShortConvolution
from seqarch.report.runs import load_run
from tests import processes
from tests.conftest import TINY, flags

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(str(path.relative_to(RECIPES)) for path in RECIPES.glob("**/*.yaml") if path.parent.name != "base")

MILLIONS = {
    "exam/tiny": (0.2, 0.3),
    "exam/draft": (40, 44),
    "exam/small": (40, 44),
    "exam/medium": (105, 116),
    "exam/long": (130, 140),
    "study/canon_gated_delta_net": (46, 47),
    "study/hybrid_": (45, 46),
    "study/": (40, 44),
    "constant_": (105, 140),
    "rwkv5": (116, 118),
    "rwkv6": (120, 122),
    "gated_delta_net": (118, 125),
    "based": (120, 122),
    "_110m": (105, 116),
    "_1b": (1270, 1350),
    "_100k": (130, 140),
    "ablations/": (105, 116),
}
"""Parameters of the published models (arXiv 2505.18522, table of configurations). Trainable constants, one vector per
position, are not included."""


def is_number(value):
    """Whether a value of a recipe is a number; `3e-4` is a string to PyYAML."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


def numbers(tree):
    if isinstance(tree, dict | list):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers(branch)
    elif is_number(tree):
        yield float(tree)


def without_numbers(tree):
    if isinstance(tree, dict):
        return {key: without_numbers(branch) for key, branch in tree.items()}
    if isinstance(tree, list):
        return [without_numbers(branch) for branch in tree]
    return 0 if is_number(tree) else tree


def entries(tree, path=()):
    """Each place of a tree with its value; all numbers are one value."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, branch in children:
        yield from entries(branch, (*path, key if isinstance(tree, dict) else None))
    if not children:
        yield path, 0 if is_number(tree) else str(tree)


def training(recipe):
    """What the recipe says about training, without numbers and without what the small size replaces.

    `test_recipes_train.py` trains each kind of model.
    """
    replaced = {*TINY, "data.root", "model.mixers", "model.pattern"}
    for section, content in recipe.items():
        for key, value in content.items() if isinstance(content, dict) else ():
            if f"{section}.{key}" not in replaced:
                yield from entries(value, (section, key))


@functools.cache
def recipes_by_size():
    """All recipes, those with the smallest numbers first."""
    recipes = {name: merged_recipe(RECIPES / name) for name in NAMES}
    return sorted(recipes.items(), key=lambda item: sum(numbers(item[1]["model"]["mixers"])))


def one_of_each_kind(kind):
    """The recipes with the smallest numbers, so that windows and chunks are shorter than the small sequences."""
    kinds: dict[str, str] = {}
    for name, recipe in recipes_by_size():
        kinds.setdefault(kind(recipe), name)
    return sorted(kinds.values())


def some_with_each_entry(entries_of):
    """Recipes that together hold each entry of all recipes."""
    seen, chosen = set(), []
    for name, recipe in recipes_by_size():
        if new := {*entries_of(recipe)} - seen:
            seen |= new
            chosen.append(name)
    return sorted(chosen)


def test_there_are_recipes():
    assert {"quickstart.yaml", "top1_chunk_1b.yaml", "transformer_pp_110m.yaml"} <= set(NAMES)
    assert any(name.startswith("ablations/") for name in NAMES)


@pytest.mark.commands
@pytest.mark.no_cover
@pytest.mark.parametrize("name", NAMES)
def test_full_size_model_has_the_published_number_of_parameters(name):
    parameters = Experiment.from_recipe(RECIPES / name).build_on_meta().n_parameters()
    low, high = next((size for part, size in MILLIONS.items() if part in name), (0.5, 1.5))
    assert low * 1e6 <= parameters <= high * 1e6, f"{parameters:,}"


@pytest.mark.commands
@pytest.mark.no_cover
@pytest.mark.parametrize("name", some_with_each_entry(training))
def test_recipe_runs_one_step_at_a_small_size(name, shards, tmp_path, monkeypatch):
    monkeypatch.setattr("seqarch.experiment.experiment.outcome", str)  # figures of one step take longer than the step
    recipe = merged_recipe(RECIPES / name)
    n_heads = max(mixer["init_args"].get("n_heads", 4) for mixer in recipe["model"]["mixers"].values())
    pattern = recipe["model"].get("pattern") and list(dict.fromkeys(recipe["model"]["pattern"]))
    small = {
        **TINY,
        "data.root": shards,
        "model.d_model": 8 * n_heads,
        "model.n_layers": len(pattern) if pattern else 2,
        "model.pattern": json.dumps(pattern),
        "trainer.max_steps": 1,
        "attention_entropy.probe_sequences": 1,
        "branches.at": "[]",
        "run_dir": tmp_path / "run",
    }
    cli.run(["fit", "--config", str(RECIPES / name), *flags(**small)])
    run = load_run(tmp_path / "run")
    assert run.facts["status"] == "finished"
    assert {"loss/in_domain/docs", "loss/ood/code"} <= run.curves.keys()
    assert any(name.endswith("entropy/layer_00") for name in run.curves)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_write_to_folders_of_their_own(name):
    content = safe_yaml.load(RECIPES / name)
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


@pytest.mark.parametrize(
    ("later", "kind", "hidden"),
    [
        ("GeGLU", "GeGLU", 96),
        ("SwiGLU", "SwiGLU", 96),
        ("{class_path: GeGLU, init_args: {}}", "GeGLU", 96),
        ("{class_path: SwiGLU, init_args: {hidden: 64}}", "SwiGLU", 64),
        ("{init_args: {hidden: 64}}", "GeGLU", 64),
        ("null", None, None),
    ],
)
def test_exam_reads_a_class_over_another_as_the_command_line_does(tmp_path, later, kind, hidden):
    base, top = tmp_path / "base.yaml", tmp_path / "top.yaml"
    given = "{class_path: GeGLU, init_args: {hidden: 96}}"
    base.write_text(f"extends: recipes/quickstart.yaml\nmodel: {{feed_forward: {given}}}\n")
    top.write_text(f"extends: base.yaml\nmodel: {{feed_forward: {later}}}\n")
    config = Experiment.from_recipe({"extends": str(top)}).config
    assert config == Experiment.from_recipe(merged_recipe(top)).config
    expected = (
        {"class_path": f"seqarch.model.{kind}", "init_args": {"hidden": hidden, "scaled_output": True}}
        if kind
        else None
    )
    assert config["model"]["feed_forward"] == expected


def test_a_recipe_replaces_mixers_whole_however_it_is_given(tmp_path):
    base, top = tmp_path / "base.yaml", tmp_path / "top.yaml"
    mixer = "model: {{mixers: {{attention: {{class_path: Attention, init_args: {{n_heads: 2{}}}}}}}}}\n"
    base.write_text("extends: recipes/quickstart.yaml\n" + mixer.format(", window: 64"))
    top.write_text(f"extends: {base}\n" + mixer.format(""))
    parser = recipe_parser()
    after = ["--config", str(base), "--config", str(top)]
    given = [
        read_options(parser, [], {"extends": str(top)}),
        read_options(parser, after),
        read_options(parser, after[2:]),
    ]
    given.append(read_options(parser, [], merged_recipe(top)))
    given.append(read_options(parser, [], {"extends": str(base), **yaml.safe_load(mixer.format(""))}))
    assert [each.model.mixers["attention"].init_args.window for each in given] == [None] * 5
    assert read_options(parser, after[:2]).model.mixers["attention"].init_args.window == 64


def test_a_class_that_is_named_again_has_the_options_of_all_before(tmp_path):
    texts = ["{class_path: GeGLU, init_args: {hidden: 96}}", "SwiGLU", "{class_path: GeGLU}"]
    base = "recipes/quickstart.yaml"
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.yaml").write_text(f"extends: {base}\nmodel: {{feed_forward: {text}}}\n")
        base = tmp_path / f"{n}.yaml"
    assert Experiment.from_recipe(base).config["model"]["feed_forward"]["init_args"]["hidden"] == 96


@pytest.mark.parametrize("middle", ["", "init_args: {save_dir: elsewhere}"])
def test_an_option_that_a_class_does_not_take_over_is_refused(tmp_path, middle):
    base, between, top = (tmp_path / f"{name}.yaml" for name in ("base", "between", "top"))
    options = "{save_dir: logs, flush_logs_every_n_steps: 5}"
    base.write_text(
        f"extends: recipes/quickstart.yaml\ntrainer:\n  logger:\n    class_path: CSVLogger\n    init_args: {options}\n"
    )
    between.write_text(f"extends: base.yaml\ntrainer: {{logger: {{class_path: TensorBoardLogger, {middle}}}}}\n")
    top.write_text("extends: between.yaml\ntrainer: {logger: TensorBoardLogger}\n")
    said = "trainer.logger: TensorBoardLogger has no option 'flush_logs_every_n_steps'"
    for recipe in (between, top):
        with pytest.raises(UserError, match=f"^{base}:5: {said}"):
            Experiment.from_recipe(recipe)
        with pytest.raises(UserError, match=f"^{said}"):
            Experiment.from_recipe(merged_recipe(recipe))


@pytest.mark.parametrize(
    ("section", "value", "option", "new"),
    [
        ("mixers.attention", {"class_path": "Mamba2", "init_args": {"d_conv": 3}}, "d_conv", "conv_size"),
        ("mixers.attention", {"class_path": "Mamba1", "init_args": {"d_conv": 3}}, "d_conv", "conv_size"),
        ("canon", {"class_path": "Canon", "init_args": {"kernel_size": 3}}, "kernel_size", "conv_size"),
    ],
)
def test_an_option_is_read_by_its_former_name(tmp_path, section, value, option, new):
    config = Experiment.from_recipe("quickstart", {f"model.{section}": value, "run_dir": str(tmp_path)}).config
    options = config["model"][section] if section == "canon" else config["model"]["mixers"]["attention"]
    assert options["init_args"][new] == 3
    assert option not in options["init_args"]
    options["init_args"][option] = options["init_args"].pop(new)  # as in a checkpoint of an earlier version
    lm = module_of({"hyper_parameters": config["model"], "seqarch": {}}).built()
    size = {each.kernel_size for each in lm.modules() if isinstance(each, ShortConvolution)}
    assert size == {3}


@pytest.mark.parametrize("mixer", ["Mamba2", "{class_path: Mamba2, init_args: {d_state: 16}}"])
def test_a_flag_that_names_another_class_drops_the_options_of_the_former(mixer):
    flag = "--model.mixers.attention"
    config = Experiment(["--config", "quickstart", flag, mixer, f"{flag}.conv_size=3"]).config
    options = config["model"]["mixers"]["attention"]["init_args"]
    assert (options["d_state"], options["conv_size"]) == (16 if "16" in mixer else 128, 3)
    again = Experiment(["--config", "quickstart", f"{flag}.window=8", flag, "Attention"]).config["model"]["mixers"]
    assert (again["attention"]["init_args"]["n_heads"], again["attention"]["init_args"]["window"]) == (4, 8)


NAMES_THAT_YAML_CHANGES = ["012", "1e3", "on", "0x20", "2001-01-01", "1_000", "null", ".5"]


def test_a_name_is_what_the_file_spells(tmp_path):
    """Domains, layers of a pattern and mixers; as keys and in lists, in a file and as flags."""
    listed = ", ".join(NAMES_THAT_YAML_CHANGES)
    train = ", ".join(f"{name}: 1" for name in NAMES_THAT_YAML_CHANGES)
    mixers = ", ".join(f"{name}: {{class_path: Mamba2}}" for name in NAMES_THAT_YAML_CHANGES)
    values = {"data.train": train, "model.mixers": mixers}
    (tmp_path / "r.yaml").write_text(
        f"extends: quickstart\ndata: {{train: {{{train}}}, ood: [{listed}]}}\n"
        f"model: {{mixers: {{{mixers}}}, pattern: [{listed}]}}\nrun_dir: 012\n"
    )
    flags_of_it = [f"--{key}={{{value}}}" for key, value in values.items()]
    flags_of_it += [f"--{key}=[{listed}]" for key in ("data.ood", "model.pattern")]
    recipes = [["--config", str(tmp_path / "r.yaml")], ["--config", "quickstart", *flags_of_it, "--run_dir=012"]]
    for config in (Experiment(args).config for args in recipes):
        assert list(config["data"]["train"]) == list(config["model"]["mixers"]) == NAMES_THAT_YAML_CHANGES
        assert config["data"]["ood"] == config["model"]["pattern"] == NAMES_THAT_YAML_CHANGES
        assert config["run_dir"] == "012"


@pytest.mark.parametrize("text", ["runs #2", "&a b", '"a"', "!a", "[a]"])
def test_text_of_a_flag_or_an_override_stays_as_it_is(text):
    names = {"run_dir": text, "data.root": text}
    for experiment in (Experiment(["-c=quickstart", *flags(**names)]), Experiment.from_recipe("quickstart", names)):
        assert [experiment.options.run_dir, experiment.options.data.root] == [text, text]


def test_each_file_of_a_recipe_is_composed_once(monkeypatch):
    files: list[Path] = []
    compose = safe_yaml.compose
    monkeypatch.setattr("seqarch.experiment.tree.compose", lambda path: files.append(path) or compose(path))
    Experiment.from_recipe("quickstart_top1_chunk")
    assert sorted(path.name for path in files) == ["quickstart.yaml", "quickstart_top1_chunk.yaml"]


COUNT = """
import sys
from seqarch import Experiment, __file__ as package
calls = {True: 0, False: 0}
def count(frame, event, _):
    if event == "call":
        calls[frame.f_code.co_filename.startswith(package.removesuffix("__init__.py"))] += 1
Experiment.from_recipe("quickstart")
sys.setprofile(count)
Experiment.from_recipe("quickstart")
sys.setprofile(None)
print(calls[True], calls[False])
"""


@pytest.mark.commands
def test_a_recipe_is_read_with_few_calls(tmp_path):
    """In a process of its own, since other tests register classes. Before recipes were read once: 8,786 and 96,000."""
    (tmp_path / "count_calls.py").write_text(COUNT)
    counted = processes.seqarch([], tmp_path / "logs", {"PYTHONPATH": str(tmp_path)}, module="count_calls")
    assert counted.returncode == 0, counted.stderr
    own, others = map(int, counted.stdout.split())
    assert 500 < own < 2500
    assert own + others < 30_000
