"""`seqarch bench generation` on a CPU at a small size."""

import csv
from pathlib import Path

import pytest
import torch

from seqarch import cli
from seqarch.bench import generation
from seqarch.bench.mixers import find_recipes
from seqarch.errors import UserError

ROOT = Path(__file__).parents[2]
SMALL = {"model": {"d_model": 32, "n_layers": 2, "vocab_size": 60, "mixers.attention.init_args.n_heads": 2}}
SIZES = {"prompt": 30, "new": 24, "batch_size": 3, "steps": 6}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_rows_of_a_recipe():
    recipe = str(find_recipes(["transformer_pp"])[0])
    (first,) = generation.time_recipe(recipe, ["python"], SMALL, [], **SIZES)["rows"]
    assert first["mode"] == "python"
    assert first["batch_size"] == 3
    assert first["state_gib"] * 2**30 == 3 * 54 * 2 * 2 * 32 * 4  # sequences, tokens, layers, keys and values, float32
    assert first["decode_tokens_per_s"] == pytest.approx(3000 / first["step_ms"])
    assert first["prefill_tokens_per_s"] == pytest.approx(3 * 29 / first["prefill_s"])
    assert first["p20"] <= first["step_ms"] <= first["p80"]
    assert first["total_s"] > first["prefill_s"]
    assert "batch   3  prefill" in generation.line({"name": "a", **first})


def test_modes_of_cuda_graphs_are_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    modes = ["graph", "compiled", "python"]
    *refused, last = generation.time_recipe(str(find_recipes(["transformer_pp"])[0]), modes, SMALL, [], **SIZES)["rows"]
    said = "--modes {} replays a CUDA graph, which needs a GPU: on a CPU use --modes python"
    assert [row["error"] for row in refused] == [said.format(mode) for mode in modes[:2]]
    assert last["step_ms"] > 0


def test_steps_are_timed_in_the_middle(monkeypatch):
    seen = []
    step = generation.time_steps
    monkeypatch.setattr(
        generation, "time_steps", lambda call, *rest: [seen.append(int(call.clock.position)), step(call, *rest)][1]
    )
    generation.time_recipe(str(find_recipes(["transformer_pp"])[0]), ["python"], SMALL, [], **SIZES)
    middle = 29 + (24 - 6 - 5) // 2
    assert seen == [middle, middle + 5]  # the warm-up, then the steps that count


def test_a_batch_shrinks_to_what_fits(monkeypatch):
    monkeypatch.setattr("seqarch.model.decoder.free_memory", lambda device: 3e6)
    recipe = str(find_recipes(["transformer_pp"])[0])
    (row,) = generation.time_recipe(recipe, ["python"], SMALL, [], **{**SIZES, "batch_size": 60})["rows"]
    assert 0 < row["batch_size"] < 60
    monkeypatch.setattr("seqarch.model.decoder.free_memory", lambda device: 10)
    (row,) = generation.time_recipe(recipe, ["python"], SMALL, [], **SIZES)["rows"]
    assert "do not fit in memory" in row["error"]
    assert "not measured" in generation.line({"name": "a", **row})


def test_the_command_writes_rows(tmp_path, monkeypatch, capsys):
    rows = [{"mode": "graph", **generation.summary([0.002, 0.004], 2, 10, 8, 0.5), "start_up_s": 0.0}]
    monkeypatch.setattr(generation, "run_job", lambda job, own_caches: {"name": job.name, "of": job.of, "rows": rows})
    cli.main(["bench", "generation", "rwkv7", "--against", "llama", "--csv", str(tmp_path / "g.csv")])
    with (tmp_path / "g.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(row["name"], row["of"]) for row in written] == [
        ("rwkv7_110m", "seqarch"),
        (generation.LLAMA, "transformers"),
    ]
    assert float(written[0]["total_s"]) == pytest.approx(0.5 + 8 * 0.003)
    assert capsys.readouterr().out.count("total 0.5 s") == 2


def test_nothing_measured_is_an_error(monkeypatch):
    monkeypatch.setattr(generation, "run_job", lambda job, own_caches: {"name": job.name, "of": job.of, "error": "no"})
    job = generation.generation_job(None, ["graph"], {}, [], **SIZES)
    with pytest.raises(UserError, match=r"^no$"):
        generation.bench_generation([job])


@pytest.mark.parametrize(
    ("option", "said"), [("--new=4", "--new must lie in 6.."), ("--batch=0", "--batch must lie in 1..2147483648")]
)
def test_wrong_sizes_are_refused(option, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "generation", "rwkv7", option])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_llama_needs_a_gpu(monkeypatch):
    from seqarch.bench.generation import time_llama

    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        time_llama(10, 10, 1, 2)
