"""`seqarch mixers new`: the package installs, its suite passes, it trains and takes an exam."""

import json
import os
import re
from pathlib import Path

import pytest

from seqarch.cli.new_mixer import new_mixer
from seqarch.errors import UserError
from tests import processes
from tests.conftest import flags

pytestmark = pytest.mark.commands

ROOT = Path(__file__).parents[2]
NAMES = {"GatedMean": ("gated_mean", "gated-mean"), "RNNTop2": ("rnn_top2", "rnn-top2")}


def run(module, *args, cwd, site=None):
    env = {"PYTHONPATH": os.pathsep.join(str(path) for path in (site, ROOT) if path)}
    done = processes.seqarch([*map(str, args)], cwd / "logs", env, cwd=cwd, module=module)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The folder that the command writes."""
    folder = tmp_path_factory.mktemp("new")
    said = run("seqarch", "mixers", "new", "GatedMean", cwd=folder)
    names = {"pyproject.toml", "README.md", "gated_mean.py", "test_gated_mean.py", "gated_mean.yaml"}
    *wrote, following = said.splitlines()
    assert {line.removeprefix("wrote ") for line in wrote} == {f"gated-mean/{name}" for name in names}
    assert following == "next: cd gated-mean; pip install -e '.[test]'; python -m pytest"
    return folder / "gated-mean"


@pytest.fixture(scope="module")
def site(package, tmp_path_factory):
    """The folder into which pip installs the package, without a network."""
    site = tmp_path_factory.mktemp("site")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", site)
    run("pip", "install", *offline, package, cwd=package)
    return site


def test_its_suite_passes_and_names_what_is_absent(package, site):
    said = run("pytest", "-q", "-rs", "-p", "no:cacheprovider", package, cwd=package, site=site)
    assert " passed" in said
    assert "GatedMean defines no flops_per_token" in said


def test_it_is_listed_and_its_operations_are_marked_as_counted(package, site):
    said = "".join(run("seqarch", "mixers", *options, cwd=package, site=site) for options in ((), ("--costs",)))
    assert re.search("^GatedMean +A running mean of projected tokens", said, re.MULTILINE)
    (row,) = [line for line in said.splitlines() if line.startswith("| GatedMean ")]
    assert row.split("|")[3].strip() == f"{2 * 3 * 768**2 / 1e6:.1f} (counted)"


FEW = {"trainer.max_steps": 2, "model.warmup_steps": 1, "data.eval_tokens": 257, "data.num_workers": 0}
SMALL = {**FEW, "data.sequence_length": 32, "data.sequences_per_step": 2, "ood_loss.every_n_steps": 2}


def test_it_trains(package, site):
    run("seqarch", "fit", "--config", "gated_mean.yaml", *flags(**SMALL), cwd=package, site=site)
    record = json.loads((package / "runs/gated_mean/run.json").read_text())
    assert record["status"] == "finished"
    assert record["families"] == {"gated_mean": "GatedMean"}
    assert record["flops_counted"]


@pytest.mark.slow
def test_it_takes_an_exam(package, site):
    exam = ("exam", "--mixer", "GatedMean", "--seeds", 1, "--out", "exam")
    steps = {"trainer.max_steps": 8}  # a branch of half of them leaves after the warm-up
    said = run("seqarch", *exam, *flags(**{**SMALL, **steps}), cwd=package, site=site)
    assert "GatedMean" in said
    assert "GatedMean" in (package / "exam/tiny/GatedMean/index.html").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_names_of_files_follow_the_class(name, tmp_path):
    module, package = NAMES[name]
    written = new_mixer(name, tmp_path / package)
    assert tmp_path / package / f"{module}.py" in written
    assert f'name = "{package}"' in (tmp_path / package / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gated mean", "is not a name for a class: write it as in RunningMean"),
        ("minGRU", "is not a name for a class: write it as in MinGRU"),
        ("gatedMean", "is not a name"),
        ("None", "write it as in RunningMean"),
        ("Mixer", "is not a name"),
        ("Mamba2", "a mixer Mamba2 already"),
        ("Torch", "would be torch, which Python has already"),
        ("Lambda", "would be lambda, which Python has already"),
    ],
)
def test_wrong_names_are_refused(name, message, tmp_path):
    with pytest.raises(UserError, match=message):
        new_mixer(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(UserError, match="exists: name a new folder"):
        new_mixer("GatedMean", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
