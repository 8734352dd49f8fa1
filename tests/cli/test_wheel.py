"""Users of an installed wheel have the recipes by name, by path and as copies, without a checkout."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from seqarch.errors import UserError
from seqarch.experiment.recipes import bundled_recipes, copy_recipe, merged_recipe
from tests import processes
from tests.conftest import TINY, flags

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/plugins.md"
RECIPES = bundled_recipes()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder into which a wheel is installed, laid out as pyproject.toml says."""
    site = tmp_path_factory.mktemp("site")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, site / package)  # with the bytecode, which takes seconds to make
    for source, target in wheel["force-include"].items():
        shutil.copytree(ROOT / source, site / target)
    for metadata in (*ROOT.glob("seqarch-*.dist-info"), *Path(sys.prefix).glob("lib/*/*/seqarch-*.dist-info")):
        shutil.copytree(metadata, site / metadata.name, dirs_exist_ok=True)
    return site


def python(code, cwd, site):
    """Run code as that user does."""
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_recipes_work_by_name_by_path_and_as_copies(site, tmp_path):
    code = """
import seqarch
from seqarch import cli
from seqarch.experiment.recipes import find_recipe, merged_recipe
print(seqarch.__file__)
cli.main(["recipes"])
cli.main(["recipes", "copy", "ablations/mamba1_decay_one"])
cli.main(["recipes", "copy", "quickstart", "mine.yaml"])
for name in ("quickstart", "recipes/quickstart.yaml", "mine.yaml", "mamba1_decay_one.yaml", "mamba2"):
    print(name, merged_recipe(find_recipe(name))["run_dir"])
"""
    said = python(code, tmp_path, site).splitlines()
    assert Path(said[0]).is_relative_to(site)
    assert "quickstart" in {line.partition(" ")[0] for line in said}
    first = said.index("quickstart runs/quickstart/transformer_pp")
    assert said[first : first + 5] == [
        "quickstart runs/quickstart/transformer_pp",
        "recipes/quickstart.yaml runs/quickstart/transformer_pp",
        "mine.yaml runs/quickstart/transformer_pp",
        "mamba1_decay_one.yaml runs/ablations/mamba1_decay_one",
        "mamba2 runs/mamba2_110m",
    ]


@pytest.mark.commands
def test_the_recipe_of_the_tutorial_trains_its_mixer(tmp_path, shards):
    text = TUTORIAL.read_text()
    (tmp_path / "gated_associative.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "gated_associative.yaml").write_text(text.partition("```yaml\n")[2].partition("```")[0])
    (tmp_path / "gated_associative-1.dist-info").mkdir()
    (tmp_path / "gated_associative-1.dist-info/METADATA").write_text("Name: gated_associative\nVersion: 1\n")
    points = "[seqarch.mixers]\nGatedAssociative = gated_associative:GatedAssociative\n"
    (tmp_path / "gated_associative-1.dist-info/entry_points.txt").write_text(points)
    tiny = {**TINY, "data.root": shards, "trainer.max_steps": 1, "model.d_model": 32, "run_dir": "run"}
    args, env = ["fit", "--config", "gated_associative.yaml", *flags(**tiny)], {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = processes.seqarch(args, tmp_path / "logs", env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], *record["mixers"].values()) == ("finished", "GatedAssociative")


KINDS = {
    (name.rpartition("/")[0], yaml.safe_load(path.read_text()).get("extends")): name for name, path in RECIPES.items()
}
"""A recipe of each folder, and each recipe that it extends. A copy names these by another path."""


@pytest.mark.parametrize("name", KINDS.values())
def test_a_copy_is_the_recipe(name, tmp_path):
    path = copy_recipe(name, tmp_path)
    assert path == tmp_path / f"{Path(name).name}.yaml"
    assert merged_recipe(path) == merged_recipe(bundled_recipes()[name])
    assert yaml.safe_load(path.read_text()).keys() == yaml.safe_load(bundled_recipes()[name].read_text()).keys()


def test_a_copy_replaces_nothing(tmp_path):
    copy_recipe("quickstart", tmp_path / "mine.yaml")
    (tmp_path / "mine.yaml").write_text("mine")
    with pytest.raises(UserError, match=r"mine.yaml exists: name a new file"):
        copy_recipe("quickstart", tmp_path / "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    with pytest.raises(UserError, match=r"unknown recipe 'quikstart': did you mean quickstart.*lists all"):
        copy_recipe("quikstart", tmp_path)
