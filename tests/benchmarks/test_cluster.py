"""The computed tables of a cluster count what the processes of a sequence exchange."""

import functools

import pytest
import torch

from benchmarks.tables.cluster import BF16, FLOAT32, bytes_of_a_piece
from seqarch.mixers import pieces
from seqarch.mixers.registry import load_mixer
from seqarch.model import SequenceLM


@pytest.mark.parametrize(
    ("mixer", "options", "itemsize"),
    [
        ("Attention", {"n_heads": 2}, BF16),
        ("Top1Chunk", {"n_heads": 2, "chunk_size": 4}, BF16),
        ("Mamba2", {"head_dim": 8, "d_state": 4}, FLOAT32),
    ],
)
def test_a_layer_gathers_as_many_numbers_as_the_table_counts(mixer, options, itemsize, monkeypatch):
    gathered = []

    def all_pieces(x, group, size):
        gathered.append(x.numel())
        return x.expand(size, *x.shape)

    monkeypatch.setattr(pieces, "all_pieces", all_pieces)
    monkeypatch.setattr(pieces, "neighbour", lambda x, *place: torch.zeros_like(x))
    lm = SequenceLM(50, 32, 1, {"mixer": functools.partial(load_mixer(mixer), **options)})
    lm(torch.zeros(1, 12, dtype=torch.int64), piece=pieces.Piece(1, 2, 12))
    assert sum(gathered) * itemsize == bytes_of_a_piece(lm, 12)
