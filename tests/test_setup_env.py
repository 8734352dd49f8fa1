"""`scripts/setup_env.py` with arguments that it must refuse, and the environment that it has made, in which CI runs."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from seqarch.cli.new_mixer import new_mixer

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "setup_env.py"


def refusal(*args: object) -> str:
    command = [sys.executable, SCRIPT, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode
    assert not done.stdout
    return done.stderr


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_files_of_others_are_not_deleted(tmp_path: Path, kind: str) -> None:
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    assert refusal(tmp_path if kind == "folder" else kept).endswith("name another folder\n")
    assert kept.read_text() == "mine"


def test_names_what_it_does_not_know(tmp_path: Path) -> None:
    assert "no extra 'gpus'; the extras are datasets, docs," in refusal(tmp_path / "new", "gpus")
    assert "unrecognized arguments: --gpu" in refusal("--gpu")
    assert not (tmp_path / "new").exists()


def test_the_lowest_versions_contain_one_of_each_package() -> None:
    """With a GPU the lowest Triton says which torch: torch's own lower bound demands a Triton below that of `gpu`."""
    lowest = runpy.run_path(str(SCRIPT))["constraints"]
    without, with_gpu = (
        dict(pin.split("==") for pin in lowest("lowest", extras)) for extras in (["test"], ["test", "gpu"])
    )
    assert (without["torch"], without["triton"]) == ("2.10", "3.6")
    assert with_gpu["triton"] == "3.7.1"
    assert "torch" not in with_gpu
    assert len(lowest("lowest", ["test", "gpu"])) == len(with_gpu)


def test_no_allowed_version_of_datasets_runs_the_script_of_a_data_set() -> None:
    lowest = runpy.run_path(str(SCRIPT))["constraints"]("lowest", ["datasets"])
    assert int(dict(pin.split("==") for pin in lowest)["datasets"].partition(".")[0]) >= 4, "datasets 4.0 dropped them"


def pip(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def demands(folder: Path, *extras: str) -> list[str]:
    """What a package and its extras need, read from its pyproject.toml: building it to ask pip takes a minute."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]


def test_later_installations_keep_torch(tmp_path: Path) -> None:
    """The environment is complete, so nothing that a page tells to install exchanges torch for another build."""
    checked = pip("check")
    assert not checked.returncode, checked.stdout
    written = new_mixer("CausalMean", tmp_path / "mixer")
    packages = [*demands(written[0].parent), *demands(ROOT / "plugins" / "seqarch-zoo"), "lm-eval"]
    packages += demands(ROOT, "eval")
    assert {"seqarch", "lm-eval>=0.4.13"} <= {*packages}
    report = tmp_path / "report.json"
    installed = pip("install", "--dry-run", "--quiet", "--report", report, *packages)
    if re.search("No matching distribution|NewConnectionError|ConnectTimeout", installed.stderr):
        pytest.skip("no package index can be reached")
    assert not installed.returncode, installed.stderr
    names = {package["metadata"]["name"].lower() for package in json.loads(report.read_text())["install"]}
    assert not {name for name in names if re.match("torch|triton|nvidia|cuda", name)}
