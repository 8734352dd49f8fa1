"""Takes the commands of the pages as far as a machine without their text, their runs and their GPUs can."""

import copy
import dataclasses
import functools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from jsonargparse import Namespace
from seqarch_recall.model import build, derived
from seqarch_recall.run import Point

from seqarch.bench.jobs import Job
from seqarch.bench.kernels import STEPS
from seqarch.cli.commands import COMMANDS, find_command
from seqarch.data.datamodule import TextDataModule
from seqarch.data.prepare import Preparation
from seqarch.data.tokenizers import load_tokenizer
from seqarch.evaluation import Asked
from seqarch.evaluation.registry import tasks_named
from seqarch.exam.plan import Exam
from seqarch.exam.train import FIRST, rung_of
from seqarch.experiment.experiment import Experiment
from seqarch.experiment.recipes import merged_recipe
from tests.exam.checked import checking_once

RECIPES = Path(__file__).parents[1] / "recipes"
CHECK = checking_once()
READ = functools.cache(merged_recipe)


def check_training(command: str, args: list[str]) -> None:
    """Read the arguments of `fit`, `validate` or `test`, and check the schedule and the batches of `fit`."""
    experiment = Experiment(args)
    options = experiment.options
    assert options.run_dir if command == "fit" else options.ckpt_path
    if command == "fit":
        with mock.patch("seqarch.experiment.experiment.check_machine"):  # the reader's has the devices
            experiment.check()


def check_command(command: str, options: Namespace, patch: pytest.MonkeyPatch) -> None:
    """Check parsed options of another command: build the models that it would train or time, without memory."""
    if command == "exam":
        _check_exam(options, patch)
    elif command == "recall":
        _check_recall(options, patch)
    elif command == "bench":
        _check_bench(options, patch)
    elif command == "eval" and options.tasks:
        tasks_named(options.tasks, Asked(options.limit, options.lengths and tuple(options.lengths)))
    elif command == "data" and options.command == "prepare":
        Preparation(**vars(options.prepare)).check()


def _check_exam(options: Namespace, patch: pytest.MonkeyPatch) -> None:
    """An exam up to its first run; its text stays closed."""
    checked: list[Any] = []

    def train(exam: Exam, *_: Any, **__: Any) -> None:
        for entrant in exam.entrants if exam.ladder else ():
            CHECK(entrant.name, dict(rung_of(entrant, FIRST[0]).recipe), exam.allow_code)
        checked.extend(exam.entrants)
        raise KeyboardInterrupt

    patch.setattr("seqarch.experiment.experiment.check_machine", lambda _: None)
    patch.setattr("seqarch.exam.run.find_shards", lambda *_: "shards")
    patch.setattr("seqarch.exam.run._say_long", lambda *_: None)
    for name in ("prepare_data", "setup", "evaluation_sets", "checksums"):
        patch.setattr(TextDataModule, name, lambda *_: {})
    patch.setattr(TextDataModule, "tokenizer", load_tokenizer("byte" if options.size == "tiny" else "mixtral"))
    patch.setattr("seqarch.exam.run.train", train)
    patch.setattr("seqarch.exam.run.measure", CHECK)
    patch.setattr("seqarch.exam.derive.merged_recipe", lambda path: copy.deepcopy(READ(path)))  # many exams read one
    with suppress(KeyboardInterrupt):  # by `train`, in place of training
        COMMANDS["exam"].run(options)
    assert checked


def _check_recall(options: Namespace, patch: pytest.MonkeyPatch) -> None:
    """The model of each point."""

    def make(point: Point, _: Any) -> None:
        one = [[{**each, "n": 1} for each in part] for part in (point.settings.train, point.settings.test)]
        settings = dataclasses.replace(point.settings, train=one[0], test=one[1])
        longest, length = (
            max(each.inputs.shape[1] for each in part) for part in (settings.training(0), settings.testing())
        )
        found = derived(settings, point.mixer, point.width, longest, point.options)
        with torch.device("meta"):
            build(settings, point.mixer, point.width, found, length)

    patch.setattr("seqarch_recall.run._make", make)
    patch.setattr("seqarch_recall.run.collect", lambda _: [])
    patch.setattr("seqarch_recall.run.table", lambda _: [])
    find_command("recall").run(options)


def _check_bench(options: Namespace, patch: pytest.MonkeyPatch) -> None:
    """The steps of `kernels`, or each model that a job would time."""
    if options.command == "kernels":
        assert {*options.kernels.steps} - {*STEPS} == set()
        return
    jobs: list[Job] = []
    patch.setattr("seqarch.cli.bench.bench_mixers", lambda found, *_, **__: jobs.extend(found))
    patch.setattr("seqarch.bench.generation.bench_generation", lambda found, *_: jobs.extend(found))
    COMMANDS["bench"].run(options)
    for job in jobs:
        if recipe := job.options.get("recipe"):
            path, overrides = Path(recipe).resolve(), job.options["overrides"]
            known = path.is_relative_to(RECIPES) and not any(key.startswith("model.") for key in overrides)
            # tests/cli/test_recipes.py builds the models of recipes as they are
            _build("quickstart" if known else str(path), json.dumps([overrides, job.options["allow_code"]]))
    assert jobs


@functools.cache  # pages time the same models
def _build(recipe: str, options: str) -> None:
    Experiment.from_recipe(recipe, *json.loads(options)).build_on_meta()
