"""Scripts that users run with names and files of their own."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        ("fla_generation", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("published_step", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("step_profile", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("step_profile", ["rwkv7", "--size", "nosuch"], "error: there is no recipe 'exam/nosuch'"),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line(script, args, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *args])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")
    assert stop.value.code == said  # printed to stderr; the exit code is 1


SCRIPTS = [
    path
    for pattern in ("benchmarks/*.py", "benchmarks/*/__main__.py", "scripts/*.py", "plugins/*/benchmarks/*.py")
    for path in sorted(ROOT.glob(pattern))
    if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_script_starts_and_says_what_it_takes(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parents[1]))
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out if stop.value.code in (None, 0) else str(stop.value.code)
    assert (script.parent.name if script.stem == "__main__" else script.stem) in said


def test_no_script_has_the_name_of_a_package():
    """The folder of a script comes first where Python looks for packages, so the others would import it instead."""
    names = [path.stem for path in ROOT.glob("benchmarks/*.py")]
    assert [name for name in names if importlib.util.find_spec(name)] == []


@pytest.mark.parametrize("script", sorted(ROOT.glob("benchmarks/*.sh")), ids=lambda path: path.name)
def test_a_shell_script_without_arguments_says_what_it_takes(script):
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "usage: " in done.stderr
