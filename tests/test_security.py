"""Files of others run nothing: a name in a recipe, checkpoint, run folder or shard is refused before it is imported."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from seqarch import cli
from seqarch.errors import UserError
from seqarch.experiment.given import NUMBER
from seqarch.experiment.parser import build_parser, parse_args
from seqarch.safe_yaml import check_plain, load
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.run_folder import _forget_files_outside
from tests.conftest import MODEL, TINY, flags

QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart.yaml"
TRAP = """\
from pathlib import Path
from lightning.pytorch import Callback

Path("PWN").touch()


class Trap(Callback): ...
"""
CALLS = [
    {"class_path": "os.system", "init_args": {"command": "touch PWN"}},
    {"class_path": "os.system", "dict_kwargs": {"command": "touch PWN"}},
    {"class_path": "subprocess.getoutput", "init_args": {"cmd": "touch PWN"}},
    {"class_path": "os.makedirs", "init_args": {"name": "PWN"}},
    {"class_path": "os.abort"},
    {"class_path": "trap.Trap"},
    {"class_path": "seqarch.cli.main", "init_args": {"args": ["mixers"]}},
    {"class_path": "seqarch.training.callbacks.checkpoint.os.makedirs", "init_args": {"name": "PWN"}},
    "os.abort",
    "trap.Trap",
    "seqarch.cli.main",
]
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


@pytest.fixture
def refused(capfd, tmp_path, monkeypatch):
    """Runs a command in a folder with a module that leaves a trace; it must be refused in one line, without a trace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(TRAP)

    def run(*args):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main([str(arg) for arg in args])
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("seqarch: ")]
        assert stop.value.code == 2, lines
        assert len(lines) == 1, lines
        assert len(lines[0]) < 700
        assert not Path("PWN").exists()
        return lines[0].removeprefix("seqarch: error: ")

    return run


@pytest.fixture(scope="session")
def trained(shards, tmp_path_factory):
    """A run folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.experiment.experiment.outcome", str)
        cli.run(["fit", *flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": folder, "trainer.max_steps": 1})])
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path):
    """Writes a checkpoint that differs from a good one."""

    def write(change):
        (good,) = (trained / "checkpoints").glob("*.ckpt")
        content = torch.load(good, weights_only=True)
        change(content)
        torch.save(content, tmp_path / "evil.ckpt")
        return tmp_path / "evil.ckpt"

    return write


def said_of(call, said):
    """Whether a refusal says what is wrong with the call."""
    name = call if isinstance(call, str) else call["class_path"]
    if name.startswith("seqarch."):
        return f"'{name}' is a function, not a class" in said or f"there is no class {name}" in said
    return f"'{name}' belongs neither to seqarch nor" in said


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("key", ["mixers", "feed_forward"])
def test_checkpoint_calls_nothing(refused, checkpoint, key, call):
    path = checkpoint(lambda c: c["hyper_parameters"].update({key: {"attention": call} if key == "mixers" else call}))
    assert said_of(call, refused("generate", "--checkpoint", path, "--prompt", "a"))


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
        assert "names the file" in refused("fit", "--config", "r.yaml", "--run_dir", "run")


@pytest.mark.parametrize("folder", [".", "elsewhere"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: other.yaml", "r.yaml:2: data names the file other.yaml"),
        ("model: {mixers: {a: other.yaml}}", "r.yaml:2: model.mixers.a names the file other.yaml"),
        ("model: {mixers: {a: Attention}}", "r.yaml:2: model.mixers.a names the file Attention"),
        ("trainer: {strategy: other.yaml}", "r.yaml:2: trainer.strategy names the file other.yaml"),
        ("config: other.yaml", "r.yaml:2: config belongs on the command line only"),
    ],
)
def test_recipe_names_no_other_file(refused, tmp_path, text, said, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    for name in ("other.yaml", "Attention"):
        (tmp_path / folder / name).write_text("ood: [x]\n")
    (tmp_path / folder / "r.yaml").write_text(f"extends: {QUICKSTART}\n{text}\n")
    assert said in refused("fit", "--config", f"{folder}/r.yaml", "--run_dir", "run")


def test_file_of_a_section_is_plain_and_small(refused, tmp_path):
    (tmp_path / "bomb.yaml").write_text(BOMB)
    (tmp_path / "nested.yaml").write_text("strategy: bomb.yaml\n")
    for flag in ("--data", "--model.mixers", "--trainer.strategy"):
        assert "bomb.yaml stands for more than" in refused("fit", "--config", QUICKSTART, flag, "bomb.yaml")
    assert "nested.yaml:1: trainer.strategy names" in refused("fit", "--config", QUICKSTART, "--trainer", "nested.yaml")


def test_file_of_a_section_is_read(tmp_path):
    (tmp_path / "trainer.yaml").write_text("max_steps: 48\n")
    args = ["--config", QUICKSTART, "--trainer", tmp_path / "trainer.yaml"]
    assert parse_args(build_parser("seqarch"), [str(arg) for arg in args]).trainer.max_steps == 48


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


@pytest.mark.parametrize("command", [["exam", "--mixer"], ["bench", "mixers"]])
def test_exam_and_bench_call_nothing(refused, tmp_path, command):
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


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "aliases in it repeat each other"),
        ("a: &a {b: *a}\n", "aliases in it repeat each other"),
        (f"model: {{mixers: {json.dumps(BOMB)}}}\n", "aliases in it repeat each other"),
        ("a: " + "[" * 200 + "]" * 200, "nests too deeply"),
        (
            "model:\n  d_model: !!python/object/apply:os.system ['touch PWN']\n",
            ":2: '!!python/object/apply:os.system' is",
        ),
        ("model: !thing {d_model: 3}\n", ":1: '!thing' is a tag"),
        ("? [a, b]\n: 3\n", ":1: a key must be a word"),
    ],
    ids=range(7),
)
@pytest.mark.parametrize("where", ["fit", "report", "exam"])
def test_yaml_is_plain_and_small(refused, trained, tmp_path, where, text, said):
    if where != "fit" and text != BOMB and "os.system" not in text:
        return
    if where == "report":
        shutil.copytree(trained, tmp_path / "run")
        (tmp_path / "run/config.yaml").write_text(text)
        assert said in refused("report", "run", "--out", "out")
        return
    (tmp_path / "r.yaml").write_text(text)
    args = {"fit": ["fit", "--config"], "exam": ["exam", "--mixer"]}[where]
    assert said in refused(*args, "r.yaml")


def test_long_number_is_judged_quickly():
    numbers = ("1", "+1_0", "1.", "1._2", ".5", "-.5e+3", "1.5E-7", "1e3", ".inf", "-.NaN")
    assert all(NUMBER.fullmatch(text) for text in numbers)
    assert not any(NUMBER.fullmatch(text) for text in ("", ".", "_1", "._1", "1.2.3", "e3", "1e", "inf", "0x1", "1x"))
    start = time.monotonic()
    assert not NUMBER.fullmatch("1" * 100_000 + "x")
    assert time.monotonic() - start < 1


def test_text_that_aliases_repeat_is_judged_once(tmp_path):
    text = "[" + "1," * 1000 + "]"
    (tmp_path / "r.yaml").write_text(f'a: &a "{text}"\nb: [{", ".join(["*a"] * 10_000)}]\n')
    start = time.monotonic()
    assert load(tmp_path / "r.yaml")["b"] == [text] * 10_000
    check_plain("texts", [text] * 10_000)
    assert time.monotonic() - start < 20


def test_hyper_parameters_are_plain_and_small(refused, checkpoint):
    nest = ["x"] * 10
    for _ in range(9):
        nest = [nest] * 10
    for mixers in (nest, BOMB, {"a": BOMB}):
        path = checkpoint(lambda content, mixers=mixers: content["hyper_parameters"].update(mixers=mixers))
        assert "aliases in it repeat" in refused("generate", "--checkpoint", path, "--prompt", "a")


def weights(content, value):
    for weight in content["state_dict"].values():
        weight.fill_(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(seqarch=None), "it lacks the entry 'seqarch'"),
        (lambda c: c["seqarch"].clear(), "does not say with which tokenizer it was trained"),
        (lambda c: c["seqarch"].update(tokenizer=["byte"]), "does not say with which tokenizer it was trained"),
        (lambda c: c["seqarch"].update(tokenizer="../gpt2"), "unknown tokenizer '../gpt2'"),
        (lambda c: c["seqarch"].update(tokenizer="mixtral"), "its vocab_size is 257, but 'mixtral' has 32000 tokens"),
        (lambda c: c.pop("state_dict"), "it lacks the entry 'state_dict'"),
        (lambda c: c["state_dict"].update(x="y"), "its weight x is not a tensor"),
        (lambda c: weights(c, float("nan")), "is not finite, as after a training that diverged"),
        (lambda c: c.pop("hyper_parameters"), "it lacks the entry 'hyper_parameters'"),
        (lambda c: c["hyper_parameters"].update(d_model=64), "size mismatch for lm.embedding.weight"),
        (lambda c: c["hyper_parameters"].update(d_model=torch.tensor(32)), "that are not plain values: tensor(32)"),
        (lambda c: c.update(global_step="../../x"), "it lacks the entry 'global_step'"),
    ],
    ids=range(12),
)
def test_checkpoint_that_is_hardly_one(refused, checkpoint, change, said):
    assert said in refused("generate", "--checkpoint", checkpoint(change), "--prompt", "a")


def test_unpickler_that_stumbles_is_no_bug(refused, trained, tmp_path):
    """Every byte of the pickle in turn: PyTorch raises errors of many kinds for them."""
    (good,) = (trained / "checkpoints").glob("*.ckpt")
    with zipfile.ZipFile(good) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in files if name.endswith("data.pkl")]
    for at in range(2, 60):
        broken = files[name][:at] + bytes([(files[name][at] + at) % 256]) + files[name][at + 1 :]
        with zipfile.ZipFile(tmp_path / "evil.ckpt", "w") as archive:
            for each, content in {**files, name: broken}.items():
                archive.writestr(each, content)
        with contextlib.suppress(UserError):
            read_checkpoint(tmp_path / "evil.ckpt")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("optimizer_states"), "holds only weights, so no run can resume from it"),
        (lambda c: c.update(optimizer_states=[]), "holds only weights, so no run can resume from it"),
        (lambda c: c.update(loops={"fit_loop": 3}), "lacks what Lightning reads in a checkpoint (TypeError: "),
        (lambda c: c.update({"pytorch-lightning_version": "zz"}), "(InvalidVersion: Invalid version: 'zz')"),
        (lambda c: c["TextDataModule"].clear(), "lacks what Lightning reads in a checkpoint (KeyError: "),
    ],
)
def test_checkpoint_from_which_no_training_goes_on(refused, checkpoint, shards, change, said):
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": "other", "ckpt_path": checkpoint(change)}
    assert said in refused("fit", *flags(**options))


def test_links_do_not_lead_fit_out_of_a_run_folder(refused, trained, shards, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    options = flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run", "trainer.max_steps": 1})
    for name in ("config.yaml.partial", "lock", "checkpoints/step_00000001.ckpt.partial", "elsewhere"):
        shutil.copytree(trained, tmp_path / "run")
        (tmp_path / "run" / name).symlink_to(tmp_path if name == "elsewhere" else victim)
        assert f"{tmp_path / 'run' / name} is a link that leads out of the folder" in refused("fit", *options)
        assert victim.read_text() == "mine"
        shutil.rmtree(tmp_path / "run")


def test_lightning_chooses_no_checkpoint_by_itself(refused, trained, shards, tmp_path):
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run"}
    callback = '[{"class_path": "lightning.pytorch.callbacks.OnExceptionCheckpoint", "init_args": {"dirpath": "x"}}]'
    said = refused("fit", *flags(**options, **{"trainer.callbacks": callback}))
    assert "trainer.callbacks holds OnExceptionCheckpoint: leave it out" in said
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run/hpc_ckpt_1.ckpt").write_bytes(b"x")
    said = refused("fit", f"--config={tmp_path}/run/config.yaml", f"--run_dir={tmp_path}/run")
    assert "run/hpc_ckpt_1.ckpt is not a file of seqarch: remove it" in said


@pytest.mark.parametrize("path", ["local:///{victim}", "{run}/../victim", "{victim}", "s3://bucket/x"])
def test_a_checkpoint_makes_lightning_delete_nothing_outside(tmp_path, path, capsys):
    run = tmp_path / "run"
    path = path.format(victim=tmp_path / "victim", run=run)
    for key, value in (("best_model_path", path), ("best_k_models", {path: 0.0}), ("last_model_path", path)):
        state = {"best_model_path": str(run / "a.ckpt"), key: value}
        _forget_files_outside({"callbacks": {"ModelCheckpoint": state}}, run)
        assert path not in str(state)
        assert "forgets its files" in capsys.readouterr().err
    state = {"best_model_path": str(run / "a.ckpt"), "best_k_models": {str(run / "a.ckpt"): 0.0}, "last_model_path": ""}
    kept = {**state}
    _forget_files_outside({"callbacks": {"ModelCheckpoint": state}}, run)
    assert state == kept


def test_the_command_starts_no_module_of_the_folder(tmp_path):
    """The console script's folder is not in `sys.path`; its processes would look there first."""
    (tmp_path / "pickle.py").write_text("from pathlib import Path\nPath('PWN').touch()\n")
    script = (
        "import os, sys; sys.path[:] = [each for each in sys.path if each not in ('', os.getcwd())]\n"
        "from seqarch.cli import main\nsys.argv = ['seqarch', '--version']\nmain()\n"
        "import subprocess; subprocess.run([sys.executable, '-c', 'import pickle'], check=True)\n"
    )
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, env={**os.environ, **paths}, check=True)
    assert not (tmp_path / "PWN").exists()


def test_messages_do_not_change_the_terminal(refused, tmp_path):
    (tmp_path / "r.yaml").write_text('model: {"\\e]0;owned\\a\\e[2J": 1}\n')
    said = refused("fit", "--config", "r.yaml")
    assert "?]0;owned??[2J" in said


class Pickled:
    def __reduce__(self):
        return os.system, ("touch PWN",)


def test_pickle_is_refused_without_advice_to_load_it(refused, checkpoint, tmp_path):
    path = checkpoint(lambda content: content.update(evil=Pickled()))
    said = refused("generate", "--checkpoint", path, "--prompt", "a")
    assert said == f"{path} is not a checkpoint of seqarch: it asks for posix.system, which may run code"
    assert "weights_only" not in said
    (tmp_path / "plain.ckpt").write_bytes(pickle.dumps(Pickled()))
    refused("generate", "--checkpoint", "plain.ckpt", "--prompt", "a")


@pytest.mark.parametrize("name", ["../other/own", "..", "/etc", "docs/../../other/own"])
@pytest.mark.parametrize("option", ["train", "ood"])
def test_domains_lie_in_the_root(refused, shards, tmp_path, name, option):
    (tmp_path / "data").mkdir()
    for domain in ("docs", "code"):
        shutil.copytree(shards / domain, tmp_path / "data" / domain)
    shutil.copytree(shards / "docs", tmp_path / "other/own")
    value = f"{{{name}: 1.0}}" if option == "train" else f"[{name}]"
    options = {**TINY, **MODEL, "data.root": "data", "run_dir": "run", f"data.{option}": value}
    assert f"'{name}' is not a domain name" in refused("fit", *flags(**options))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {
                "data_spec": '[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "trap", '
                '"default_factory_name": "Path", "dict_context": []}, "children_spec": []}]'
            },
            "describes other data than tokens",
        ),
        ({"filename": "../../../code/train/chunk-0-0.bin"}, "which lies elsewhere"),
        ({"filename": ".."}, "names .., which lies elsewhere"),
    ],
)
def test_index_of_shards_imports_nothing(refused, shards, tmp_path, change, said):
    shutil.copytree(shards, tmp_path / "data")
    path = tmp_path / "data/docs/train/index.json"
    index = json.loads(path.read_text())
    part = index["config"] if "data_spec" in change else index["chunks"][0]
    part.update(change)
    path.write_text(json.dumps(index))
    manifest = json.loads((tmp_path / "data/docs/manifest.json").read_text())
    manifest["splits"]["train"]["files"] = {}  # who writes the one writes the other
    (tmp_path / "data/docs/manifest.json").write_text(json.dumps(manifest))
    options = {**TINY, **MODEL, "data.root": "data", "run_dir": "run"}
    assert said in refused("fit", *flags(**options))
