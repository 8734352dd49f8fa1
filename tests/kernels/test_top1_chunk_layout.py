"""How Top-1 chunk attention lays out chunks and queries for its Triton kernels."""

import itertools

import pytest
import torch

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def layout(interpreter):
    """The module, which is imported with the interpreter on."""
    from seqarch.kernels.top1_chunk import layout

    return layout


@pytest.mark.parametrize("borders", [[0, 100], [0, 1, 17, 17, 60, 100], [0, 0, 100]])
def test_layout(borders, layout):
    """Slots tile the sequence, restart at each document, and know their positions."""
    found = layout.chunk_layout(100, 16, torch.tensor(borders, dtype=torch.int32))
    starts, first = [], []
    for a, b in itertools.pairwise(borders):
        first += [len(starts)] * (b - a)
        starts += range(a, b, 16)
    own = [sum(start <= position for start in starts) - 1 for position in range(100)]
    assert found.starts is not None
    assert found.own is not None
    assert found.first is not None
    assert found.starts.tolist() == starts + [100] * (found.slots + 1 - len(starts))
    assert found.own.tolist() == own
    assert found.first.tolist() == first


def test_buckets_and_tiles(layout):
    keys = torch.randint(0, 29, (800,), dtype=torch.int32)
    order, offsets = layout.bucket_queries(keys, 28)
    assert sorted(order.tolist()) == list(range(800))
    for segment in range(28):
        found = order[offsets[segment] : offsets[segment + 1]]
        assert (keys[found] == segment).all()
        assert found.tolist() == sorted(found.tolist())
    segment, first = layout.tiles(offsets, 8, 800)
    for i, s in enumerate(segment.tolist()):
        if s < 28:
            assert first[s] <= i < first[s + 1]
            assert offsets[s] + (i - first[s]) * 8 < offsets[s + 1]
        else:
            assert i >= first[-1]


@pytest.mark.parametrize("counts", [[16, 16, 16], [15, 17, 0, 31, 8], [800], [0, 100, 1, 16, 7]])
def test_full_tiles(counts, layout):
    """There is room for all of them, even if every segment is just large enough for two."""
    offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    segment, first = layout.tiles(offsets, 8, sum(counts), full=True)
    assert segment.shape[0] == sum(counts) // 8
    assert first.diff().tolist() == [count // 8 if count >= 16 else 0 for count in counts]
    wanted = [s for s, count in enumerate(counts) for _ in range(count // 8) if count >= 16]
    assert segment.tolist() == wanted + [len(counts)] * (segment.shape[0] - len(wanted))
