"""A domain of two billion tokens opens and gives its first batch at once."""

import importlib.util
import os
import shutil
import time
from pathlib import Path

import pytest

SHARD = 1 << 22
"""Tokens of a shard. The 477 shards take longer to open than the 60 that `data prepare` would write."""


@pytest.fixture
def scale(monkeypatch):
    """The benchmark, with small shards that are links to one file."""
    path = Path(__file__).parents[2] / "benchmarks/data_scale.py"
    spec = importlib.util.spec_from_file_location("data_scale", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CHUNK_TOKENS", SHARD)
    monkeypatch.setattr("seqarch.data.assemble.CHUNK_TOKENS", SHARD)
    monkeypatch.setattr(shutil, "copyfile", os.link)
    return module


def test_two_billion_tokens(scale, tmp_path):
    scale.make_domain(tmp_path, round(2e9 / SHARD))
    start, (before, _) = time.process_time(), scale.memory(os.getpid())
    module = scale.data(tmp_path, 0)
    module.setup("fit")
    assert module._splits[0].domain.manifest.splits["train"].tokens > 1.99e9
    assert time.process_time() - start < 2
    batch = next(iter(module.train_dataloader()))
    assert batch["tokens"].shape == (16, scale.T + 1)
    assert time.process_time() - start < 5
    after, _ = scale.memory(os.getpid())
    assert after - before < 300  # MB
