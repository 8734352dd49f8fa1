"""The help of each command, the version, and the completion of shells."""

import io
import re
import shutil
import subprocess
import sys

import pytest

import seqarch
from seqarch import cli
from seqarch.cli.commands import COMMANDS, TRAINING
from seqarch.cli.completion import completion
from tests.cli.test_commands import output


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_names_every_command(args, capsys):
    said = output(capsys, *args)
    assert said.startswith("usage: seqarch COMMAND")
    for command in (*TRAINING, *COMMANDS):
        assert f"\n    {command} " in said


def test_version(capsys):
    assert output(capsys, "--version") == f"seqarch {seqarch.__version__}\n"


@pytest.mark.parametrize("command", [*TRAINING, *COMMANDS])
def test_help_of_a_command_is_ours(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert said.startswith(f"usage: seqarch {command}")
    assert " ".join(said.split()).count(({**TRAINING, **{k: v.help for k, v in COMMANDS.items()}})[command]) == 1


@pytest.mark.parametrize("flag", ["--help", "-h", "--help_all"])
def test_help_of_fit_has_our_options_and_on_request_those_of_the_trainer(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--config", "quickstart", flag])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for option in ("model.d_model", "data.train", "ood_loss.at", "trainer.max_steps", "trainer.devices"):
        assert re.search(f"--{option}[ ,]", said)
    for option in ("trainer.max_epochs", "trainer.strategy", "trainer.strategy.help", "trainer.callbacks"):
        assert bool(re.search(f"--{option}[ ,]", said)) == (flag == "--help_all")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            ["--help"],
            [
                "--data.num_workers INT loader processes; 0 reads in the training process (in 0..256; default 0)",
                "--model.betas [ITEM,...] AdamW's decay rates (default [0.9, 0.95])",
                "--model.d_model INT width of the residual stream (required; at least 1)",
                "--model.tie_embeddings {true,false} whether the head shares the embedding's weights (default true)",
                "--data.ood LIST domains that are only evaluated",
                "--data.train MAPPING training domains",
                "`null` for none (GELUMLP, GeGLU, SwiGLU, RWKVChannelMix, RWKVGatedChannelMix)",
                "train_loss: Logs `loss/train`, `learning_rate` and `gradient_norm`. --train_loss.every_n_steps INT",
            ],
        ),
        (
            ["--model.mixers.help", "Top1Chunk"],
            ["--model.mixers.chunk_size INT tokens in a chunk, C (at least 1; default"],
        ),
    ],
)
def test_help_says_what_an_option_means_takes_and_is_by_default(asked, expected, capsys):
    with pytest.raises(SystemExit):
        cli.main(["fit", *asked])
    said = " ".join(capsys.readouterr().out.split())
    assert [text for text in expected if text not in said] == []
    assert (
        re.findall(r"type: |Annotated|Union|Optional|default: |null[),]|\+ [A-Z]|CLASS_PATH|configuration file", said)
        == []
    )


@pytest.fixture(scope="module")
def script():
    return completion()


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("e", "exam eval export"),
        ("fit --model.d_m", "--model.d_model"),
        ("validate --ckpt", "--ckpt_path"),
        ("fit --config quicks", "quickstart quickstart_top1_chunk"),
        ("fit runs", ""),
        ("data pre", "prepare"),
        ("data prepare x.txt --append --toke", "--tokenizer"),
        ("report --ref", "--reference"),
        ("report ", ""),
        ("exam --mixer Top1C", "Top1Chunk"),
        ("mixers n", "new"),
        ("recipes copy exam/ti", "exam/tiny"),
        ("generate --out", ""),
    ],
)
def test_completion_offers_names(script, typed, expected):
    words = " ".join(f"'{word}'" for word in ("seqarch", *typed.split(" ")))
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed.split(" "))}; _seqarch; echo "${{COMPREPLY[@]}}"'
    said = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, timeout=60)
    assert (said.stdout.strip(), said.stderr) == (expected, "")


def test_letters_that_the_terminal_lacks_are_written_as_escapes(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--help"])
    assert not stop.value.code
    assert b"H\\xe4gele" in written.getvalue()
