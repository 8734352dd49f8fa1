"""`seqarch bench kernels`: what is chosen, refused, printed and written; the kernels themselves need a GPU."""

import csv
import pkgutil

import pytest
import torch

from benchmarks.kernels.__main__ import STEPS as ALL_STEPS
from seqarch import cli
from seqarch.bench import kernels
from seqarch.bench.jobs import Table, versions
from seqarch.bench.kernels import COLUMNS, STEPS, Step, bench_kernels, line

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


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.mark.usefixtures("on_a_gpu")
def test_rows_are_written_as_they_come_in_the_order_of_the_steps(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.csv"

    def rows():
        yield ROW
        assert [row["name"] for row in read(path)] == ["exact fwd+bwd"]
        yield {"name": "first call, exact", "p50": 2.5, "unit": "s", "note": "cold"}

    monkeypatch.setattr(kernels, "rows", rows, raising=False)
    step = Step("seqarch.bench.kernels:rows", "")
    bench_kernels(["time"], path, {"limits": step, "time": step})
    first, second = read(path)
    assert list(first) == [*versions(), *COLUMNS, "note"]
    assert first["torch"] == torch.__version__
    assert (first["step"], first["p50"], first["note"]) == ("time", "10.4", "")
    assert (second["unit"], second["note"]) == ("s", "cold")
    assert "exact fwd+bwd" in capsys.readouterr().out


def test_csv_that_cannot_be_written_is_refused_before_a_row_takes_its_time(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere" / "rows.csv"):
        with pytest.raises(OSError, match=str(place)):
            Table(COLUMNS, place)


def test_a_line_holds_shape_time_and_ratio():
    assert line({**ROW, "unit": "ms", "peak_mib": 36.4, "times_dense": 12.75}).split() == [
        *("exact", "fwd+bwd", "B=1", "T=102400", "H=12", "D=64", "10.400", "ms", "[10.100,", "10.900]"),
        *("+36", "MiB", "12.8", "x", "dense"),
    ]


def test_limits_are_rates(monkeypatch):
    times = pytest.importorskip("seqarch.bench.timing")

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


@pytest.mark.parametrize("step", ALL_STEPS.values(), ids=ALL_STEPS)
def test_every_step_exists(step):
    pytest.importorskip("triton")
    assert callable(pkgutil.resolve_name(step.function))
