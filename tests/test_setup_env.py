"""`scripts/setup_env.py` with arguments that it must refuse. CI makes its own environment with the script."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup_env.py"


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
    assert "no extra 'gpus'; the extras are completion, docs," in refusal(tmp_path / "new", "gpus")
    assert "unrecognized arguments: --gpu" in refusal("--gpu")
    assert not (tmp_path / "new").exists()
