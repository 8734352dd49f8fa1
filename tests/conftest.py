import atexit
import functools
import gc
import importlib.util
import json
import logging
import os
import time
from importlib.metadata import entry_points

import filelock
import pytest

from seqarch import cli, versions
from seqarch.data import verified
from seqarch.data.prepare import prepare
from tests.processes import SAMPLE
from tests.texts import code, prose

TINY = {
    "trainer.accelerator": "cpu",
    "trainer.devices": "1",
    "trainer.strategy": "auto",
    "trainer.precision": "32-true",
    "trainer.enable_progress_bar": "false",
    "model.vocab_size": "257",
    "model.compile": "false",
    "model.warmup_steps": "0",
    "data.train": "{docs: 1.0}",
    "data.ood": "[code]",
    "data.sequence_length": "48",
    "data.sequences_per_step": "4",
    "data.micro_batch_size": "2",
    "data.eval_tokens": "192",
    "data.num_workers": "0",
}
"""Options with which any recipe runs in a second on a CPU; folders and the model's size come on top."""

MODEL = {
    "model.d_model": "32",
    "model.n_layers": "2",
    "model.mixers": "{attention: {class_path: Attention, init_args: {n_heads: 4}}}",
    "model.feed_forward": "GeGLU",
    "trainer.max_steps": "4",
    "ood_loss.every_n_steps": "2",
    "attention_entropy.every_n_steps": "2",
    "train_loss.every_n_steps": "1",
    "throughput.every_n_steps": "2",
    "checkpoint.every_n_steps": "2",
}


def flags(**groups):
    return [f"--{key}={value}" for key, value in groups.items()]


def wait_for(found, seconds=60):
    """What `found` gives, as soon as that is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def pytest_runtest_setup(item):
    """Draw the same random numbers in each run, and tune fla's kernels with few settings.

    Import fla as our ops do, before a test imports its layers. On a GPU an `Experiment` lets PyTorch multiply
    float32 in TF32 from then on; tests that follow in its process must not.
    """
    import torch  # not above: pytest-xdist's controller runs no test, and its workers wait for it

    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(int(os.environ.get("SEQARCH_TEST_SEED", "0")))
    if item.get_closest_marker("gpu") and importlib.util.find_spec("fla"):
        from seqarch.kernels.fla_tuning import fla_module

        fla_module("fla")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Give back cached GPU memory, which other processes of pytest-xdist may need."""
    if item.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()


@pytest.fixture
def most_gpu_memory(tmp_path_factory):
    """Wait until no other process of this run holds tensors of tens of GiB on the GPU, and give this test's back."""
    with filelock.FileLock(tmp_path_factory.getbasetemp().parent / "gpu_memory.lock"):
        yield
        import torch

        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """Two small domains of bytes: `docs` (prose) and `code`."""
    folder = tmp_path_factory.mktemp("shards")
    for domain, texts in {"docs": prose(60), "code": code(15)}.items():
        file = folder / f"{domain}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare([file], folder, domain, "byte", holdout=0.3, workers=1)
    return folder


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """Mark tests by their fixture and their name.

    Coverage doubles the time of torch.compile. Compiled code has also run uncompiled, so coverage leaves it out.
    """
    for item in items:
        if "most_gpu_memory" in item.fixturenames:
            item.add_marker(pytest.mark.most_gpu_memory)
        if item.name.startswith("test_compile["):  # of MixerSuite
            item.add_marker(pytest.mark.no_cover)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Search for garbage neither while modules are imported nor later among them: 4 s in a process of all tests.

    Search after 10,000 new objects instead of 700, as compilers and interpreters make millions.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


if "PYTEST_XDIST_WORKER" in os.environ:
    atexit.register(os._exit, 0)  # its results are sent, and to destroy all objects one by one takes a worker 5 s


def pytest_unconfigure(config):
    gc.unfreeze()  # what extensions still hold at the end they call a leak


@pytest.fixture(autouse=True, scope="session")
def matches_are_remembered_elsewhere(tmp_path_factory):
    """Note which shards match their checksums in a folder of the tests, not in the user's cache."""
    folder = tmp_path_factory.mktemp("verified")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verified, "memory_folder", lambda: folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def git_is_asked_once():
    """Each run notes the commit: for hundreds of small runs git would compare all files as often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.training.run_folder.commit", functools.cache(versions.commit))
        yield


@pytest.fixture(autouse=True, scope="session")
def callbacks_are_searched_for_once():
    """Each `Trainer` searches the metadata of all packages for callbacks, which takes a twentieth of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.fabric.utilities.registry.entry_points", functools.cache(entry_points))
        yield


@pytest.fixture(autouse=True, scope="session")
def only_the_root_logger_is_caught():
    """pytest searches all loggers for those that do not propagate, six times per test: 2 ms.

    To be caught makes torch.compile's logger write each graph, a sixth of the time of compilation.
    """
    from _pytest.logging import catching_logs

    def attach(self):
        if self.level is not None:
            return enter(self)
        logging.getLogger().addHandler(self.handler)
        self.attached_loggers.append(logging.getLogger())
        return self.handler

    enter = catching_logs.__enter__
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(catching_logs, "attached_loggers"):  # pytest 9.1 and later
            patch.setattr(catching_logs, "__enter__", attach)
        yield


@pytest.fixture(autouse=True, scope="session")
def only_devices_that_are_there_are_seeded():
    """`torch.manual_seed` formats the stack for each kind of device that is not there: 1 ms, several times a test."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if not torch.accelerator.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed():
    """To time the guards of a compiled graph PyTorch first empties the processor's caches: 0.07 s for each graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def few_training_tokens_are_sampled():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.evaluation.recall.SAMPLE", SAMPLE)
        yield


@pytest.fixture
def without_figures(monkeypatch):
    """`seqarch fit` draws no figures at its end: they take longer than the training of a small model."""
    monkeypatch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])


@pytest.fixture
def fit(shards, tmp_path, without_figures):
    """Runs `seqarch fit` on the small domains with a small model and without figures; returns the run folder."""

    def run(name="run", **options):
        options = {**TINY, **MODEL, "data.root": shards, "run_dir": tmp_path / name, **options}
        cli.run(["fit", *flags(**options)])
        return tmp_path / name

    return run
