"""Tasks that a recipe names: built in, and from a package that seqarch does not know."""

import csv
import re
from pathlib import Path

import pytest

from seqarch.errors import UserError
from seqarch.evaluation import Copying
from seqarch.evaluation.registry import import_tasks
from tests.cli.test_plugin import install, seqarch
from tests.conftest import MODEL, TINY, flags


def rows(run_dir):
    with (run_dir / "curves.csv").open(newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file)}


def test_built_in_tasks_are_registered():
    assert import_tasks().keys() >= {"Copying", "LossByDomain", "LossByPosition", "LongDocuments"}
    assert import_tasks()["Copying"] is Copying


@pytest.mark.commands
def test_a_run_logs_further_tasks_and_trains_as_without_them(fit):
    plain = rows(fit("plain"))
    position = "{class_path: LossByPosition, init_args: {edges: [16]}}"
    callback = "{class_path: EvaluateTasks, init_args: {every_n_steps: 1, tasks: [" + position + "]}}"
    more = rows(fit("more", **{"ood_loss.tasks": "[Copying]", "trainer.callbacks": f"[{callback}]"}))
    tags = ("copying/loss_first", "copying/loss_again", "copying/gain")
    assert all(bool(more[step].get(tag)) == (step % 2 == 0) for step in range(5) for tag in tags)
    assert all(more[step][f"loss_by_position/code/{part}"] for step in range(5) for part in ("0-16", "16-48"))
    assert all(bool(plain[step].get("bits_per_byte/ood/code")) == (step % 2 == 0) for step in range(5))
    times = ("throughput/tokens_per_second",)
    for step, row in plain.items():
        assert {tag: more[step][tag] for tag in row if tag not in times} == {
            tag: value for tag, value in row.items() if tag not in times
        }


def test_a_task_that_is_none_is_refused(fit):
    with pytest.raises(UserError, match="Copyng"):
        fit(**{"ood_loss.tasks": "[Copyng]"})


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package of the page "How to add a task", installed into a folder of its own."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    section = (ROOT / "docs/evaluation.md").read_text().partition("## How to add a task")[2]
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", section, re.DOTALL))
    (source / "reversed_text.py").write_text(blocks["python"])
    (source / "pyproject.toml").write_text(blocks["toml"])
    install(source, site)
    return site


@pytest.mark.commands
def test_a_task_of_another_package_is_two_files(package, shards, tmp_path):
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / "run", "ood_loss.tasks": "[ReversedText]"}
    installed = {"paths": [package], "logs": tmp_path / "logs"}
    done = seqarch("fit", *flags(**options), **installed)
    assert done.returncode == 0, done.stderr
    logged = {step: row["reversed/loss"] for step, row in rows(tmp_path / "run").items() if row["reversed/loss"]}
    assert logged.keys() == {0, 2, 4}
    checkpoint = tmp_path / "run/checkpoints/step_00000004.ckpt"
    done = seqarch("validate", "--config", tmp_path / "run/config.yaml", "--ckpt_path", checkpoint, **installed)
    assert done.returncode == 0, done.stderr
    (printed,) = re.findall(r"reversed/loss\D+([\d.]+)", done.stdout)
    assert float(printed) == pytest.approx(float(logged[4]), rel=1e-6)


def test_without_its_package_a_task_is_unknown(fit):
    with pytest.raises(UserError, match="ReversedText"):
        fit(**{"ood_loss.tasks": "[ReversedText]"})
