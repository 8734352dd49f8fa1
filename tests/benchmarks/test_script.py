"""Scripts that users run with names and files of their own."""

import runpy
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
        ("step_profile", ["rwkv7", "--size", "nosuch"], "error: there is no recipe exam/nosuch"),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line(script, args, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *args])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(f"benchmarks.{script}", run_name="__main__")
    assert stop.value.code == said  # printed to stderr; the exit code is 1


@pytest.mark.parametrize("script", ["key_conv", "recall_reasons"])
def test_without_arguments_a_script_says_what_it_takes(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / f"benchmarks/{script}.py"), run_name="__main__")
    assert f"benchmarks/{script}.py RUNS" in str(stop.value.code)
