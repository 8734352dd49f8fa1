"""Recording a model's queries and keys, and the shares of chunks that bounds leave."""

from pathlib import Path

import pytest
import torch

from benchmarks.kernels import trained
from benchmarks.kernels.trained import RANDOM, record, samples, shares
from seqarch.errors import UserError
from seqarch.kernels.top1_chunk.op import select_chunks_reference
from seqarch.mixers.attention import Top1Chunk
from seqarch.model import SequenceLM


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The file of a model with two layers. The first heads were recorded on 40 bytes."""

    class Bytes:
        def encode(self, text):
            return list(text.encode())

    torch.manual_seed(0)
    lm = SequenceLM(256, 32, 2, {"top1": lambda *place: Top1Chunk(*place, n_heads=4, n_kv_heads=2, chunk_size=8)})
    monkeypatch.setattr("seqarch.experiment.load.load", lambda checkpoint: (lm, Bytes()))
    (tmp_path / "text").write_text("x" * 64)
    record(tmp_path / "checkpoint", tmp_path / "text", tmp_path / "out", 40, heads=3)
    with pytest.raises(UserError, match="has 64 tokens, fewer than the 65 to record"):
        record(tmp_path / "checkpoint", tmp_path / "text", tmp_path / "out", 65)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="latin is not UTF-8 text"):
        record(tmp_path / "checkpoint", tmp_path / "latin", tmp_path / "new" / "out", 4)
    with pytest.raises(UserError, match="there is no file 'nope': name a file of text"):
        record(tmp_path / "checkpoint", Path("nope"), tmp_path / "out", 4)
    with pytest.raises(UserError, match="--length must be at least 1, not -5"):
        record(tmp_path / "checkpoint", tmp_path / "text", tmp_path / "out", -5)
    return tmp_path / "out"


def test_recorded_layers_follow_the_random_vectors(recorded):
    found = list(samples(recorded, ((40, 2, 16),)))
    assert [(name, scale) for name, _, scale in found] == [
        *((RANDOM, scale) for scale in (0.25, 1.0, 4.0, 16.0)),
        *((f"recorded layer {layer}", pytest.approx(8**0.5 / 8)) for layer in range(2)),
    ]
    assert [tuple(t.shape) for t in found[-1][1]] == [(1, 40, 3, 8)] * 3


def draw(T=200, H=2, D=16):
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, D), dim=-1) for _ in range(2))
    return q, k


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_no_bound_rules_out_the_heaviest_chunk(scale, monkeypatch):
    """With one query per block both shares are per query, and at least the selected chunk is left."""
    monkeypatch.setattr(trained, "BLOCK", 1)
    q, k = draw()
    chunks = select_chunks_reference(q, k, 8, "exact", scale)
    earlier = torch.arange(200) // 8
    least = float((chunks >= 0).sum() / (2 * earlier.sum()))
    found = shares(q, k, scale, 8)
    assert found["mean"] == pytest.approx(found["mean_block"])
    assert found["max"] == pytest.approx(found["max_block"])
    assert all(least <= share <= 1 for share in found.values())


def test_means_decide_among_equal_scores_and_maxima_among_large_ones():
    q, k = draw()
    flat, sharp = shares(q, k, 0.01, 8), shares(q, k, 100.0, 8)
    assert flat["mean"] < 0.5 < flat["max"] == 1
    assert sharp["max"] < 0.5 < sharp["mean"] == 1
    assert all(found[f"{name}_block"] >= found[name] for found in (flat, sharp) for name in ("mean", "max"))
