"""A flag that would change nothing is refused, and so is an empty text in the place of a value."""

import argparse
import re
from pathlib import Path

import pytest

from seqarch.cli.commands import COMMANDS

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.yaml"
NO_EFFECT = {
    "export c --out o.safetensors --weights": ["--as=llama", "--allow_code=x"],
    "import f --out o": ["--ood=a", "--train=a", "--sequence_length=8"],
    "eval --list": [
        "--checkpoint=c",
        "--out=o",
        "--precision=32",
        "--prefix=none",
        "--batch_tokens=9",
        "--data_root=d",
    ],
    "scale run other": ["--sizes=1M", "--against=Mamba2", "--seeds=3", "--ladder=false", "--data=d", "--allow_code=x"],
    "scale --losses l.csv": ["--like=small", "--match=tokens", "--workers=2", "--tokens_per_parameter=9"],
    "scale --mixer Mamba2 --sizes 1M": ["--reference=a"],
    "generate --checkpoint c --prompt a": ["--batch_size=2"],
    "bench mixers --against fla": ["--model.n_layers=2", "--documents=9"],
    "mixers": ["--d_model=64"],
}


@pytest.mark.parametrize(("command", "flag"), [(each, flag) for each, flags in NO_EFFECT.items() for flag in flags])
def test_a_flag_that_would_have_no_effect(refuse, command, flag):
    name = flag.partition("=")[0].partition(".")[0]
    assert re.search(f"^{name} has no effect with(out)? --[a-z]+: leave it out$", refuse(*command.split(), flag))


def test_flags_before_a_command_and_of_another_one(refuse):
    assert refuse("mixers", "--json", "new", "A") == "--json has no effect with new: leave it out"
    assert refuse("data", "--workers", "2", "prepare", "x").startswith("unknown option --workers: ")
    for flag in ("--from=runs/a", "--profile=3"):
        said = refuse("validate", "--config", QUICKSTART, "--ckpt_path", "c", flag)
        assert said == f"{flag.partition('=')[0]} has no effect on seqarch validate: leave it out"


def test_groups_of_flags_name_flags_and_words():
    """The conditions that groups state can hold."""
    for name, command in COMMANDS.items():
        parsers = [command.parser(name)]
        for parser in parsers:
            commands = [each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
            parsers += [each for choices in commands for each in choices.values()]
            titles = [each.title or "" for each in parser._action_groups]
            groups = [title.split(" ") for title in titles if title.startswith("with")]
            words = " ".join(each.help or "" for each in parser._actions if not each.option_strings)
            assert all(other in parser._option_string_actions or f"`{other} " in words for _, other in groups)


@pytest.mark.parametrize(("tasks", "flag"), [("sciq", "--lengths=64"), ("LossByDomain", "--limit=3")])
def test_an_option_that_no_task_reads(refuse, tasks, flag):
    said = refuse("eval", "--checkpoint", "c", "--tasks", tasks, flag)
    assert said == f"{flag.partition('=')[0]} has no effect on {tasks}: leave it out"


EMPTY = ("import f --out o --tokenizer", "export c --out o --as", "data prepare a.txt --out o --domain d --where")


@pytest.mark.parametrize("command", [*EMPTY, "generate --prompt a --checkpoint", "eval --precision"])
def test_an_empty_text_is_no_default(refuse, command):
    *_, flag = command.split()
    assert refuse(*command.split(), "") == f"{flag[2:]} is empty: give it a value, or leave it out"
