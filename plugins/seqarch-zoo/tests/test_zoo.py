"""What `seqarch mixers new` writes for one mixer is here for each of the package; seqarch names none of them."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import seqarch
from seqarch.cli.new_mixer import FILES

ZOO = Path(__file__).parents[1]
SEQARCH = Path(seqarch.__file__).parent
GROUPS = tomllib.loads((ZOO / "pyproject.toml").read_text())["project"]["entry-points"]
ENTRIES = {name: target for group in GROUPS.values() for name, target in group.items()}
MODULES = sorted({target.partition(":")[0].rpartition(".")[2] for target in ENTRIES.values()})


@pytest.mark.parametrize("module", MODULES)
def test_each_has_the_files_of_the_skeleton(module):
    names = {name.replace("$module", module) for name in FILES if "$module" in name} | {f"{module}.md"}
    there = {path.name for folder in ("seqarch_zoo", "tests", "recipes", "pages") for path in (ZOO / folder).iterdir()}
    assert names <= there


def test_each_is_named_as_its_class_and_in_the_readme():
    readme = (ZOO / "README.md").read_text()
    for name, target in ENTRIES.items():
        assert target.endswith(f":{name}")
        assert f"`{name}`" in readme


def test_seqarch_names_none_of_them():
    own = {"Mamba3"}  # also a layer of fla, which seqarch's benchmarks may name
    words = re.compile(rf"\b({'|'.join(ENTRIES.keys() - own)}|seqarch_zoo)\b")
    for path in (path for path in SEQARCH.rglob("*") if path.suffix in (".py", ".json", ".template")):
        assert not words.search(path.read_text()), f"{path} names a mixer of the zoo"


@pytest.fixture
def site(tmp_path):
    """The installed package with one module that cannot be imported."""
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", tmp_path]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, ZOO], check=True)
    (tmp_path / "seqarch_zoo" / "mlstm.py").write_text("import no_such_kernel\n")
    return tmp_path


def test_an_import_error_in_one_leaves_the_others(site):
    paths = os.pathsep.join(map(str, (site, SEQARCH.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "seqarch", "mixers"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {line.partition(":")[0] for line in done.stdout.splitlines() if line and not line.startswith(" ")}
    assert GROUPS["seqarch.mixers"].keys() - listed == {"MLSTM"}
    assert "Attention" in listed
    assert "mixer 'MLSTM' of package seqarch-zoo (seqarch_zoo.mlstm:MLSTM) cannot be imported" in done.stderr
