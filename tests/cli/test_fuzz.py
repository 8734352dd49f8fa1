"""Random recipes, flags and files never give a traceback. A command takes them, or refuses in one line with status 2.

FUZZ=10000 python -m pytest tests/cli/test_fuzz.py   # many more cases than the suite has time for, other ones each time
"""

import contextlib
import json
import os
import shutil
import string
import warnings
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer

from seqarch import cli
from seqarch.errors import UserError
from seqarch.experiment.checker import options_of
from seqarch.experiment.parser import recipe_parser
from seqarch.report import compare
from tests.conftest import MODEL, TINY, flags
from tests.report.runs_for_tests import write_run

CASES = int(os.environ.get("FUZZ", "0"))
ODD = ["", "null", "~", "{", "[", "&a [*a]", "*a", "!!python/object:x.Y", "3: 4", "a: b", "os.system", "\x00", "\ud800"]
ODD += ["1e400", "-0", ".nan", "0x20", "2001-13-45", "é"]
NAMES = ["Attention", "Top1Chunk", "GeGLU", "EarlyStopping", "attention", "docs", "quickstart"]
KEYS = sorted(key for key in options_of(recipe_parser()) if key not in ("config", "print_config"))
INSIDE = ["class_path", "init_args", "dict_kwargs", "n_heads", "a", "docs", ""]
FACTS = ["name", "seed", "status", "mixers", "pattern", "parameters", "max_steps", "train", "ood", "unigram_entropy"]
FACTS += ["versions", "hardware", "flops_counted", "tokenizer", "started", "commit"]


def misspelt(key):
    return st.sampled_from([key[:-1], f"{key}.x", f"{key}+", f".{key}", key.replace(".", "..")])


def mappings(of):
    return st.dictionaries(st.sampled_from(INSIDE) | scalars, of, max_size=3)


numbers = st.integers(-3, 40) | st.integers() | st.floats()
scalars = st.sampled_from([*ODD, *NAMES]) | st.none() | st.booleans() | numbers
scalars |= st.text(string.printable, max_size=6)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | mappings(inner), max_leaves=6)
keys = st.sampled_from(KEYS) | st.sampled_from(KEYS).flatmap(misspelt) | st.text(string.printable, max_size=5)
sections = st.sampled_from(["trainer", "model", "data", "extends"])
rows = st.dictionaries(st.sampled_from(["text", "x"]), values, max_size=2).map(lambda row: json.dumps(row).encode())


def bounded(cases):
    return settings(
        max_examples=CASES or cases,
        derandomize=not CASES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )


@pytest.fixture(scope="module")
def place(shards, tmp_path_factory):
    """A folder to work in, where no training starts."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        patch.setattr(Trainer, "fit", lambda *args, **options: None)
        patch.setattr("seqarch.experiment.experiment.outcome", str)
        (folder / "base.yaml").write_text(yaml.safe_dump(nested({**TINY, **MODEL, "data.root": str(shards)})))
        yield folder


def nested(options):
    """Nest options that are given by dotted names, as a recipe does."""
    recipe: dict[str, Any] = {"run_dir": "run"}
    for key, value in options.items():
        section, _, name = key.partition(".")
        recipe.setdefault(section, {})[name] = yaml.safe_load(value)
    return recipe


def survives(capfd, args):
    """Run a command: it ends well or is refused in one line. Return the exit status."""
    capfd.readouterr()
    try:
        cli.main(args)
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    said = capfd.readouterr().err
    assert status in (0, 2), (status, said)
    assert "Traceback" not in said
    errors = [line for line in said.splitlines() if line.startswith("seqarch: error: ")]
    assert len(errors) == (1 if status else 0), said
    return status


@bounded(60)
@given(content=st.dictionaries(keys | sections, values, max_size=3), deep=st.booleans())
def test_recipe(place, capfd, content, deep):
    recipe = {"extends": "base.yaml", **content}
    if deep:
        for key in [key for key in content if "." in key]:
            section, _, name = key.partition(".")
            if isinstance(recipe.setdefault(section, {}), dict):
                recipe[section][name] = recipe.pop(key)
    try:
        (place / "r.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True))
    except (UnicodeEncodeError, yaml.YAMLError):
        return
    survives(capfd, ["fit", "--config", "r.yaml"])


@bounded(60)
@given(options=st.lists(st.tuples(keys, values, st.booleans()), min_size=1, max_size=3))
def test_flags(place, capfd, options):
    args = []
    for key, value, equals in options:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        args += [f"--{key}={text}"] if equals else [f"--{key}", text]
    survives(capfd, ["fit", "--config", "base.yaml", *args])


@bounded(30)
@given(content=st.binary(max_size=60) | st.text(string.printable, max_size=60).map(str.encode))
def test_file_that_is_hardly_a_recipe(place, capfd, content):
    (place / "r.yaml").write_bytes(content)
    survives(capfd, ["fit", "--config", "base.yaml", "--config", "r.yaml"])


@bounded(40)
@given(
    name=st.sampled_from(["run.json", "config.yaml", "curves.csv"]),
    content=st.binary(max_size=40),
    facts=st.dictionaries(st.sampled_from(FACTS), values, max_size=2),
)
def test_run_folder(place, name, content, facts):
    folder = write_run(place / "a", "a", steps=40)
    write_run(place / "b", "b", steps=40)
    path = folder / name
    if name == "run.json":
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    else:
        path.write_bytes(path.read_bytes()[: len(content) * 20] + content)
    with contextlib.suppress(UserError):
        assert compare([folder, place / "b"]).table


@bounded(40)
@given(lines=st.lists(st.binary(max_size=30) | rows, max_size=4))
def test_text_to_prepare(place, capfd, lines):
    (place / "t.jsonl").write_bytes(b"\n".join(lines))
    shutil.rmtree(place / "out", ignore_errors=True)
    options = ["--out", "out", "--domain", "d", "--tokenizer", "byte", "--workers", "1"]
    survives(capfd, ["data", "prepare", "t.jsonl", *options])


@bounded(3)
@given(
    mixer=st.sampled_from(["Attention", "Top1Chunk", "Top1Element", "DeltaNet", "RWKV7", "Based"]),
    heads=st.integers(1, 4),
    options=st.fixed_dictionaries(
        {
            "model.feed_forward": st.sampled_from(["GeGLU", "SwiGLU", "null"]),
            "model.norm": st.sampled_from(["rmsnorm", "layernorm"]),
            "model.tie_embeddings": st.sampled_from(["true", "false"]),
            "model.learned_positions": st.sampled_from(["0", "48", "5"]),
            "data.sequence_length": st.sampled_from(["1", "2", "48"]),
            "data.eval_tokens": st.sampled_from(["1", "192"]),
            "trainer.gradient_clip_val": st.sampled_from(["0", "null", "1.0"]),
        }
    ),
)
def test_whole_runs(shards, tmp_path_factory, without_figures, capfd, mixer, heads, options):
    mixers = json.dumps({"a": {"class_path": mixer, "init_args": {"n_heads": heads}}})
    options |= {"model.mixers": mixers, "trainer.max_steps": 2, "data.root": shards}
    run = tmp_path_factory.mktemp("whole") / "run"
    survives(capfd, ["fit", *flags(**{**TINY, **MODEL, **options, "run_dir": run})])
