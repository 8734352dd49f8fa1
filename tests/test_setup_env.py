"""`scripts/setup_env.py` with arguments that it must refuse, and the environment that it has made, in which CI runs."""

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from seqarch.cli.new_mixer import new_mixer

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "setup_env.py"


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the script with arguments that it refuses; returns its line, or what its parser printed."""

    def run(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, args)])
        with contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit) as stop:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return printed.getvalue() or str(stop.value.code)

    return run


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_files_of_others_are_not_deleted(refusal, tmp_path: Path, kind: str) -> None:
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    assert refusal(tmp_path if kind == "folder" else kept).endswith("name another folder")
    assert kept.read_text() == "mine"


def test_names_what_it_does_not_know(refusal, tmp_path: Path) -> None:
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


@pytest.mark.commands
def test_the_environment_is_complete() -> None:
    checked = pip("check")
    assert not checked.returncode, checked.stdout


@pytest.mark.slow  # pip asks the package index
def test_later_installations_keep_torch(tmp_path: Path) -> None:
    """Nothing that a page tells to install exchanges torch for another build."""
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
