import copy
import functools
import os
from concurrent.futures import Future
from unittest.mock import patch

import pytest

from seqarch import cli
from seqarch.errors import UserError
from seqarch.exam import pool
from seqarch.exam.plan import code_digest
from seqarch.experiment.recipes import merged_recipe
from tests.conftest import flags
from tests.exam.checked import checking_once

SHRUNK = {
    "data.train": "{docs: 1.0}",
    "data.ood": "[code]",
    "data.sequence_length": "48",
    "data.sequences_per_step": "4",
    "data.eval_tokens": "480",
    "trainer.accelerator": "cpu",
    "trainer.max_steps": "12",
    "trainer.enable_progress_bar": "false",
    "model.d_model": "32",
    "model.n_layers": "2",
    "model.warmup_steps": "1",
    "attention_entropy.every_n_steps": "12",
    "checkpoint.every_n_steps": "5",
    "ood_loss.at": "[0.25, 0.5, 0.7, 0.85, 1.0]",
    "ood_loss.tasks": "[{class_path: Copying, init_args: {sequences: 4}}]",
}
"""Options with which the size `tiny` runs in a second; the data come on top."""


class InProcess:
    """Replaces `Worker`: trains in this process, because another takes seconds to start."""

    def __init__(self, work, gpus=None, threads=None): ...

    def fit(self, args):
        with patch.dict(os.environ):  # as a process of its own leaves them
            answer = pool.fit(args)
        if answer:
            raise UserError(answer)

    def stop(self): ...

    def close(self): ...


class InTurn:
    """Replaces `ThreadPoolExecutor`: makes runs one after the other, in the thread that may handle signals."""

    def __init__(self, threads): ...

    def __enter__(self):
        return self

    def __exit__(self, *raised): ...

    def submit(self, make, *args):
        done = Future()
        done.set_result(make(*args))
        return done


@pytest.fixture(autouse=True, scope="session")
def recipes_are_read_once():
    """Cache the recipes that define a mixer's shell: reading them takes most of the time to find an exam's models."""
    read = functools.cache(merged_recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.exam.derive.merged_recipe", lambda path: copy.deepcopy(read(path)))
        yield


@pytest.fixture(autouse=True, scope="session")
def models_are_checked_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.exam.run.measure", checking_once())
        yield


@pytest.fixture(autouse=True, scope="session")
def code_stays_the_same():
    """Fix the digest of the code: if the source is edited while tests run, their shared runs would count as others."""
    digest = functools.cache(code_digest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.exam.run.code_digest", lambda packages: digest(frozenset(packages)))
        yield


def write_no_figures(comparison, out):
    """Replaces `Comparison.write`: drawing takes longer than the training of small models."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("index.html", "scatter.png"):
        (out / name).touch()
    return [out / "index.html"]


def examiner(shards, folder, patch):
    """A function that runs `seqarch exam` on the small domains, without another process or figures.

    It writes into a folder of `folder`, where the cache is too, and returns the folder of the size.
    """
    patch.setenv("SEQARCH_CACHE", str(folder / "cache"))
    patch.setattr("seqarch.exam.pool.Worker", InProcess)
    patch.setattr("seqarch.exam.pool.ThreadPoolExecutor", InTurn)
    patch.setattr("seqarch.report.comparison.Comparison.write", write_no_figures)

    def run(*args, out="out", **options):
        options = {**SHRUNK, **options}
        base = ["--data", str(shards), "--seeds", "1", "--out", str(folder / out)]
        cli.run(["exam", *base, *args, *flags(**options)])
        return folder / out / "tiny"

    return run


@pytest.fixture
def exam(shards, tmp_path, monkeypatch):
    return examiner(shards, tmp_path, monkeypatch)
