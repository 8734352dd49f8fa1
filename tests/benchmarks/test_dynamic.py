"""The benchmarks of several lengths, at tiny sizes on a CPU."""

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def benchmark(monkeypatch):
    """Import a benchmark by name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda name: load(name, monkeypatch)


def load(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where the compiler looks for its functions
    spec.loader.exec_module(module)
    return module


@pytest.mark.no_cover
def test_a_mixer_of_several_lengths(benchmark, tmp_path, monkeypatch, capsys):
    module = benchmark("dynamic_shapes")
    build = module.build

    def fail(mixer, *args):
        if mixer == "Mamba2":
            raise ValueError("the reason\nand more")
        return build(mixer, *args)

    monkeypatch.setattr(module, "build", fail)
    options = ["--size", "tiny", "--lengths", "24", "17", "--backend", "eager", "--csv", str(tmp_path / "rows.csv")]
    module.main(["GatedConvolution", "Mamba2", *options])
    first, second = csv.DictReader((tmp_path / "rows.csv").open())
    assert (first["mixer"], first["result"], first["recompiled"]) == ("GatedConvolution", "works", "0")
    assert float(first["error"]) < 1e-6
    assert 1e-4 < float(first["noise"]) < 0.5
    assert int(first["graphs"]) >= 1
    assert second["result"] == "ValueError: the reason"
    assert "mixer Mamba2  result ValueError: the reason\n" in capsys.readouterr().out
    module.main(["GatedConvolution", *options, "--limit", "0"])
    assert [row["result"] for row in csv.DictReader((tmp_path / "rows.csv").open())] == ["no time left"]


@torch.no_grad()
def test_ways_of_decoding_are_right(benchmark, tmp_path, monkeypatch):
    module = benchmark("flex_decoding")
    path = tmp_path / "rows.csv"
    options = ["--eager", "--batch", "3", "--heads", "2", "16", "--capacity", "150", "--csv", str(path)]
    module.main(options)
    rows = list(csv.DictReader(path.open()))
    assert [row["name"] for row in rows] == [
        "SDPA with a mask", "attention_decode", "FlexAttention, scores", "FlexAttention, block mask"
    ]  # fmt: skip
    assert {row["result"] for row in rows} == {"works"}
    monkeypatch.setattr(module, "attention_decode", lambda q, *_: torch.zeros_like(q))
    module.main(options)
    assert [row["result"] for row in csv.DictReader(path.open())] == ["works", "differs", "works", "works"]
