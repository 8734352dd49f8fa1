"""Random recipes, flags and files never give a traceback. A command takes them, or refuses in one line with status 2.

FUZZ=10000 python -m pytest tests/cli/test_fuzz.py   # many more cases than the suite has time for
SEQARCH_TEST_SEED=1 python -m pytest tests/cli/test_fuzz.py   # other ones
"""

import contextlib
import json
import math
import os
import random
import shutil
import string
import sys
import warnings
from typing import Any

import pytest
import yaml
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
SECTIONS = ["trainer", "model", "data", "extends"]


class Draw(random.Random):
    """Draws the values of one case."""

    def some(self, one, most=3):
        return [one() for _ in range(self.randint(0, most))]

    def text(self, most=6):
        return "".join(self.some(lambda: self.choice(string.printable), most))

    def bytes(self, most):
        return self.randbytes(self.randint(0, most))

    def number(self):
        huge = self.choice([2**31, 2**63, 10**30])
        special = [math.nan, math.inf, -math.inf, 5e-324, sys.float_info.max, self.uniform(-1, 1)]
        return self.choice([self.randint(-3, 40), self.randint(-huge, huge), self.choice(special)])

    def scalar(self):
        return self.choice([self.choice([*ODD, *NAMES]), None, self.random() < 0.5, self.number(), self.text()])

    def value(self, deep=3):
        """A scalar, a list or a mapping."""
        if not deep or self.random() < 0.6:
            return self.scalar()
        if self.random() < 0.5:
            return self.some(lambda: self.value(deep - 1))
        return dict(self.some(lambda: (self.choice([self.choice(INSIDE), self.scalar()]), self.value(deep - 1))))

    def key(self):
        """An option, well or badly spelt, or anything."""
        key = self.choice(KEYS)
        misspelt = [key[:-1], f"{key}.x", f"{key}+", f".{key}", key.replace(".", "..")]
        return self.choice([key, self.choice(misspelt), self.text(5)])


def cases(count):
    """Give a test `draw` for so many cases."""
    return pytest.mark.parametrize("draw", range(CASES or count), indirect=True)


@pytest.fixture
def draw(request):
    return Draw(f"{os.environ.get('SEQARCH_TEST_SEED', '0')} {request.param}")


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


@cases(60)
def test_recipe(place, capfd, draw):
    content = {draw.choice([draw.key(), draw.choice(SECTIONS)]): draw.value() for _ in range(draw.randint(1, 3))}
    recipe = {"extends": "base.yaml", **content}
    if draw.random() < 0.5:
        for key in [key for key in content if "." in key]:
            section, _, name = key.partition(".")
            if isinstance(recipe.setdefault(section, {}), dict):
                recipe[section][name] = recipe.pop(key)
    try:
        (place / "r.yaml").write_text(yaml.safe_dump(recipe, allow_unicode=True))
    except (UnicodeEncodeError, yaml.YAMLError):
        return
    survives(capfd, ["fit", "--config", "r.yaml"])


@cases(60)
def test_flags(place, capfd, draw):
    args = []
    for _ in range(draw.randint(1, 3)):
        key, value = draw.key(), draw.value()
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        args += draw.choice([[f"--{key}={text}"], [f"--{key}", text]])
    survives(capfd, ["fit", "--config", "base.yaml", *args])


@cases(30)
def test_file_that_is_hardly_a_recipe(place, capfd, draw):
    (place / "r.yaml").write_bytes(draw.choice([draw.bytes(60), draw.text(60).encode()]))
    survives(capfd, ["fit", "--config", "base.yaml", "--config", "r.yaml"])


@cases(40)
def test_run_folder(place, draw):
    folder = write_run(place / "a", "a", steps=40)
    write_run(place / "b", "b", steps=40)
    path = folder / draw.choice(["run.json", "config.yaml", "curves.csv"])
    if path.name == "run.json":
        facts = {draw.choice(FACTS): draw.value() for _ in range(2)}
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    else:
        content = draw.bytes(40)
        path.write_bytes(path.read_bytes()[: len(content) * 20] + content)
    with contextlib.suppress(UserError):
        assert compare([folder, place / "b"]).table


@cases(40)
def test_text_to_prepare(place, capfd, draw):
    row = {name: draw.value() for name in draw.some(lambda: draw.choice(["text", "x"]), 2)}
    lines = draw.some(lambda: draw.choice([draw.bytes(30), json.dumps(row).encode()]), 4)
    (place / "t.jsonl").write_bytes(b"\n".join(lines))
    shutil.rmtree(place / "out", ignore_errors=True)
    options = ["--out", "out", "--domain", "d", "--tokenizer", "byte", "--workers", "1"]
    survives(capfd, ["data", "prepare", "t.jsonl", *options])


@cases(3)
def test_whole_runs(shards, tmp_path, without_figures, capfd, draw):
    mixer = draw.choice(["Attention", "Top1Chunk", "Top1Element", "DeltaNet", "RWKV7", "Based"])
    options = {
        "model.mixers": json.dumps({"a": {"class_path": mixer, "init_args": {"n_heads": draw.randint(1, 4)}}}),
        "model.feed_forward": draw.choice(["GeGLU", "SwiGLU", "null"]),
        "model.norm": draw.choice(["rmsnorm", "layernorm"]),
        "model.tie_embeddings": draw.choice(["true", "false"]),
        "model.learned_positions": draw.choice(["0", "48", "5"]),
        "data.sequence_length": draw.choice(["1", "2", "48"]),
        "data.eval_tokens": draw.choice(["1", "192"]),
        "trainer.gradient_clip_val": draw.choice(["0", "null", "1.0"]),
        "trainer.max_steps": 2,
        "data.root": shards,
        "run_dir": tmp_path / "run",
    }
    survives(capfd, ["fit", *flags(**{**TINY, **MODEL, **options})])
