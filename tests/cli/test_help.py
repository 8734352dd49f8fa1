"""The help of each command, the version, and the completion of shells."""

import io
import re
import sys

import pytest
from jsonargparse import ArgumentParser

import seqarch
from seqarch import cli
from seqarch.cli.commands import COMMANDS, TRAINING
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


def test_completion_script_covers_all_commands(capsys):
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit):
        cli.main(["--print_completion=shtab-bash"])
    script = capsys.readouterr().out
    for word in ("--model.d_model", "--ood_loss.every_n_steps", "--max_new_tokens", "prepare", "--reference"):
        assert word in script


def test_completion_without_shtab_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["--print_completion=shtab-bash"])
    assert stop.value.code == 2
    assert "pip install 'seqarch[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--print_completion=shtab-nosh", "--print_completion"])
def test_completion_for_an_unknown_shell_is_one_line(capsys, monkeypatch, given):
    pytest.importorskip("shtab")
    monkeypatch.setattr("seqarch.cli.training.build_parser", lambda *words: ArgumentParser(exit_on_error=False))
    with pytest.raises(SystemExit) as stop:
        cli.main([given])
    assert stop.value.code == 2
    assert re.fullmatch(r"seqarch: error: .*--print_completion.*\n", capsys.readouterr().err)


def test_letters_that_the_terminal_lacks_are_written_as_escapes(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--help"])
    assert not stop.value.code
    assert b"H\\xe4gele" in written.getvalue()
