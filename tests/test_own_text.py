"""The commands of docs/own_text.md, as typed: own text, two processes, kill, resume, train on, evaluate, generate."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seqarch.runs.curves import read_rows
from seqarch.runs.folder import read_record
from tests import processes
from tests.conftest import wait_for
from tests.test_docs import FILE_NAME, blocks

pytestmark = pytest.mark.commands

PAGE = Path(__file__).parents[1] / "docs/own_text.md"
DEADLINE = 600.0
"""Seconds for a command."""
KILL = re.compile(
    r"seqarch (.*) > first\.log 2>&1 &\n"
    r"until test -e (\S+) \|\| ! kill -0 \$!; do sleep 0\.1; done\nkill -KILL \$!\n"
)
"""A run that a shell kills after its first checkpoint."""
WANDB = "{class_path: WandbLogger, init_args: {project: own, offline: true}}"
CSV = "{class_path: CSVLogger, init_args: {save_dir: csv}}"


def run(script: str, folder: Path) -> str:
    """What a shell prints that runs a script and stops at the first error; it and its children end in time."""
    python = shlex.quote(sys.executable)
    script = re.sub(r"^python ", f"{python} ", script, flags=re.MULTILINE)
    script = re.sub(r"^seqarch ", f"{python} -m seqarch ", script, flags=re.MULTILINE)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    shell = subprocess.Popen(
        ["bash", "-ec", script],
        cwd=folder,
        env=env,
        text=True,
        stdout=-1,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said = shell.communicate(timeout=DEADLINE)[0]
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, said
    return said


def typed(block: str, folder: Path, in_a_shell: bool) -> str:
    """What the commands of a block print; a shell runs what is more than `seqarch ...`, and the run that is killed."""
    if not in_a_shell and (kill := KILL.fullmatch(block)):
        return killed(shlex.split(kill[1]), folder / kill[2], folder)
    lines = [shlex.split(line) for line in block.splitlines()]
    if "kill" in block or any(words[0] != "seqarch" for words in lines[1:]):
        return run(block, folder)
    said = "" if lines[0][0] == "seqarch" else run(shlex.join(lines.pop(0)), folder)
    for words in lines:
        done = processes.seqarch(words[1:], folder / "logs", {"HOME": str(folder)}, timeout=DEADLINE, cwd=folder)
        said += done.stdout + done.stderr
        assert done.returncode == 0, said
    return said


def killed(words: list[str], checkpoint: Path, folder: Path) -> str:
    """Start a run and kill it after its checkpoint, as the page does in a shell."""
    process = processes._start(words, folder / "logs", {**os.environ, "HOME": str(folder)}, folder)
    try:
        wait_for(lambda: checkpoint.exists() or not process.is_alive())
    finally:
        process.kill()
    done = processes._end(process, folder / "logs")
    assert done.returncode == -signal.SIGKILL, done.stderr
    return ""


@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one process", "as typed, in two processes"]
)
def test_the_whole_way_runs(tmp_path, devices):
    """In two processes each command would import PyTorch once more: Lightning starts the second."""
    text = PAGE.read_text(encoding="utf-8")
    for language in ("python", "yaml"):
        for name, body in re.findall(FILE_NAME + rf"\n```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            (tmp_path / name).write_text(body)
    wandb = importlib.util.find_spec("wandb") is not None
    recipe = (tmp_path / "own.yaml").read_text()
    assert WANDB in recipe
    assert "devices: 2" in recipe
    recipe = recipe.replace("devices: 2", f"devices: {devices}")
    (tmp_path / "own.yaml").write_text(recipe if wandb else recipe.replace(WANDB, CSV))
    install, *commands = blocks(PAGE, "bash")
    assert install.startswith("pip install")
    said = "".join(typed(block, tmp_path, devices == 2) for block in commands)
    assert f"steps 10 to 30, {devices} x" in said
    assert f"steps 30 to 60, {devices} x" in said
    assert "The for statement" in said
    own, longer = (tmp_path / "runs" / name for name in ("own", "longer"))
    assert [read_record(each)["status"] for each in (own, longer)] == ["finished", "finished"]
    losses = [
        float(row["loss/in_domain/help"]) for row in read_rows(longer / "curves.csv")[1] if row["loss/in_domain/help"]
    ]
    assert losses[-1] < losses[0]
    (result,) = longer.glob("evaluations/step_00000060/BitsPerByte.json")
    assert json.loads(result.read_text())
    if wandb:
        ids = {path.stem.removeprefix("run-") for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}
        assert ids == {each["Wandb"] for each in (read_record(run)["loggers"] for run in (own, longer))}
        assert len(ids) == 2
