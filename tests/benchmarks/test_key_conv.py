"""The table of a convolution of the keys is that of its CSV file, which the script makes from recall exams."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.key_conv import points, table
from seqarch.tables import markdown, read_csv

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs/results/recall/key_conv.csv"


def test_the_page_has_the_table_of_the_csv():
    rows = read_csv(PUBLISHED)
    assert len({tuple(row.values())[:4] for row in rows}) == len(rows) == 18
    assert "\n".join(markdown(list(table(rows)))) in (ROOT / "docs/results/README.md").read_text(encoding="utf-8")


def test_the_script_reads_the_points_of_exams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for row in read_csv(PUBLISHED):
        options = {"selection": row["selection"], "chunk_size": int(row["chunk_size"])}
        if row["key_conv"] != "0":
            options["key_conv"] = int(row["key_conv"])
        point = {"options": options, "settings": {"seed": int(row["seed"])}, "epochs": int(row["epochs"])}
        point |= {"accuracy": float(row["accuracy"]), "rate": float(row["rate"])}
        folder = tmp_path / "_".join(list(row.values())[:4]) / "recall/tiny"
        folder.mkdir(parents=True)
        (folder / "mqar.json").write_text(json.dumps({"points": [point]}))
    assert len(points(tmp_path)) == 18
    monkeypatch.setattr(sys, "argv", ["key_conv.py", str(tmp_path), str(tmp_path / "made.csv")])
    runpy.run_path(str(ROOT / "benchmarks/key_conv.py"), run_name="__main__")
    assert read_csv(tmp_path / "made.csv") == read_csv(PUBLISHED)
    assert capsys.readouterr().out.startswith("| selection   | chunk size |")
