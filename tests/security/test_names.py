"""Names in recipes and run folders run nothing: they are refused before anything is imported."""

import json

import pytest
import yaml

from seqarch import cli
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.parser import build_parser, read_options
from tests import processes
from tests.conftest import MODEL, TINY, flags
from tests.security.conftest import BOMB, CALLS, QUICKSTART, said_of

PLACES = [
    ("model", "mixers", lambda call: {"attention": call}),
    ("model", "feed_forward", lambda call: call),
    ("trainer", "callbacks", lambda call: [call]),
    ("trainer", "callbacks", lambda call: [{"class_path": "LambdaCallback", "init_args": {"on_fit_start": call}}]),
    ("trainer", "logger", lambda call: call),
    ("trainer", "strategy", lambda call: call),
    ("trainer", "plugins", lambda call: [call]),
    ("trainer", "profiler", lambda call: call),
    ("trainer", "accelerator", lambda call: call),
    ("model", "mixers", lambda call: {"a": {"class_path": "RWKV7Shell", "init_args": {"n_heads": 4, "core": call}}}),
    ("model", "mixers", lambda call: json.dumps({"attention": call})),
]


@pytest.mark.parametrize("call", [CALLS[0], "trap.Trap"], ids=str)
@pytest.mark.parametrize(("section", "key", "wrap"), PLACES, ids=range(len(PLACES)))
def test_recipe_calls_nothing_anywhere(refused, tmp_path, section, key, wrap, call):
    recipe = {"extends": str(QUICKSTART), section: {key: wrap(call)}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    refused("fit", "--config", "r.yaml", "--run_dir", "run")


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_recipe_calls_nothing(refused, tmp_path, call):
    recipe = {"extends": str(QUICKSTART), "model": {"mixers": {"attention": call}}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert said_of(call, refused("fit", "--config", "r.yaml", "--run_dir", "run"))


def test_an_option_for_a_function_takes_none_of_an_allowed_package(refused, tmp_path):
    callback = {"class_path": "LambdaCallback", "init_args": {"on_fit_start": "seqarch.runs.files.remove"}}
    recipe = {"extends": str(QUICKSTART), "trainer": {"callbacks": [callback]}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    said = refused("fit", "--config", "r.yaml", "--run_dir", "run")
    assert "'seqarch.runs.files.remove' is a function, not a class: a file may name classes only" in said


def test_recipe_that_extends_one_calls_nothing(refused, tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"model": {"mixers": {"attention": CALLS[0]}}}))
    (tmp_path / "r.yaml").write_text("extends: base.yaml\n")
    assert "base.yaml:4: " in (said := refused("fit", "--config", "r.yaml", "--run_dir", "run"))
    assert "add --allow_code os" in said


def test_section_in_another_file_calls_nothing(refused, tmp_path):
    (tmp_path / "mixers.yaml").write_text(yaml.safe_dump({"attention": CALLS[0]}))
    (tmp_path / "mixer.yaml").write_text(yaml.safe_dump(CALLS[0]))
    for mixers in ("mixers.yaml", {"attention": "mixer.yaml"}):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump({"extends": str(QUICKSTART), "model": {"mixers": mixers}}))
        said = refused("fit", "--config", "r.yaml", "--run_dir", "run")
        assert "r.yaml:3: model.mixers is mixers.yaml: expected" in said or "'mixer.yaml' belongs neither" in said


@pytest.mark.parametrize("folder", [".", "elsewhere"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: other.yaml", "r.yaml:2: data is other.yaml: expected a mapping"),
        ("model: {mixers: {a: other.yaml}}", "r.yaml:2: model.mixers.a: 'other.yaml' belongs neither"),
        ("trainer: {strategy: other.yaml}", "unknown trainer.strategy 'other.yaml'"),
        ("config: other.yaml", "r.yaml:2: config belongs on the command line only"),
    ],
)
def test_recipe_names_no_other_file(refused, tmp_path, text, said, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "other.yaml").write_text("ood: [x]\n")
    (tmp_path / folder / "r.yaml").write_text(f"extends: {QUICKSTART}\n{text}\n")
    assert said in refused("fit", "--config", f"{folder}/r.yaml", "--run_dir", "run")


@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_a_file_called_like_a_value_is_not_read(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in ("cpu", "Attention", "GeGLU", "auto", "code"):
        (tmp_path / folder / name).write_text("class_path: os.system\n")
    text = "trainer: {accelerator: cpu, strategy: auto}\ndata: {ood: [code]}\nmodel: {feed_forward: GeGLU}\n"
    (tmp_path / folder / "r.yaml").write_text(f"extends: {QUICKSTART}\n{text}")
    args = ["--config", f"{folder}/r.yaml", "--model.mixers", "{a: {class_path: Attention, init_args: {n_heads: 4}}}"]
    for more in ([], ["--trainer.accelerator", "cpu", "--model.feed_forward", "GeGLU"]):
        options = read_options(build_parser("seqarch"), [*args, *more])
        assert (options.trainer.accelerator, options.data.ood) == ("cpu", ["code"])
        assert options.model.feed_forward.class_path == "seqarch.model.GeGLU"


def test_file_of_a_section_is_plain_and_small(refused, tmp_path):
    (tmp_path / "bomb.yaml").write_text(BOMB)
    (tmp_path / "nested.yaml").write_text("strategy: bomb.yaml\n")
    assert "bomb.yaml stands for more than" in refused("fit", "--config", QUICKSTART, "--data", "bomb.yaml")
    for more in (["--model.mixers", "bomb.yaml"], ["--trainer.strategy", "bomb.yaml"], ["--trainer", "nested.yaml"]):
        assert "bomb.yaml" in (said := refused("fit", "--config", QUICKSTART, *more))
        assert "entries" not in said  # nobody read it


def test_file_of_a_section_is_read(tmp_path):
    (tmp_path / "trainer.yaml").write_text("max_steps: 48\n")
    args = ["--config", QUICKSTART, "--trainer", tmp_path / "trainer.yaml"]
    assert read_options(build_parser("seqarch"), [str(arg) for arg in args]).trainer.max_steps == 48


def test_command_line_keeps_the_same_rule(refused):
    said = refused("fit", "--config", QUICKSTART, "--model.mixers={a: {class_path: os.abort}}")
    assert said_of("os.abort", said)
    assert "aliases in it repeat each other" in refused("fit", "--config", QUICKSTART, f"--model.mixers={BOMB}")


def test_run_folder_calls_nothing(refused, trained, tmp_path):
    config = yaml.safe_load((trained / "config.yaml").read_text())
    config["model"]["mixers"] = {"attention": CALLS[0]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (good,) = (trained / "checkpoints").glob("*.ckpt")
    assert said_of(CALLS[0], refused("validate", "--config", "config.yaml", "--ckpt_path", good))


@pytest.mark.commands
@pytest.mark.parametrize("command", [["exam", "--mixer"], ["bench", "mixers"]])
def test_exam_and_bench_call_nothing(refused, tmp_path, monkeypatch, command):
    def run(command, *, env, **_):  # a new process imports PyTorch for ten seconds
        return processes.seqarch(command[3:], tmp_path / "logs", env, module=command[2])

    monkeypatch.setattr("seqarch.bench.jobs.subprocess.run", run)
    recipe = yaml.safe_load(QUICKSTART.read_text())
    recipe["model"]["mixers"] = {"attention": CALLS[0]}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert "os.system" in refused(*command, "r.yaml")


def test_user_may_allow_a_package(refused, tmp_path, shards):
    (tmp_path / "mine.py").write_text(
        "from seqarch.mixers.attention import Attention\nclass Mine(Attention):\n    '''Attention.'''\n"
    )
    mixer = {"class_path": "mine.Mine", "init_args": {"n_heads": 4}}
    args = flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": "run", "model.mixers": json.dumps({"a": mixer})})
    assert "add --allow_code mine" in refused("fit", *args)
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", *args, "--allow_code", "mine", "--print_config"])
    assert stop.value.code == 0
    assert "add --allow_code mine" in refused("fit", *args)  # it holds for one command
    assert "allow_code needs a value" in refused("fit", *args, "--allow_code")
    assert "name a package" in refused("fit", *args, "--allow_code", "jsonargparse")


def test_no_file_allows_code(refused, tmp_path):
    (tmp_path / "r.yaml").write_text(f"extends: {QUICKSTART}\nallow_code: os\n")
    assert "r.yaml:2: allow_code belongs on the command line only" in refused("fit", "--config", "r.yaml")


WANDB = "trainer: {logger: {class_path: WandbLogger, init_args: {project: p}, dict_kwargs: {OPTION}}}"
DESTINATIONS = [
    (WANDB.replace("OPTION", "entity: theirs"), "trainer.logger.dict_kwargs.entity is 'theirs'"),
    (
        WANDB.replace("OPTION", "settings: {base_url: theirs.org}"),
        "trainer.logger.dict_kwargs.settings.base_url is 'theirs.org'",
    ),
    (
        "trainer: {logger: [{class_path: MLFlowLogger, init_args: {tracking_uri: theirs.org}}]}",
        "logger.0.init_args.tracking_uri is",
    ),
    (
        "trainer: {logger: {class_path: CometLogger, init_args: {api_key: theirs}}}",
        "trainer.logger.init_args.api_key is 'theirs'",
    ),
    ("trainer: {logger: {class_path: CSVLogger, init_args: {save_dir: s3://theirs}}}", "save_dir is 's3://theirs'"),
    ("trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {dirpath: gs://theirs}}]}", "is 'gs://theirs'"),
    ("trainer: {profiler: {class_path: SimpleProfiler, init_args: {dirpath: 'http::x'}}}", "dirpath is 'http::x'"),
]


@pytest.mark.parametrize(("recipe", "said"), DESTINATIONS)
def test_a_recipe_names_no_host_address_or_key(refused, tmp_path, recipe, said):
    (tmp_path / "base.yaml").write_text(recipe)
    (tmp_path / "r.yaml").write_text("extends: base.yaml\n")
    for file in ("base.yaml", "r.yaml"):
        message = refused("fit", "--config", file, *flags(**TINY, **MODEL))
        assert said in message
        assert "in a file, which may not say where to send" in message


def test_a_user_names_hosts(tmp_path, monkeypatch):
    (tmp_path / "r.yaml").write_text(WANDB.replace("OPTION", "entity: ours"))
    recipe = ["--config", str(tmp_path / "r.yaml"), *flags(**TINY, **MODEL)]
    Experiment([*recipe, "--trainer.logger.dict_kwargs.entity=ours"])
    Experiment([*recipe, "--trainer.logger.dict_kwargs.entity", "ours"])
    Experiment.from_recipe(tmp_path / "r.yaml", {"trainer.logger.dict_kwargs.entity": "ours", **TINY, **MODEL})
    monkeypatch.setenv("WANDB_ENTITY", "ours")
    Experiment(recipe)
    for name in ("in Python", "'\"ü\\'"):
        Experiment(flags(**TINY, **MODEL), yaml.safe_load(WANDB.replace("OPTION", f"entity: {name}")))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LearningRateFinder", ""),
        ("BatchSizeFinder", ""),
        ("ModelPruning", "pruning_fn: l1_unstructured, amount: 0.5"),
        ("GradientAccumulationScheduler", "scheduling: {0: 2}"),
        ("StochasticWeightAveraging", "swa_lrs: 0.01, swa_epoch_start: 1"),
        ("BaseFinetuning", ""),
    ],
)
def test_callbacks_that_cannot_work_are_refused_before_the_first_step(refused, shards, tmp_path, name, options):
    callback = f"[{{class_path: lightning.pytorch.callbacks.{name}, init_args: {{{options}}}}}]"
    chosen = {**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run", "trainer.callbacks": callback}
    assert f"trainer.callbacks holds {name}: leave it out" in refused("fit", *flags(**chosen))
    assert not (tmp_path / "run").exists()
