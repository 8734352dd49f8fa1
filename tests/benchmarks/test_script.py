"""Scripts that users run with names and files of their own."""

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import lengths, replayed
from seqarch.bench.timing import captured
from seqarch.cli.commands import parse
from seqarch.errors import UserError
from seqarch.tables import read_csv
from tests.pages import check_command

ROOT = Path(__file__).parents[2]
STUB = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$OUT/calls"
mkdir -p "$OUT/recall/small" && echo head > "$OUT/recall/small/mqar.csv"
"""


@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        ("fla_generation", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("published_step", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("step_profile", ["nosuch"], "error: unknown recipe or mixer 'nosuch'"),
        ("step_profile", ["rwkv7", "--size", "nosuch"], "error: there is no file 'exam/nosuch': name a recipe"),
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


@pytest.mark.commands
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_each_point_of_the_recall_curve_has_a_model(tmp_path, monkeypatch):
    stub = tmp_path / "bin/seqarch"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    settings = ["--epochs=16", "--test_every=2", "--rates=[0.001,0.00316,0.01]"]
    environment = {**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}", "PROCESSES": "1"}
    command = ["bash", str(ROOT / "benchmarks/recall_points.sh"), str(tmp_path / "runs"), *settings]
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


def test_points_of_recall_exams_become_a_table(tmp_path, monkeypatch):
    published = read_csv(ROOT / "docs/results/recall/key_conv.csv")
    for row in published:
        options = {"selection": row["selection"], "chunk_size": int(row["chunk_size"])}
        if row["key_conv"] != "0":
            options["key_conv"] = int(row["key_conv"])
        point = {"options": options, "settings": {"seed": int(row["seed"])}, "epochs": int(row["epochs"])}
        point |= {"accuracy": float(row["accuracy"]), "rate": float(row["rate"])}
        folder = tmp_path / "_".join(list(row.values())[:4]) / "recall/tiny"
        folder.mkdir(parents=True)
        (folder / "mqar.json").write_text(json.dumps({"points": [point]}))
    monkeypatch.setattr(sys, "argv", ["key_conv.py", str(tmp_path), str(tmp_path / "made.csv")])
    runpy.run_path(str(ROOT / "benchmarks/key_conv.py"), run_name="__main__")
    assert read_csv(tmp_path / "made.csv") == published


def test_gaps_of_exams_of_several_lengths_become_a_table_and_a_figure(tmp_path, monkeypatch):
    for folder, gap, half in (("small", 0.1, 0.02), ("small-8192", -0.05, None), ("small-2048", 0.0, 0.01)):
        verdict = {
            "candidate": "hybrid",
            "finished": {"budgets": [{}, {"raw": {"value": gap, "half_width": half}}]},
            "final": {"candidate": {"in_domain": 3.1}, "reference": {"in_domain": 3.2}},
        }
        (tmp_path / folder / "hybrid").mkdir(parents=True)
        (tmp_path / folder / "hybrid/verdict.json").write_text(json.dumps(verdict))
    monkeypatch.setattr("sys.argv", ["lengths.py", str(tmp_path), "small", str(tmp_path / "figures")])
    lengths.main()
    found = read_csv(tmp_path / "figures/lengths.csv")
    assert tuple(found[0]) == lengths.HEADER
    assert [(int(row["length"]), float(row["gap"])) for row in found] == [(1024, 0.1), (2048, 0.0), (8192, -0.05)]
    assert "</svg>" in (tmp_path / "figures/lengths.svg").read_text()
    monkeypatch.setattr("sys.argv", ["lengths.py", str(tmp_path), "medium", str(tmp_path / "figures")])
    with pytest.raises(UserError, match="no verdict between finished models"):
        lengths.main()


def test_replaying_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["replayed.py"])
    with pytest.raises(SystemExit):
        replayed.main()
    assert capsys.readouterr().err == "replayed.py needs an NVIDIA GPU, and PyTorch sees none here\n"


@pytest.mark.gpu
def test_a_replayed_graph_gives_what_the_call_gives():
    tensors = replayed.draw(1, 300, 2, 64)
    found = []
    run = replayed.forward_backward(replayed.SELECTIONS["exact"], tensors)
    replay = captured(lambda: found.append(run()))
    replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found[-1], run(), strict=True))
