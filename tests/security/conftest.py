"""Hostile files, and a command that must refuse them without running anything."""

from pathlib import Path

import pytest
import torch

from seqarch import cli
from tests.conftest import MODEL, TINY, flags

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.yaml"
TRAP = """\
from pathlib import Path
from lightning.pytorch import Callback

Path("PWN").touch()


class Trap(Callback): ...
"""
CALLS = [
    {"class_path": "os.system", "init_args": {"command": "touch PWN"}},
    {"class_path": "os.system", "dict_kwargs": {"command": "touch PWN"}},
    {"class_path": "subprocess.getoutput", "init_args": {"cmd": "touch PWN"}},
    {"class_path": "os.makedirs", "init_args": {"name": "PWN"}},
    {"class_path": "os.abort"},
    {"class_path": "trap.Trap"},
    {"class_path": "seqarch.cli.main", "init_args": {"args": ["mixers"]}},
    {"class_path": "seqarch.training.callbacks.checkpoint.os.makedirs", "init_args": {"name": "PWN"}},
    "os.abort",
    "trap.Trap",
    "seqarch.cli.main",
]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def refused(capfd, tmp_path, monkeypatch):
    """Runs a command in a folder whose module leaves a trace. It must be refused in one line, without a trace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(TRAP)

    def run(*args):
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main([str(arg) for arg in args])
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("seqarch: ")]
        assert stop.value.code == 2, lines
        assert len(lines) == 1, lines
        assert len(lines[0]) < 700
        assert not Path("PWN").exists()
        return lines[0].removeprefix("seqarch: error: ")

    return run


@pytest.fixture(scope="session")
def trained(shards, tmp_path_factory):
    """A run folder with a checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.experiment.experiment.outcome", str)
        cli.run(["fit", *flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": folder, "trainer.max_steps": 1})])
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path):
    """Writes a checkpoint that differs from a good one."""

    def write(change):
        (good,) = (trained / "checkpoints").glob("*.ckpt")
        content = torch.load(good, weights_only=True)
        change(content)
        torch.save(content, tmp_path / "evil.ckpt")
        return tmp_path / "evil.ckpt"

    return write


def said_of(call, said):
    """Whether a refusal says what is wrong with the call."""
    name = call if isinstance(call, str) else call["class_path"]
    if name.startswith("seqarch."):
        return f"'{name}' is a function, not a class" in said or f"there is no class {name}" in said
    return f"'{name}' belongs neither to seqarch nor" in said
