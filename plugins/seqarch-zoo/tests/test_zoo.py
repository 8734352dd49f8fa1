"""Each mixer of the package has the files that `seqarch mixers new` writes. seqarch itself names no mixer of it."""

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import seqarch
from seqarch import Experiment
from seqarch.cli.mixers import cost_table
from seqarch.cli.new_mixer import FILES, new_mixer
from seqarch.errors import UserError
from seqarch.model.roles import kinds_of

ZOO = Path(__file__).parents[1]
SEQARCH = Path(seqarch.__file__).parent
GROUPS = tomllib.loads((ZOO / "pyproject.toml").read_text())["project"]["entry-points"]
ENTRIES = {name: target for group in GROUPS.values() for name, target in group.items()}
MODULES = sorted({target.partition(":")[0].rpartition(".")[2] for target in ENTRIES.values()})
FACTS = {
    "seqarch_zoo/{}.py": (
        r'\A"""[^"]+"""\n\nfrom __future__ import annotations\n',
        r"\n    Args:\n        \w+: ",
        r'\n    source: ClassVar\[str\] = "',
        r"\n    kernels: ClassVar\[Mapping\[str, str\]\] = |\n    ops: ClassVar\[tuple\[str, \.\.\.\]\] = ",
    ),
    "tests/test_{}.py": (
        r'\A"""[^"]+ keeps? the contract[^"]+"""\n',
        r"\nfrom seqarch\.testing import MixerSuite\n",
        r"\nclass Test\w+\(MixerSuite\):\n    mixer = \w+\n    options: ClassVar = \[",
        r"\ndef test_\w+\(",
    ),
    "pages/{}.md": (r"\A# \w+", r"\n\| CPU", r"\n\| operations per token \| ", r"\n\| state \| ", r"\n\| parity \| "),
}
"""What each file of a mixer contains, here and in the skeleton."""


@pytest.mark.parametrize("module", MODULES)
def test_each_has_the_files_of_the_skeleton(module):
    names = {name.replace("$module", module) for name in FILES if "$module" in name} | {f"{module}.md"}
    there = {path.name for folder in ("seqarch_zoo", "tests", "recipes", "pages") for path in (ZOO / folder).iterdir()}
    assert names <= there


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory):
    """The package that `seqarch mixers new` writes; its page is its README."""
    folder = tmp_path_factory.mktemp("skeleton") / "probe"
    new_mixer("ProbeMixer", folder)
    return folder


def mixer_modules():
    return sorted({target.partition(":")[0].rpartition(".")[2] for target in GROUPS["seqarch.mixers"].values()})


@pytest.mark.parametrize("file", FACTS)
def test_the_files_have_the_same_facts(file, skeleton):
    name = Path(file.format("probe_mixer")).name
    files = [ZOO / file.format(module) for module in mixer_modules()]
    for path in (skeleton / ("README.md" if name == "probe_mixer.md" else name), *files):
        for fact in FACTS[file]:
            assert re.search(fact, path.read_text()), f"{path} lacks {fact}"


def test_the_recipes_differ_in_the_mixer_only(skeleton):
    def recipe(path):
        text = path.read_text()
        assert re.match(r"# \w+ with \d\.\dM parameters on the embedded corpus, bytes: ", text), path
        found = yaml.safe_load(text)
        assert found.pop("run_dir") == f"runs/{path.stem}"
        assert list(found["model"].pop("mixers")) == [path.stem]
        if path.stem != "mlstm":  # a whole block, so without a feed-forward layer
            assert found["model"].pop("feed_forward") == "GeGLU"
        return found

    expected = recipe(skeleton / "probe_mixer.yaml")
    for module in mixer_modules():
        assert recipe(ZOO / "recipes" / f"{module}.yaml") == expected


def test_the_skeleton_declares_what_the_package_declares(skeleton):
    theirs, own = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (skeleton, ZOO))
    assert theirs["build-system"] == own["build-system"]
    assert own["tool"]["pytest"]["ini_options"] == {"testpaths": ["tests"], **theirs["tool"]["pytest"]["ini_options"]}
    assert own["project"].keys() - theirs["project"].keys() == {"license", "license-files"}
    for key in ("requires-python", "readme", "dependencies"):
        assert theirs["project"][key] == own["project"][key]
    assert theirs["project"]["optional-dependencies"].items() <= own["project"]["optional-dependencies"].items()
    assert theirs["project"]["entry-points"] == {"seqarch.mixers": {"ProbeMixer": "probe_mixer:ProbeMixer"}}


def test_each_is_named_as_its_class_and_in_the_readme():
    readme = (ZOO / "README.md").read_text()
    for name, target in ENTRIES.items():
        assert target.endswith(f":{name}")
        assert f"`{name}`" in readme


def test_the_readme_has_the_costs_of_the_classes():
    assert cost_table(names=GROUPS["seqarch.mixers"]) in (ZOO / "README.md").read_text(encoding="utf-8")


def test_a_class_that_lacks_methods_is_no_mixer():
    for path in (ZOO / "seqarch_zoo").glob("*.py"):
        assert "raise NotImplementedError" not in path.read_text(), f"{path} has a method that is not an abstract one"
    named = {module: importlib.import_module(f"seqarch_zoo.{module}") for module in MODULES}
    kinds = [each for module in named.values() for each in vars(module).values() if inspect.isabstract(each)]
    own = {each for each in kinds if each.__module__.startswith("seqarch_zoo.")}
    assert own
    for each in own:
        mixers = f"--model.mixers={{a: {each.__module__}.{each.__name__}}}"
        with pytest.raises(UserError, match=f"{each.__name__} is a base class without .*: expected "):
            Experiment(["--config", "quickstart", mixers])


@pytest.mark.parametrize("name", ["GatedAssociative", "KimiDeltaAttention", "MLSTM", "MesaNet"])
def test_a_convolution_of_one_token_is_refused_by_the_option_of_the_mixer(name):
    kind: Any = getattr(importlib.import_module(ENTRIES[name].partition(":")[0]), name)
    heads = {} if name == "GatedAssociative" else {"n_heads": 2}
    with pytest.raises(UserError, match="conv_size must be at least 2, not 1"):
        kind(16, 0, 2, conv_size=1, **heads)


@pytest.mark.parametrize(
    ("name", "options", "fused"),
    [
        ("MesaNet", {"n_heads": 2}, {"steps": (2, 2)}),
        ("MLSTM", {"n_heads": 2}, {"gates": (2, 2)}),
        ("S4D", {}, {"out": (16, 16)}),
        ("SeqPE", {"head_dim": 8, "width": 12}, {"out": (32, 16), "layers.0.qkv": (12, 12, 12)}),
    ],
)
def test_projections_that_share_a_layer_are_several_matrices(name, options, fused):
    kind: Any = getattr(importlib.import_module(ENTRIES[name].partition(":")[0]), name)
    kinds = kinds_of(kind(*((4, 2) if name == "SeqPE" else (16, 0, 2)), **options))
    assert {layer: kinds[f"{layer}.weight"].heights for layer in fused} == fused


def test_seqarch_names_none_of_them():
    words = re.compile(rf"\b({'|'.join(ENTRIES)}|seqarch.zoo)\b")
    files = [path for path in SEQARCH.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {".py", ".template", ".csv", ".md"} <= {path.suffix for path in files}
    for path in files:
        assert not words.search(path.read_text()), f"{path} names a part of the zoo"


@pytest.fixture
def site(tmp_path):
    """The installed package with one module that cannot be imported.

    It is built from a copy: two builds in one folder at the same time would delete each other's files.
    """
    source = shutil.copytree(ZOO, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    target = tmp_path / "site"
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, source], check=True)
    (target / "seqarch_zoo" / "mlstm.py").write_text("import no_such_kernel\n")
    return target


@pytest.mark.parametrize(("recipe", "part"), [("seqpe", "position 'SeqPE'"), ("mlstm", "mixer 'MLSTM'")])
def test_a_recipe_with_a_broken_part_says_what_is_wrong_with_it(site, recipe, part):
    (site / "seqarch_zoo" / "seqpe.py").write_text("import no_such_kernel\n")
    done = subprocess.run(
        [sys.executable, "-m", "seqarch", "fit", "--config", ZOO / "recipes" / f"{recipe}.yaml"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, SEQARCH.parent)))},
        capture_output=True,
        text=True,
        check=False,
        cwd=site,
    )
    assert done.returncode == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith("seqarch: error: ")
    assert f"{part} of package seqarch-zoo (seqarch_zoo.{recipe}:" in error
    assert error.endswith("cannot be imported: ModuleNotFoundError: No module named 'no_such_kernel'")


def test_an_import_error_in_one_leaves_the_others(site):
    paths = os.pathsep.join(map(str, (site, SEQARCH.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "seqarch", "mixers", "--json"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = {mixer["name"] for mixer in json.loads(done.stdout)}
    assert GROUPS["seqarch.mixers"].keys() - listed == {"MLSTM"}
    assert "Attention" in listed
    assert "mixer 'MLSTM' of package seqarch-zoo (seqarch_zoo.mlstm:MLSTM) cannot be imported" in done.stderr
