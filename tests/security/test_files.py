"""Other people's YAML, links, shards and texts reach no other file and change nothing."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from seqarch import cli
from seqarch.errors import UserError
from seqarch.experiment.tree import NUMBER
from seqarch.safe_yaml import check_plain, load
from tests.conftest import MODEL, TINY, flags
from tests.security.conftest import BOMB


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "aliases in it repeat each other"),
        ("a: &a {b: *a}\n", "aliases in it repeat each other"),
        (f"model: {{mixers: {json.dumps(BOMB)}}}\n", "aliases in it repeat each other"),
        ("a: " + "[" * 200 + "]" * 200, "nests too deeply"),
        (
            "model:\n  d_model: !!python/object/apply:os.system ['touch PWN']\n",
            ":2: '!!python/object/apply:os.system' is",
        ),
        ("model: !thing {d_model: 3}\n", ":1: '!thing' is a tag"),
        ("? [a, b]\n: 3\n", ":1: a key must be a word"),
        (f"model:\n  d_model: 0x{'f' * 20_000}\n", ":2: a number has 20,002 digits"),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("where", ["fit", "report", "exam"])
def test_yaml_is_plain_and_small(refused, trained, tmp_path, where, text, said):
    if where != "fit" and text != BOMB and "os.system" not in text and "fff" not in text:
        return
    if where == "report":
        shutil.copytree(trained, tmp_path / "run")
        (tmp_path / "run/config.yaml").write_text(text)
        assert said in refused("report", "run", "--out", "out")
        return
    (tmp_path / "r.yaml").write_text(text)
    args = {"fit": ["fit", "--config"], "exam": ["exam", "--mixer"]}[where]
    assert said in refused(*args, "r.yaml")


def test_long_number_is_judged_quickly():
    numbers = ("1", "+1_0", "1.", "1._2", ".5", "-.5e+3", "1.5E-7", "1e3", ".inf", "-.NaN")
    assert all(NUMBER.fullmatch(text) for text in numbers)
    assert not any(NUMBER.fullmatch(text) for text in ("", ".", "_1", "._1", "1.2.3", "e3", "1e", "inf", "0x1", "1x"))
    start = time.monotonic()
    assert not NUMBER.fullmatch("1" * 100_000 + "x")
    assert time.monotonic() - start < 1


def test_text_that_aliases_repeat_is_judged_once(tmp_path):
    text = "[" + "1," * 1000 + "]"
    (tmp_path / "r.yaml").write_text(f'a: &a "{text}"\nb: [{", ".join(["*a"] * 10_000)}]\n')
    start = time.monotonic()
    assert load(tmp_path / "r.yaml")["b"] == [text] * 10_000
    check_plain("texts", [text] * 10_000)
    assert time.monotonic() - start < 20


def test_links_do_not_lead_fit_out_of_a_run_folder(refused, trained, shards, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    options = flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run", "trainer.max_steps": 1})
    for name in ("config.yaml.partial", "lock", "checkpoints/step_00000001.ckpt.partial", "elsewhere"):
        shutil.copytree(trained, tmp_path / "run")
        (tmp_path / "run" / name).symlink_to(tmp_path if name == "elsewhere" else victim)
        assert f"{tmp_path / 'run' / name} is a link that leads out of the folder" in refused("fit", *options)
        assert victim.read_text() == "mine"
        shutil.rmtree(tmp_path / "run")


COMMANDS = {
    "fit": ["fit", *flags(**{**TINY, **MODEL, "data.root": "data", "run_dir": "run", "trainer.max_steps": 1})],
    "fit other": ["fit", *flags(**{**TINY, **MODEL, "data.root": "data", "run_dir": "other"})],
    "report": ["report", "run", "--out", "out"],
    "generate": ["generate", "--checkpoint", "run", "--prompt", "a"],
    "eval": ["eval", "--checkpoint", "run", "--tasks", "Copying"],
    "show": ["data", "show", "data"],
    "check": ["data", "check", "data"],
    "prepare": ["data", "prepare", "t.jsonl", "--out", "data", "--domain", "docs", "--tokenizer", "byte"],
}


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
@pytest.mark.parametrize(
    ("place", "commands"),
    [
        ("run/curves.csv", ("fit", "report", "generate", "eval")),
        ("run/checkpoints/step_00000009.ckpt", ("fit", "generate", "eval")),
        ("run/evaluations/step_00000001/Copying.json", ("eval", "report")),
        ("run/lock", ("fit",)),
        ("data/docs/train/blocks.bin", ("fit other", "show", "check", "prepare")),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(refused, trained, shards, tmp_path, place, commands, kind):
    shutil.copytree(trained, tmp_path / "run")
    shutil.copytree(shards, tmp_path / "data")
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(place)
    else:
        path.symlink_to("/dev/zero")
    signal.alarm(120)  # ends a test that waits
    for command in commands:
        assert re.search(f"{place} is (neither a file nor a folder|a link that leads out)", refused(*COMMANDS[command]))
    signal.alarm(0)


@pytest.mark.commands
@pytest.mark.parametrize("entry", [None, "", ".", "inside"])
def test_the_command_starts_no_module_of_the_folder(tmp_path, entry):
    """Neither the installed command nor a process of it does, and the folder's packages declare no mixer."""
    script = tmp_path / "bin/seqarch"
    script.parent.mkdir()
    child = "import subprocess; subprocess.run([sys.executable, '-c', 'import pickle'], check=True)"
    later = "import numpy; from seqarch.plugins import MIXERS, entries; print(*entries(MIXERS))"
    script.write_text(f"import sys\nfrom seqarch.cli import main\nmain()\n{child}\n{later}\n")
    here = tmp_path / "theirs" / (entry or "")
    (here / "evil-1.dist-info").mkdir(parents=True)
    (here / "evil-1.dist-info/METADATA").write_text("Name: evil\nVersion: 1\n")
    (here / "evil-1.dist-info/entry_points.txt").write_text("[seqarch.mixers]\nEvil = evil:Evil\n")
    for name in ("pickle", "importlib", "argparse", "typing", "dataclasses", "numpy", "jsonargparse", "evil"):
        (here / f"{name}.py").write_text("open('PWN', 'w')\n")
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *([] if entry is None else [entry])])
    done = subprocess.run(
        [sys.executable, script, "recipes"],
        cwd=tmp_path / "theirs",
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"quickstart", "Attention"} <= {*done.stdout.split()}
    assert "Evil" not in done.stdout
    assert not list(tmp_path.rglob("PWN"))


def test_a_deleted_folder_is_refused(tmp_path):
    code = "import os, sys; os.rmdir(os.getcwd()); sys.argv[1:] = ['recipes']; from seqarch.cli import main; main()"
    (tmp_path / "gone").mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "gone", env=env, capture_output=True, text=True)
    assert done.stderr == "seqarch: error: the current folder was deleted: change to a folder that exists\n"


def test_messages_do_not_change_the_terminal(refused, tmp_path, capfd):
    (tmp_path / "r.yaml").write_text('model: {"\\e]0;owned\\a\\e[2J": 1}\n')
    said = refused("fit", "--config", "r.yaml")
    assert "?]0;owned??[2J" in said
    cli.main(["recipes", "copy", "quickstart", "\x1b[2J\x9b.yaml"])
    assert capfd.readouterr().out == "wrote ?[2J?.yaml\n"


def test_a_line_of_a_megabyte_is_cut(capsys, monkeypatch):
    def fail(*_):
        raise UserError("x" * 2**20)

    monkeypatch.setattr("seqarch.cli.app.run", fail)
    with pytest.raises(SystemExit):
        cli.main(["recipes"])
    assert capsys.readouterr().err.endswith(f"xx ... ({2**20 + 16:,} characters)\n")
    with warnings.catch_warnings():
        monkeypatch.setattr("seqarch.cli.app.run", lambda args: warnings.warn(f"{args[0]}\x1b[2J", stacklevel=1))
        cli.main(["y" * 5000])
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) < 2100


@pytest.mark.parametrize("name", ["../other/own", "..", "/etc", "docs/../../other/own"])
@pytest.mark.parametrize("option", ["train", "ood"])
def test_domains_lie_in_the_root(refused, shards, tmp_path, name, option):
    (tmp_path / "data").mkdir()
    for domain in ("docs", "code"):
        shutil.copytree(shards / domain, tmp_path / "data" / domain)
    shutil.copytree(shards / "docs", tmp_path / "other/own")
    value = f"{{{name}: 1.0}}" if option == "train" else f"[{name}]"
    options = {**TINY, **MODEL, "data.root": "data", "run_dir": "run", f"data.{option}": value}
    assert f"'{name}' is not a domain name" in refused("fit", *flags(**options))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {
                "data_spec": '[1, {"type": "collections.defaultdict", "context": {"default_factory_module": "trap", '
                '"default_factory_name": "Path", "dict_context": []}, "children_spec": []}]'
            },
            "it describes other data",
        ),
        ({"filename": "../../../code/train/chunk-0-0.bin"}, "which lies elsewhere"),
        ({"filename": ".."}, "it names .., which lies elsewhere"),
    ],
)
def test_index_of_shards_imports_nothing(refused, shards, tmp_path, change, said):
    shutil.copytree(shards, tmp_path / "data")
    path = tmp_path / "data/docs/train/index.json"
    index = json.loads(path.read_text())
    part = index["config"] if "data_spec" in change else index["chunks"][0]
    part.update(change)
    path.write_text(json.dumps(index))
    manifest = json.loads((tmp_path / "data/docs/manifest.json").read_text())
    manifest["splits"]["train"]["files"] = {}  # whoever writes one file can write the other
    (tmp_path / "data/docs/manifest.json").write_text(json.dumps(manifest))
    options = {**TINY, **MODEL, "data.root": "data", "run_dir": "run"}
    assert said in refused("fit", *flags(**options))
