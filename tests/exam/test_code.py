"""When code counts as the same code."""

import shutil
import sys

import pytest

from seqarch.exam.derive import load_size, measure
from seqarch.exam.plan import code_digest, digest, own_parts


def test_own_parts_are_there_and_leave_out_what_decides_no_run():
    parts = own_parts()
    assert all(part.exists() for part in parts)
    assert {"kernels", "mixers", "model", "training", "data"} <= {part.name for part in parts}
    assert not {"report", "bench", "exam", "cli"} & {part.name for part in parts}


@pytest.mark.parametrize("changed", ["mixers/mamba2.py", "kernels/ssd/triton.py", "kernels/fla_tuning.json"])
def test_a_changed_file_makes_it_other_code_and_an_untouched_tree_does_not(changed, tmp_path):
    copies = [tmp_path / part.name for part in own_parts() if part.is_dir()]
    for part, copy in zip(own_parts(), copies, strict=False):
        shutil.copytree(part, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest(copies)
    (tmp_path / "kernels/README.md").write_text("not code")
    (tmp_path / "mixers/__pycache__").mkdir()
    (tmp_path / "mixers/__pycache__/base.pyc").write_text("not source")
    assert digest(copies) == before == digest([part for part in own_parts() if part.is_dir()])
    with (tmp_path / changed).open("a") as file:
        file.write(" ")
    assert digest(copies) != before


def test_a_file_under_another_name_makes_it_other_code(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    before = digest([tmp_path])
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert digest([tmp_path]) != before


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module outside of seqarch with a mixer and a callback."""
    (tmp_path / "other_mixer.py").write_text(
        "from lightning import Callback\nfrom seqarch.mixers.attention import Attention\n\n\n"
        "class Elsewhere(Attention): ...\n\n\nclass Beside(Callback): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "other_mixer.py"
    sys.modules.pop("other_mixer", None)


def test_the_package_of_a_mixer_counts_as_well(package):
    recipe = load_size("tiny", {}).recipe
    assert measure("reference", recipe).packages == set()
    recipe["model"]["mixers"] = {"a": {"class_path": "other_mixer.Elsewhere", "init_args": {"n_heads": 4}}}
    packages = measure("candidate", recipe, ["other_mixer"]).packages
    assert packages == {"other_mixer"}
    before = code_digest(packages)
    assert before == code_digest(packages) != code_digest(())
    package.write_text(package.read_text() + "\n# changed\n")
    assert code_digest(packages) != before


def test_the_package_of_a_callback_counts_too_and_lightning_does_not(package):
    recipe = load_size("tiny", {}).recipe
    recipe["trainer"]["callbacks"] = [{"class_path": "other_mixer.Beside"}, {"class_path": "ModelSummary"}]
    assert measure("candidate", recipe, ["other_mixer"]).packages == {"other_mixer"}
