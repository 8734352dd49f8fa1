"""A package that seqarch does not know, with one mixer and its entry point, is installed; recipes name the class."""

import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import yaml

from seqarch import cli
from tests import processes
from tests.conftest import MODEL, TINY, flags

ROOT = Path(__file__).parents[2]
PYPROJECT = """\
[project]
name = "running-mean"
version = "0.2"

[project.entry-points."seqarch.mixers"]
RunningMean = "running_mean:RunningMean"
"""
MODULE = '''\
import torch
from torch import nn
from seqarch.mixers import Mixer


class RunningMean(Mixer):
    """The mean of a projection over all tokens so far."""

    source = "a test"

    def __init__(self, d_model, layer_idx, n_layers, *, gain: float = 1.0):
        super().__init__(d_model, layer_idx, n_layers)
        self.gain = gain
        self.value = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, *, state=None, cu_seqlens=None):
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.gain * self.value(x).cumsum(dim=1) / count

    def flops_per_token(self, seq_len, *, training=False):
        return 2.0 * self.d_model**2 * (3 if training else 1)
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A folder with the distribution, as an installer lays it out: the module and its metadata."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "running_mean.py").write_text(MODULE)
    install(source, site)
    return site


def install(source, site):
    """What `pip install --target` does with a pure Python project, without a build back-end or a network."""
    import tomllib

    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    for module in source.glob("*.py"):
        (site / module.name).write_text(module.read_text())
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))


def seqarch(*args, logs, paths=()):
    """Run the command in a new process that finds the packages in `paths`."""
    return processes.seqarch([*map(str, args)], logs, {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))})


@pytest.mark.commands
def test_recipe_trains_it_by_its_class_alone(plugin, shards, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        f"extends: {ROOT}/recipes/quickstart.yaml\n"
        "model:\n  mixers:\n    mean: {class_path: RunningMean, init_args: {gain: 0.5}}\n"
    )
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run"}
    del options["model.mixers"]
    done = seqarch("fit", "--config", tmp_path / "mine.yaml", *flags(**options), paths=[plugin], logs=tmp_path / "logs")
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["status"] == "finished"
    assert record["mixers"] == {"mean": "RunningMean"}
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["model"]["mixers"]["mean"] == {"class_path": "running_mean.RunningMean", "init_args": {"gain": 0.5}}


@pytest.mark.commands
def test_its_training_step_is_timed_by_its_name(plugin, tmp_path, monkeypatch):
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    sizes = {"micro_batch_size": 1, "sequence_length": 16, "steps": 1, "model.n_layers": 1, "model.compile": "false"}
    options = {**sizes, "model.d_model": 16, "model.mixers.mixer.init_args.gain": 0.5}
    done = seqarch("bench", "mixers", "RunningMean", *flags(**options), paths=[plugin], logs=tmp_path / "logs")
    assert done.returncode == 0, done.stderr
    assert "RunningMean                  seqarch  32-true" in done.stdout
    assert (tmp_path / "cache/bench/RunningMean.yaml").is_file()


@pytest.fixture
def listed(monkeypatch, capsys):
    """Runs `seqarch mixers` in this process, with more packages installed: exit status, stdout and stderr."""

    def run(*args, paths):
        for path in paths:
            monkeypatch.syspath_prepend(path)
        with warnings.catch_warnings():
            try:
                cli.main(["mixers", *args])
            except SystemExit as stop:
                return stop.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    yield run
    sys.modules.pop("running_mean", None)


def test_it_is_listed_with_its_package(plugin, listed):
    code, said, errors = listed("--json", paths=[plugin])
    assert code == 0, errors
    mine = {mixer["name"]: mixer for mixer in json.loads(said)}["RunningMean"]
    assert mine == {
        "name": "RunningMean",
        "class": "running_mean:RunningMean",
        "package": "running-mean",
        "version": "0.2",
        "options": {"gain": {"default": 1.0, "required": False, "meaning": ""}},
        "capabilities": [],
        "kernels": {},
        "source": "a test",
        "summary": "The mean of a projection over all tokens so far.",
    }


def test_the_list_says_its_package(plugin, listed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    _, said, _ = listed(paths=[plugin])
    (line,) = [line.split(maxsplit=1) for line in said.splitlines() if line.startswith("RunningMean ")]
    assert line[1] == "The mean of a projection over all tokens so far. (running-mean 0.2)"


def test_broken_plugin_is_named_on_one_line_and_the_others_work(plugin, listed, tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.replace("running-mean", "broken").replace("unningM", "ottenM"))
    text = (tmp_path / "pyproject.toml").read_text().replace("running_mean:", "rotten_mean:")
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "rotten_mean.py").write_text("import no_such_kernel\n")
    (tmp_path / "site").mkdir()
    install(tmp_path, tmp_path / "site")
    _, said, errors = listed("--json", paths=[plugin, tmp_path / "site"])
    names = [mixer["name"] for mixer in json.loads(said)]
    assert "RunningMean" in names
    assert "Attention" in names
    assert "RottenMean" not in names
    assert errors.splitlines() == [
        "seqarch: warning: left out: mixer 'RottenMean' of package broken (rotten_mean:RottenMean) cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_kernel'"
    ]


def test_two_packages_with_one_name_stop_what_uses_it(plugin, listed, tmp_path):
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.replace("running-mean", "other-mean"))
    (tmp_path / "site").mkdir()
    install(tmp_path, tmp_path / "site")
    assert listed(paths=[plugin, tmp_path / "site"])[0] == 0
    code, _, errors = listed("RunningMean", paths=[])
    assert code == 2
    assert errors.startswith("seqarch: error: mixer 'RunningMean' is declared twice, by other-mean (")
    assert "and running-mean (" in errors
    assert len(errors.splitlines()) == 1


def test_an_entry_point_that_names_no_module_leaves_the_list_as_it_is(plugin, listed, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        PYPROJECT.replace("running-mean", "odd").replace("running_mean:", "an odd ")
    )
    (tmp_path / "site").mkdir()
    install(tmp_path, tmp_path / "site")
    code, said, errors = listed(paths=[tmp_path / "site"])
    assert code == 0, errors
    assert {"RunningMean", "Attention"} <= {line.split()[0] for line in said.splitlines() if line}
