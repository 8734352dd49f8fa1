"""The script reads the points of recall exams."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs/results/recall/key_conv.csv"


def test_the_script_reads_the_points_of_exams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for row in read_csv(PUBLISHED):
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
    assert read_csv(tmp_path / "made.csv") == read_csv(PUBLISHED)
