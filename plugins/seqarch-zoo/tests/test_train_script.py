"""The script that times the zoo's mixers trains one and writes its row."""

import csv
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks/train.py"


def test_a_row_for_each_mixer(tmp_path, monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    main = script["main"]
    main.__globals__.update(WIDTH=16, LAYERS=1, ROWS=2, LENGTH=16, STEPS=4)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "rows.csv"), "MLSTM", "S4D", "NoSuch"])
    main()
    *rows, unknown = csv.DictReader((tmp_path / "rows.csv").open())
    assert [row["mixer"] for row in rows] == ["MLSTM", "S4D"]
    assert all(float(row["loss_first"]) > 4 and not row["error"] for row in rows)
    assert unknown["error"]
