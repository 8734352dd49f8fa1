"""Each command as users type it, on runs of a few steps."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from typing import ClassVar

import pytest
import yaml

import seqarch
from seqarch import cli
from seqarch.cli import mixers as listing
from seqarch.errors import PluginWarning, UserError
from seqarch.experiment.experiment import Experiment
from seqarch.mixers.attention import Attention
from seqarch.mixers.base import Mixer
from seqarch.report.runs import load_run
from seqarch.training import LanguageModel
from seqarch.training.checkpoint import read_checkpoint
from seqarch.training.run_folder import check_same_run
from seqarch.training.weights import write_content
from tests.conftest import MODEL, TINY, flags
from tests.report.runs_for_tests import write_run

pytestmark = pytest.mark.commands

LARGE_BATCH = ("--data.sequences_per_step=64", "--data.micro_batch_size=64")
"""For `test`, which reads the whole hold-outs."""


def output(capsys, *args):
    cli.main([str(arg) for arg in args])
    return capsys.readouterr().out


def test_a_profiler_shows_its_result(fit, caplog, monkeypatch):
    # Lightning sets it by the handlers that there are when it is imported
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    fit(**{"trainer.max_steps": 1, "trainer.profiler": "simple"})
    assert "run_training_batch" in caplog.text


def test_fit_says_what_came_out(finished):
    run_dir, said = finished
    assert (run_dir / "report/index.html").exists()
    assert "in-domain docs" in said
    assert "OOD       code" in said
    assert "unigram entropy" in said
    for word in ("plot", "curves", "TensorBoard"):
        assert word in said


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_prints_the_loss_of_each_domain(command, run_dir, checkpoint, capsys):
    said = output(capsys, command, "--config", run_dir / "config.yaml", "--ckpt_path", checkpoint, *LARGE_BATCH)
    for tag in ("loss/in_domain/docs", "loss/ood/code"):
        assert len(re.findall(rf"{tag}\s", said)) == 1, "each number is printed once"


def test_evaluation_agrees_with_the_curves(run_dir, checkpoint, shards):
    losses = Experiment.from_recipe(run_dir / "config.yaml").evaluate(checkpoint=checkpoint)
    last = load_run(run_dir).curves["loss/ood/code"].value[-1]
    assert losses["loss/ood/code"] == last
    assert Experiment.from_recipe(run_dir / "config.yaml").evaluate(checkpoint=run_dir) == losses


@pytest.mark.parametrize("command", ["validate", "test"])
def test_sigterm_ends_a_measurement_at_once(checkpoint, run_dir, monkeypatch, command):
    monkeypatch.setattr(
        LanguageModel, f"{command.replace('ate', 'ation')}_step", lambda *_: signal.raise_signal(signal.SIGTERM)
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--config", f"{run_dir}/config.yaml", f"--ckpt_path={checkpoint}"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stop.value.code == 128 + signal.SIGTERM


def test_of_a_run_that_began_from_a_checkpoint_its_own_newest_is_measured(checkpoint, shards, tmp_path, capsys):
    run, config = tmp_path / "run", tmp_path / "run/config.yaml"
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": run, "trainer.max_steps": 6, "ckpt_path": checkpoint}
    output(capsys, "fit", *flags(**options))
    assert f"ckpt_path: {checkpoint}" in config.read_text()
    own = f"measures {run}/checkpoints/step_00000006.ckpt on the text in {shards}\n"
    assert own in output(capsys, "validate", "--config", config)
    for named in (["--ckpt_path", checkpoint], [f"--ckpt_path={checkpoint}"]):
        assert f"measures {checkpoint} on the text in {shards}\n" in output(
            capsys, "validate", "--config", config, *named
        )
    assert own in output(capsys, "validate", "--config", config, "--ckpt_path", run)
    last = load_run(run).curves["loss/ood/code"].value[-1]
    assert Experiment.from_recipe(config).evaluate()["loss/ood/code"] == last
    for path in run.glob("checkpoints/*"):
        path.unlink()
    assert f"measures {checkpoint} on the text in {shards}\n" in output(capsys, "validate", "--config", config)


def test_checkpoint_of_another_model_is_refused(run_dir, checkpoint, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["test", "--config", f"{run_dir}/config.yaml", f"--ckpt_path={checkpoint}", "--model.d_model=64"])
    assert stop.value.code == 2
    assert "the checkpoint holds another model than the configuration describes" in capsys.readouterr().err


def test_a_file_of_weights_is_not_validated(run_dir, checkpoint, tmp_path, capsys):
    write_content(tmp_path / "w.safetensors", read_checkpoint(checkpoint))
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", "--config", f"{run_dir}/config.yaml", f"--ckpt_path={tmp_path}/w.safetensors"])
    assert stop.value.code == 2
    assert f"{tmp_path}/w.safetensors is a file of weights" in capsys.readouterr().err


def test_print_config_is_a_recipe(run_dir, tmp_path, capsys):
    def printed(config):
        with pytest.raises(SystemExit) as stop:
            cli.main(["fit", "--config", str(config), "--print_config"])
        assert stop.value.code == 0
        return capsys.readouterr().out

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(printed(run_dir / "config.yaml"))
    again = printed(recipe)
    assert again == recipe.read_text()
    assert again.startswith(f"# seqarch=={seqarch.__version__}")


def test_config_of_a_run_starts_the_same_run(run_dir, tmp_path, without_figures):
    config = run_dir / "config.yaml"
    assert "extends" not in yaml.safe_load(config.read_text())
    cli.run(["fit", "--config", str(config), "--run_dir", str(tmp_path / "again")])
    first, again = (load_run(path).curves["loss/train"].value for path in (run_dir, tmp_path / "again"))
    assert list(first) == list(again)


def test_run_folder_with_another_configuration_is_refused(run_dir, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--config", str(run_dir / "config.yaml"), "--model.learning_rate=0.5"])
    assert stop.value.code == 2
    assert "learning_rate was 0.0003, is 0.5" in capsys.readouterr().err


def test_run_that_failed_at_once_is_replaced_by_the_corrected_command(fit, capsys):
    mixers = "{mamba: {class_path: Mamba1, init_args: {d_state: 4, backend: BACKEND}}}"
    with pytest.raises(UserError, match="backend 'triton' "):
        fit(**{"model.mixers": mixers.replace("BACKEND", "triton")})
    run = fit(**{"model.mixers": mixers.replace("BACKEND", "reference")})
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["model"]["mixers"]["mamba"]["init_args"]["backend"] == "reference"
    assert set(load_run(run).curves["loss/train"].step) == {1, 2, 3, 4}


@pytest.mark.parametrize("kept", ["checkpoints/step_00000002.ckpt", "own/last.ckpt", "curves.csv", "running"])
def test_run_that_left_something_is_not_replaced(tmp_path, kept):
    (tmp_path / "config.yaml").write_text("model: {d_model: 8}\n")
    (tmp_path / "run.json").write_text(json.dumps({"status": "running" if kept == "running" else "failed"}))
    (tmp_path / "curves.csv").write_text("step,tokens\n")
    if kept != "running":
        (tmp_path / kept).parent.mkdir(exist_ok=True)
        (tmp_path / kept).write_text("step,tokens,loss\n1,64,5.5\n")
    with pytest.raises(UserError, match="d_model was 8, is 16"):
        check_same_run(tmp_path, {"model": {"d_model": 16}})


def test_folder_with_the_output_of_the_command_is_no_foreign_one(tmp_path):
    for name in ("lock", "exam.json", "config.yaml.partial", ".hidden", "fit.log", "slurm-1.out"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "config.yaml")  # reading it would wait for ever
    check_same_run(tmp_path, {})
    (tmp_path / "manifest.json").touch()
    with pytest.raises(UserError, match=r"is not a run folder, it holds manifest.json: name a new or empty one"):
        check_same_run(tmp_path, {})


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("attention", "model.mixers.attention.init_args.window was None, is 9)"),
        ("windowed", "model.mixers.attention.class_path was seqarch.mixers.attention.Attention, is None and 18 more "),
    ],
)
def test_checkpoint_of_another_model_whose_weights_fit(checkpoint, shards, tmp_path, capsys, name, difference):
    other = {"model.mixers": f"{{{name}: {{class_path: Attention, init_args: {{n_heads: 4, window: 9}}}}}}"}
    options = flags(**{**TINY, **MODEL, **other, "data.root": shards, "ckpt_path": checkpoint})
    said = f"{checkpoint} holds another model ({difference}"
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", *options, f"--run_dir={tmp_path / 'run'}", "--trainer.max_steps=6"])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    cli.main(["validate", *options])
    assert f"seqarch: warning: {said}" in capsys.readouterr().err


def test_truncated_checkpoint_is_refused_and_the_one_before_offered(run_dir, checkpoint, tmp_path, capsys):
    folder = tmp_path / "run/checkpoints"
    folder.mkdir(parents=True)
    (folder / "step_00000002.ckpt").write_bytes((run_dir / "checkpoints/step_00000002.ckpt").read_bytes())
    broken = folder / "step_00000004.ckpt"
    broken.write_bytes(checkpoint.read_bytes()[:-2000])
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", "--checkpoint", str(broken), "--prompt", "a"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "step_00000004.ckpt is damaged: it is cut short or no checkpoint" in said
    assert "step_00000002.ckpt" in said


def test_report_compares_two_runs(run_dir, shards, tmp_path, capsys, without_figures):
    other = tmp_path / "other"
    mixers = "{attention: {class_path: Top1Chunk, init_args: {n_heads: 4, chunk_size: 16}}}"
    options = {**TINY, **MODEL, "model.mixers": mixers, "data.root": shards, "run_dir": other}
    cli.run(["fit", *flags(**options)])
    capsys.readouterr()
    said = output(capsys, "report", run_dir, other, "--out", tmp_path / "report")
    assert "first" in said
    assert "other" in said
    assert "first" in (tmp_path / "report/index.html").read_text()
    assert list((tmp_path / "report").glob("*.svg"))


def test_data_is_prepared_and_shown(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"body": f"Document {i} says hello."}) + "\n" for i in range(40)))
    options = (
        "--domain",
        "hello",
        "--tokenizer",
        "byte",
        "--text_field",
        "body",
        "--holdout",
        "0.25",
        "--workers",
        "1",
    )
    output(capsys, "data", "prepare", file, "--out", tmp_path / "shards", *options)
    said = output(capsys, "data", "show", tmp_path / "shards")
    assert "hello" in said
    assert "says hello." in said
    assert "holdout" in said


def test_costs_of_mixers_are_those_of_their_formulas(capsys):
    rows = {row["mixer"]: row for row in json.loads(output(capsys, "mixers", "--costs", "--json", "--d_model", "128"))}
    attention, window = rows["Attention"], rows["Top1Chunk"]
    assert attention["parameters"] == window["parameters"] == 4 * 128 * 128
    assert attention["state KiB 100k"] == 2 * 102400 * 128 * 2 / 1024
    # projections, then scores and values over half of the sequence on average
    assert attention["MFLOP 2k"] == pytest.approx((8 * 128**2 + 4 * 128 * (2048 + 1) / 2) / 1e6)
    assert (window["CPU"], window["CUDA"]) == ("PyTorch", "own Triton")
    assert window["source"] == "arXiv 2505.18522, section 5"
    table = output(capsys, "mixers", "--costs").splitlines()
    assert len({len(line) for line in table}) == 1
    assert table[2].startswith("| Attention ")
    assert len(table) == 2 + len(rows)
    for width in ("100", "64000000000"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["mixers", "--costs", "--d_model", width])
        assert f"multiple of 64 up to 1,048,576, not {width}" in capsys.readouterr().err


def test_costs_of_a_mixer_that_declares_nothing(monkeypatch):
    class Plain(Mixer):
        def forward(self, x):
            return x

        def flops_per_token(self, seq_len, *, training=False):
            return 3e6

    monkeypatch.setattr(listing, "import_mixers", lambda: {"Plain": Plain})
    row = dict(zip(listing.COLUMNS, listing.cost_table().splitlines()[2].strip("| ").split(" | "), strict=True))
    row = {column: cell.strip() for column, cell in row.items()}
    assert (row["MFLOP 2k"], row["parameters"], row["decode"]) == ("3.0", "0", "no")
    assert {row[column] for column in ("CPU", "CUDA", "source", "state KiB 2k")} == {"-"}


def test_costs_of_a_broken_mixer_are_left_out(monkeypatch):
    class Few(Mixer):
        def __init__(self, d_model):
            super().__init__(d_model, 0, 1)

        def forward(self, x):
            return x

    class Strange(Mixer):
        published: ClassVar = {768: {"strange": 1}}

        def forward(self, x):
            return x

    class Choosy(Mixer):
        def forward(self, x):
            return x

        def flops_per_token(self, seq_len, *, training=False):
            raise UserError("a width of 100, please")

    class Stateless(Attention):
        def state_bytes(self, *args, **options):
            raise RuntimeError("no state today")

    class Needy(Mixer):
        def __init__(self, *place, slots: int):
            super().__init__(*place)

        def forward(self, x):
            return x

    broken = _named(Few, Strange, Choosy, Stateless, Needy)
    monkeypatch.setattr(listing, "import_mixers", lambda: {"Attention": Attention, **broken})
    with pytest.warns(PluginWarning, match="no costs of mixer") as warned:
        rows = {row["mixer"]: row for row in listing.mixer_costs()}
    assert sorted(rows) == ["Attention", "Choosy", "Few", "Needy", "Stateless", "Strange"]
    assert rows["Attention"]["MFLOP 2k"] > 0
    assert {rows[name][column] for name in broken for column in ("parameters", "MFLOP 2k")} == {None}
    said = {str(each.message).partition(":")[0]: str(each.message) for each in warned}
    assert said["no costs of mixer Choosy"].endswith("UserError: a width of 100, please")
    assert "positional argument" in said["no costs of mixer Few"]
    assert "'strange'" in said["no costs of mixer Strange"]
    assert said["no costs of mixer Needy"].endswith("argument: 'slots'")


def _named(*classes):
    return {each.__name__: each for each in classes}


def test_mixers_as_json_and_for_the_terminal(capsys, monkeypatch):
    mixers = {mixer["name"]: mixer for mixer in json.loads(output(capsys, "mixers", "--json"))}
    assert mixers["Top1Chunk"]["options"]["chunk_size"].items() >= {"default": 128, "required": False}.items()
    n_heads = mixers["Top1Chunk"]["options"]["n_heads"]
    assert n_heads == {"default": None, "required": True, "meaning": "query heads H."}
    assert mixers["Attention"]["capabilities"] == ["decode", "packed", "entropy"]
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = output(capsys, "mixers").splitlines()
        assert max(map(len, lines)) <= width
        assert {"Attention", "Top1Chunk"} <= {line.split(" ")[0] for line in lines}
        lines = output(capsys, "mixers", "Top1Chunk", "Mamba2").splitlines()
        assert max(map(len, lines)) <= width
        assert "  class    seqarch.mixers.attention:Top1Chunk" in lines
        assert "  kernels  CPU: PyTorch; CUDA: own Triton" in lines
        assert lines[lines.index("  chunk_size = 128") + 1].startswith("      tokens in a chunk")
        assert any(line.startswith("  recipes  ") and "top1_chunk" in line for line in lines)


def test_every_option_of_our_mixers_has_a_meaning():
    mixers = {each["name"]: each["options"] for each in listing.describe_mixers() if each["package"] == "seqarch"}
    assert {
        (name, option) for name in mixers for option, facts in mixers[name].items() if not facts["meaning"]
    } == set()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mixers", "rwkv7"], "unknown mixer 'rwkv7': did you mean RWKV7?"),
        (["mixers", "--out", "here"], "--out has no effect without new"),
        (["mixers", "new"], "takes one name"),
        (["mixers", "new", "Mine", "--costs"], "--costs has no effect with new"),
    ],
)
def test_wrong_names_and_flags_of_mixers(args, message):
    with pytest.raises(UserError, match=message):
        cli.run(args)


def test_quick_commands_do_not_import_the_training_stack():
    """In one new process: first what only parses, then what may need PyTorch."""
    program = """
import sys
from seqarch import cli
from seqarch.cli.commands import COMMANDS

parsers = [COMMANDS[name].parser(name) for name in COMMANDS]
assert not {"torch", "lightning", "matplotlib"} & {*sys.modules}, "a parser"
wrong = ["mixers", "--jsn"], ["mixers", "Nope"], ["mixers", "new", "nope"], ["exam", "--mixer", "Nope"]
for args in (["mixers"], *wrong, ["--help"], ["data", "show", "nowhere"]):
    try:
        cli.main(args)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, args
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_place_that_cannot_be_written_is_named(run_dir, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(run_dir), "--out", str(tmp_path / "file/inside")])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("args", [["--help"], ["exam", "--help"], ["recipes"]])
def test_a_reader_that_is_gone_ends_a_command_without_a_word(args, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as stop:
            cli.main(args)
    assert not stop.value.code
    assert capfd.readouterr().err == ""


def test_a_full_disk_behind_stdout_is_one_line(monkeypatch, capfd):
    with open("/dev/full", "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as stop:
            cli.main(["--version"])
    assert stop.value.code == 2
    assert capfd.readouterr().err == "seqarch: error: No space left on device; make room, or choose another place\n"


def test_a_closed_stdout_can_be_written_to(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    cli.main(["--version"])
    sys.stdout.write("text")
    sys.stdout.close()


def test_a_letter_that_the_figures_cannot_show_is_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "名", "名")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli.main(["report", str(run), f"--out={tmp_path / 'out'}"])
    said = capsys.readouterr().err.splitlines()
    lacks = "lacks 名: each letter of these is drawn as a box"
    assert said == [f"seqarch: warning: the font of the figures, DejaVu Sans, {lacks}"]
