"""Scripts that users run with names and files of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        ("decode_profile", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("fla_generation", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("published_step", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("step_profile", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("step_profile", ["rwkv7", "--size", "nosuch"], "error: there is no recipe exam/nosuch"),
        ("kernel_tables", ["nosuch.csv"], "error: [Errno 2] No such file or directory: 'nosuch.csv'"),
    ],
)
def test_what_the_user_can_mend_is_said_in_one_line(script, args, said):
    command = [sys.executable, "-m", f"benchmarks.{script}", *args]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr == f"{said}\n"


@pytest.mark.parametrize("script", ["key_conv", "recall_reasons"])
def test_without_arguments_a_script_says_what_it_takes(script):
    command = [sys.executable, ROOT / f"benchmarks/{script}.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1
    assert f"benchmarks/{script}.py RUNS" in found.stderr
    assert "Traceback" not in found.stderr
