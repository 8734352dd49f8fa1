"""Scripts of pages that start other programs, at a size of seconds."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from seqarch.cli.commands import parse
from tests.pages import check_command

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
STUB = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$OUT/calls"
mkdir -p "$OUT/recall/small" && echo head > "$OUT/recall/small/mqar.csv"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_each_point_of_the_recall_curve_has_a_model(tmp_path, monkeypatch):
    stub = tmp_path / "bin/seqarch"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    settings = ["--epochs=16", "--test_every=2", "--rates=[0.001,0.00316,0.01]"]
    environment = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}", "PROCESSES": "1"}
    command = ["bash", str(SCRIPTS / "recall_points.sh"), str(tmp_path / "runs"), *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "head\n", done.stdout
    calls = [line.split() for line in (tmp_path / "runs/calls").read_text().splitlines()]
    assert len(calls) == len({*map(tuple, calls)}) > 20
    mixers = set()
    for name, *args in calls:
        options = parse(name, args)
        if tuple(options.mixer) not in mixers:
            with monkeypatch.context() as patch:
                check_command(name, options, patch)
        mixers.add(tuple(options.mixer))
    assert len(mixers) > 10
