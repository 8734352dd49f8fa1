"""`seqarch bench kernels`: what is chosen, refused, printed and written; the kernels themselves need a GPU."""

import csv
import pkgutil

import pytest
import torch

from seqarch import cli
from seqarch.bench.kernels import COLUMNS, STEPS, line, run_steps
from seqarch.bench.rows import Table, versions
from seqarch.errors import UserError

ROW = {"name": "exact fwd+bwd", "B": 1, "T": 102400, "H": 12, "D": 64, "p20": 10.1, "p50": 10.4, "p80": 10.9}


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["kernels", "tme"], "unknown step 'tme': did you mean time?"),
        (["kernls"], "unknown command 'kernls': did you mean kernels?"),
        ([], "missing command: expected kernels"),
    ],
)
def test_wrong_command_lines_are_one_line(capsys, args, said):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *args])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "kernels", "time"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "seqarch: error: bench kernels needs an NVIDIA GPU, and PyTorch sees none here\n"
    )


def test_help_names_every_step(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "kernels", "--help"])
    said = capsys.readouterr().out
    assert all(f"{name}:" in said for name in STEPS)


def test_rows_are_written_as_they_come(tmp_path, capsys):
    path = tmp_path / "rows.csv"

    def rows():
        yield ROW
        assert [row["name"] for row in read(path)] == ["exact fwd+bwd"]
        yield {"name": "first call, exact", "p50": 2.5, "unit": "s", "note": "cold"}

    run_steps({"time": rows()}, Table(COLUMNS, path, line))
    first, second = read(path)
    assert list(first) == [*versions(), *COLUMNS, "note"]
    assert first["torch"] == torch.__version__
    assert (first["step"], first["p50"], first["note"]) == ("time", "10.4", "")
    assert (second["unit"], second["note"]) == ("s", "cold")
    assert "exact fwd+bwd" in capsys.readouterr().out


def test_a_failed_check_ends_the_run(tmp_path):
    started = []

    def rows():
        started.append(1)
        yield ROW

    path = tmp_path / "rows.csv"
    with pytest.raises(SystemExit, match="1 of 2 checks failed"):
        run_steps({"check": iter([True, False]), "time": rows()}, Table(COLUMNS, path))
    assert not started
    assert not path.exists()


def test_checks_that_hold_are_counted_in_a_row(tmp_path, capsys):
    run_steps({"check": iter([True, True])}, Table(COLUMNS, tmp_path / "rows.csv", line))
    (row,) = read(tmp_path / "rows.csv")
    assert (row["step"], row["name"], row["p50"], row["unit"]) == ("check", "checks", "2", "passed")
    assert "2.000 passed" in capsys.readouterr().out


def test_csv_in_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        Table(COLUMNS, tmp_path / "nowhere" / "rows.csv")


def test_csv_that_cannot_be_written_is_refused_before_a_row_takes_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)  # root may write anywhere
    with pytest.raises(UserError, match="cannot be written here: choose another place"):
        Table(COLUMNS, tmp_path / "rows.csv")


def test_a_line_holds_shape_time_and_ratio():
    assert line({**ROW, "unit": "ms", "peak_mib": 36.4, "times_dense": 12.75}).split() == [
        *("exact", "fwd+bwd", "B=1", "T=102400", "H=12", "D=64", "10.400", "ms", "[10.100,", "10.900]"),
        *("+36", "MiB", "12.8", "x", "dense"),
    ]


def test_limits_are_rates(monkeypatch):
    times = pytest.importorskip("seqarch.bench.kernels_time")

    found, took = [], iter([2.0, 0.5])

    def measure(name, run):
        found.append(run())
        return {"name": name, "p50": next(took), "unit": "ms"}

    monkeypatch.setattr(times, "measure", measure)
    product, copy = times.limits(size=64, device="cpu")
    assert (product["name"], product["unit"], copy["unit"]) == ("bf16 product, 64^3", "TFLOP/s", "TB/s")
    assert product["p50"] == pytest.approx(2 * 64**3 / 2e-3 / 1e12)
    assert copy["p50"] == pytest.approx(2 * (8 * 64 * 64 * 2) / 0.5e-3 / 1e12)
    assert [each.shape for each in found] == [(64, 64), (512, 64)]
    assert "TB/s" in line(copy)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_every_step_exists(step):
    pytest.importorskip("triton")
    assert callable(pkgutil.resolve_name(f"seqarch.bench.{step.function}"))
