"""`seqarch bench mixers` on a CPU at a small size: its recipes and published models."""

import csv
import importlib
import json
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from seqarch import cli
from seqarch.bench import fla_models
from seqarch.bench.jobs import Job, answer, versions
from seqarch.bench.mixers import COLUMNS, _counterparts, bench_mixers, find_recipes, line, recipe_job, write_recipe
from seqarch.bench.training_step import draw_documents, draw_tokens, flops_of, time_recipe, time_training
from seqarch.errors import UserError
from seqarch.experiment.experiment import Experiment
from tests import processes

ROOT = Path(__file__).parents[2]
SMALL = {
    "model.n_layers": 2,
    "model.d_model": 32,
    "model.mixers.attention.init_args.n_heads": 4,
    "model.compile": "false",
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def bench(*args, **model):
    cli.main(["bench", "mixers", *map(str, args), *(f"--{key}={value}" for key, value in model.items())])


@pytest.mark.commands
def test_a_recipe_is_timed_in_a_process_of_its_own(tmp_path, capsys, monkeypatch):
    def forked(command, env, **options):
        assert command[:2] == [sys.executable, "-m"]
        assert options == {"capture_output": True, "text": True}
        return processes.seqarch(command[3:], tmp_path / "logs", env, module=command[2])

    monkeypatch.setattr("seqarch.bench.jobs.subprocess", SimpleNamespace(run=forked))
    path = tmp_path / "rows.csv"
    bench("quickstart", "--steps=3", "--micro_batch_size=2", "--sequence_length=32", f"--csv={path}", **SMALL)
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row) == [*versions(), *COLUMNS]
    assert (row["name"], row["of"], row["model"], row["precision"]) == ("quickstart", "seqarch", "Attention", "32-true")
    assert (row["micro_batch_size"], row["sequence_length"], row["steps"]) == ("2", "32", "3")
    assert 30_000 < int(row["parameters"]) < 60_000
    assert 0 < float(row["p20"]) <= float(row["tokens_per_s"]) <= float(row["p80"])
    assert float(row["loss_last"]) < float(row["loss_first"])
    assert float(row["start_up_s"]) > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["quikstart"], "unknown recipe or mixer 'quikstart': did you mean quickstart"),
        (["quickstart", "--steps=0"], "--steps must lie in 1..2147483648, not 0"),
        (["quickstart", "--micro_batch_size=0"], "--micro_batch_size must lie in 1..2147483648, not 0"),
        (["quickstart", "--sequence_length=9999999999"], "--sequence_length must lie in 1..2147483648, not 9999999999"),
        (["--against=mamba"], "against is mamba: expected fla"),
        (["quickstart", "--documents=0"], "--documents must lie in 1..2147483648, not 0"),
        (["quickstart", "--against=fla", "--model.d_model=8"], "--model has no effect with --against: leave it out"),
        (["quickstart", "--against=fla", "--documents=8"], "--documents has no effect with --against: leave it out"),
        (["quickstart", "--stps=3"], "unknown option --stps: did you mean --steps?"),
        (["quickstart", "--csv=nowhere/rows.csv"], "nowhere/rows.csv: No such file or directory; choose another place"),
        (["quickstart", "--csv=."], ".: Is a directory; choose another place"),
    ],
)
def test_wrong_command_lines_are_one_line(capsys, args, said):
    with pytest.raises(SystemExit) as stop:
        bench(*args)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_recipes_are_found_by_file_name_and_mixer():
    assert find_recipes(["recipes/quickstart.yaml"]) == [Path("recipes/quickstart.yaml")]
    assert find_recipes(["top1_chunk", "top1_chunk_110m"]) == [ROOT / "recipes/top1_chunk_110m.yaml"]
    assert find_recipes(["Top1Element"]) == [ROOT / "recipes/top1_element_110m.yaml"]
    assert find_recipes([]) == sorted(ROOT.glob("recipes/*_110m.yaml"))


def test_a_mixer_that_no_recipe_of_110m_has_gets_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path))
    first, (recipe,) = find_recipes(["Top1Element", "GatedConvolution"])[0], find_recipes(["GatedConvolution"])
    assert first == ROOT / "recipes/top1_element_110m.yaml"
    small = {key: value for key, value in SMALL.items() if "n_heads" not in key}
    sizes = {"data.micro_batch_size": 1, "data.sequence_length": 16, "model.vocab_size": 300}
    assert time_recipe(str(recipe), small | sizes, 1)["model"] == recipe.stem == "GatedConvolution"


def test_several_commands_write_the_recipe_of_a_mixer_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path))
    with ThreadPoolExecutor(4) as threads:
        paths = set(threads.map(write_recipe, ["GatedConvolution"] * 200))
    assert paths == {*tmp_path.glob("bench/*")} == {tmp_path / "bench/GatedConvolution.yaml"}


def test_bundled_recipes_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("top1_chunk", "recipes/top1_chunk_110m.yaml"):
        assert find_recipes([name]) == [ROOT / "recipes/top1_chunk_110m.yaml"]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes jobs whose process prints a given row, raises for `None`, or ends itself by a given signal."""
    (tmp_path / "fake_job.py").write_text(
        "import os, sys\n"
        "def time(row):\n"
        "    if row is None: raise RuntimeError('the GPU is gone')\n"
        "    if 'signal' in row:\n"
        "        print(row.get('said', 'too much'), file=sys.stderr, flush=True)\n"
        "        os.kill(os.getpid(), row['signal'])\n"
        "    print('noise')\n"
        "    return {**row, 'cache': os.environ['TRITON_CACHE_DIR']}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    return lambda name, row, of="seqarch": Job(name, "fake_job:time", {"row": row}, of)


MEASURED = {"tokens_per_s": 5.0, "p20": 4.0, "p80": 6.0, "start_up_s": 1.0, "parameters": 9, "loss_first": 3.0}
MEASURED |= {"loss_last": 2.0, "micro_batch_size": 1, "sequence_length": 8, "steps": 2}


def test_a_recipe_that_fails_does_not_stop_the_others(fake, capsys):
    jobs = [fake("broken", None), fake("refused", {"error": "n_heads\n is \x1b[2Jodd"}), fake("sound", MEASURED)]
    with pytest.raises(SystemExit, match="2 of 3 recipes were not run"):
        bench_mixers(jobs)
    said = capsys.readouterr().out
    assert "broken                       seqarch             not run: RuntimeError: the GPU is gone" in said
    assert "refused                      seqarch             not run: n_heads is ?[2Jodd" in said
    assert "sound                        seqarch                      5 tokens/s" in said


def test_what_a_process_says_does_not_change_the_terminal(fake, capfd):
    with pytest.raises(UserError):
        bench_mixers([fake("killed", {"said": "\x1b]0;owned\a\x1b[2J", "signal": 9})])
    assert "?]0;owned??[2J" in (said := capfd.readouterr().err)
    assert all(line.isprintable() for line in said.splitlines())


def test_a_signal_leaves_what_was_said_and_where_it_came(fake):
    with pytest.raises(UserError, match=r"stopped by signal 9 \(Killed\); too much$"):
        bench_mixers([fake("killed", {"signal": 9})])
    with pytest.raises(UserError, match=r"stopped by signal 11 \(Segmentation fault\); File \".*fake_job.py\", line 6"):
        bench_mixers([fake("crashed", {"signal": 11})])


def test_when_nothing_ran_the_reason_is_the_error(fake):
    with pytest.raises(UserError, match="n_heads is odd"):
        bench_mixers([fake("refused", {"error": "n_heads is odd"})])


def test_compile_caches_start_empty_unless_asked(fake):
    jobs = [fake("a", MEASURED), fake("b", MEASURED)]
    fresh = {row["cache"] for row in bench_mixers(jobs)}
    assert len(fresh) == 2
    assert not any(Path(folder).exists() for folder in fresh)
    assert {row["cache"] for row in bench_mixers(jobs, own_caches=True)} == {"mine"}


def test_ours_is_compared_with_the_fastest_published_model(fake, monkeypatch):
    rates = {"slow": 2.0, "fast": 4.0}
    theirs = [fake(name, {**MEASURED, "tokens_per_s": rate}, "fla") for name, rate in rates.items()]
    theirs.insert(0, fake("broken", None, "fla"))
    monkeypatch.setattr("seqarch.bench.mixers._counterparts", lambda job, ours: theirs)
    *published, ours = bench_mixers([fake("a", MEASURED)], against_fla=True)
    assert [(row["name"], row["of"]) for row in published] == [("broken", "fla"), ("slow", "fla"), ("fast", "fla")]
    assert ours["times_fla"] == 1.25


def test_steps_are_those_of_training():
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 7)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
    tokens = draw_tokens(7, 3, 8, torch.device("cpu"))
    assert tokens.shape == (3, 9)
    calls = []

    def loss_of(batch):
        calls.append(1)
        return torch.nn.functional.cross_entropy(linear(torch.ones(27, 4)), batch.flatten())

    row = time_training(loss_of, optimizer, tokens, 5)
    assert len(calls) == 6
    assert row["loss_last"] < row["loss_first"]
    assert all(parameter.grad is None for parameter in linear.parameters())


def test_a_line_says_what_was_measured():
    row = {"name": "a", "of": "seqarch", "tokens_per_s": 5e5, "p20": 4e5, "p80": 6e5, "mfu": 0.42, "peak_gib": 23.6}
    row |= {"start_up_s": 12.0, "parameters": 110e6, "loss_first": 10.4, "loss_last": 9.1, "times_fla": 1.2}
    said = line(row)
    for part in ("500,000 tokens/s", "MFU 42%", "23.6 GiB", "first step 12.0 s", "110.0M", "10.400 to 9.100", "1.20 x"):
        assert part in said
    assert "counted" not in said
    assert "MFU 42% (counted)" in line({**row, "flops_counted": True})


def test_the_row_of_a_hybrid_names_its_mixers():
    sizes = {
        "model": {"d_model": 24, "n_layers": 4, "compile": False, "activation_checkpointing": True},
        "data": {"micro_batch_size": 1, "sequence_length": 16},
    }
    row = time_recipe("recipes/hybrid_gated_delta_net_top1_chunk_110m.yaml", sizes, 1)
    assert (row["name"], row["model"]) == ("hybrid_gated_delta_net_top1_chunk_110m", "GatedDeltaNet, Top1Chunk")
    assert row["p20"] == row["tokens_per_s"] == row["p80"]
    assert row["mfu"] is None


def test_a_block_without_a_mixer_is_no_mixer_of_the_row():
    sizes = {"model": {"d_model": 16, "n_layers": 2, "mixers": {"attention": {"init_args": {"n_heads": 2}}}}}
    sizes["model"]["pattern"] = ["attention", "none"]
    sizes["data"] = {"micro_batch_size": 1, "sequence_length": 8}
    assert time_recipe("recipes/quickstart.yaml", sizes, 1)["model"] == "Attention"


def test_a_recipe_that_leaves_the_micro_batch_open_is_timed_with_all_sequences_of_a_step():
    sizes = {"model": {"d_model": 16, "n_layers": 1, "mixers": {"attention": {"init_args": {"n_heads": 2}}}}}
    sizes["data"] = {"sequences_per_step": 3, "sequence_length": 8}
    assert time_recipe("recipes/quickstart.yaml", sizes, 1)["micro_batch_size"] == 3


def test_batches_of_documents_differ_only_in_their_borders():
    tokens = torch.arange(2 * 65).view(2, 65)
    batches = draw_documents(tokens, 8)
    borders = [batch["cu_seqlens"] for batch in batches]
    assert len({each.shape for each in borders}) == 1
    assert len({tuple(each.tolist()) for each in borders}) == 3
    for batch in batches:
        assert batch["tokens"] is tokens
        assert 8 <= (batch["targets"] == -100).sum() <= 30


def test_operations_are_those_within_documents():
    lm = mock.Mock(flops_per_token=lambda length, training: float(length))
    assert flops_of(lm, {"cu_seqlens": torch.tensor([0, 2, 8, 8])}, 8) == (2 * 2 + 6 * 6) / 8
    assert flops_of(lm, {}, 8) == 8


def test_counterparts_run_at_the_size_of_ours():
    job = recipe_job(Path("rwkv7_110m.yaml"), {}, 2)
    size = {"name": "rwkv7_110m", "micro_batch_size": 1, "sequence_length": 8, "steps": 2}
    theirs = [dict(each.options) for each in _counterparts(job, MEASURED)]
    assert theirs == [{**size, "precision": "bf16-mixed"}, {**size, "precision": "bf16-true"}]
    assert _counterparts(recipe_job(Path("top1_chunk_110m.yaml"), {}, 2), MEASURED) == []


def test_counterparts_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = {"name": "rwkv7_110m", "micro_batch_size": 1, "sequence_length": 8, "steps": 1, "precision": "bf16-true"}
    answer("seqarch.bench.fla_models:time_model", json.dumps(options))
    assert json.loads(capsys.readouterr().out) == {
        "error": "--against fla needs an NVIDIA GPU, and PyTorch sees none here"
    }


def test_a_process_without_enough_memory_answers_in_one_line(capsys):
    answer("torch:empty", json.dumps({"size": [2**50]}))
    said = f"there is not enough memory for {4 * 2**50} bytes: choose smaller sizes"
    assert json.loads(capsys.readouterr().out) == {"error": said}


@pytest.fixture
def installed(monkeypatch):
    """Makes stand-ins for some packages and hides others, as well as fla."""

    def install(*there, missing=()):
        modules = {**{name: types.ModuleType(name) for name in there}, **dict.fromkeys(missing)}
        for name, module in {"fla.models": types.ModuleType("fla.models"), **modules}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(fla_models, "fla_module", lambda name, spread: importlib.import_module(name))

    return install


SCAN, SSD, CONVOLUTION = (
    "mamba_ssm.ops.selective_scan_interface",
    "mamba_ssm.ops.triton.ssd_combined",
    "causal_conv1d",
)


@pytest.mark.parametrize("missing", [[SCAN, CONVOLUTION], [SCAN], [CONVOLUTION]], ids=str)
def test_a_counterpart_without_its_packages_is_refused(installed, missing):
    installed(*{SCAN, CONVOLUTION} - set(missing), missing=missing)
    command = "pip install --no-build-isolation mamba-ssm causal-conv1d"
    with pytest.raises(UserError, match=f"fla's Mamba needs mamba-ssm and causal-conv1d \\({command}\\): "):
        fla_models.check_packages("mamba1_110m")


def test_a_counterpart_with_its_packages_is_not_refused(installed):
    installed(SSD, CONVOLUTION)
    fla_models.check_packages("mamba2_110m")


@pytest.mark.parametrize("name", fla_models.COUNTERPARTS)
@pytest.mark.filterwarnings("ignore")
def test_published_models_are_as_large_as_ours(name, monkeypatch):
    """Only low-rank parts may differ a little in size."""
    pytest.importorskip("fla.models")
    if name == "transformer_pp_110m":
        pytest.importorskip("flash_attn")
    with torch.device("meta"), monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "apply", lambda module, _: module)  # RWKV-7 draws its values channel by channel
        model = fla_models.build(name)
    theirs = sum(parameter.numel() for parameter in model.parameters())
    ours = Experiment.from_recipe(name).build_on_meta().n_parameters()
    assert theirs == pytest.approx(ours, rel=0.03)
