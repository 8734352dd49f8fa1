"""What the decoding benchmark refuses and what its rows say; the timings themselves need a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from seqarch.bench import decode
from seqarch.kernels import top1_chunk_decode


@pytest.fixture
def on_cpu(monkeypatch):
    """One small shape on the CPU. Every call runs once; its time in ms is the number of letters in its name."""

    def op(*args, **options):
        return top1_chunk_decode(*args, **{**options, "backend": "reference"})

    def time(name: str, call: Callable[[], Any], shape: dict[str, int]) -> Iterator[dict[str, Any]]:
        if "cuDNN" in name or "memory" in name or "Flex" in name:
            return
        call()
        for mode, factor in (("call", 2), ("graph", 1)):
            yield {"name": name, **shape, "p20": 0, "p50": factor * len(name), "p80": 0, "unit": "ms", "mode": mode}

    def draw(B, capacity, H, HK, D, dtype):
        return [torch.randn(B, T, heads, D, dtype=dtype) for T, heads in ((1, H), (capacity, HK), (capacity, HK))]

    monkeypatch.setattr(decode, "SHAPES", ((2, 300, 2, 16),))
    monkeypatch.setattr(decode, "top1_chunk_decode", op)
    monkeypatch.setattr(decode, "_measure", time)
    monkeypatch.setattr(decode, "draw", draw)
    monkeypatch.setattr(decode, "_check_small", lambda: None)


@pytest.mark.usefixtures("on_cpu")
def test_rows_compare_with_the_fastest_dense():
    rows = {row["name"]: row for row in decode.rows()}
    fastest = len("dense FlashAttention-2")
    assert rows["decode exact"]["times_dense"] == fastest / len("exact")
    assert rows["decode approx, CUDA graph"]["times_dense"] == fastest / len("approx")
    assert rows["decode dense FlashAttention-2, by head"]["times_dense"] < 1
    for row in rows.values():
        assert {"B": 2, "T": 300, "H": 2, "D": 16}.items() <= row.items()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("selection", ["exact", "approx"])
def test_wrong_outputs_are_not_timed(selection, monkeypatch):
    right = decode.top1_chunk_decode

    def wrong(q, *args, **options):
        o = right(q, *args, **options)
        return o if q.dtype == torch.float64 or options["selection"] != selection else 1.1 * o

    monkeypatch.setattr(decode, "top1_chunk_decode", wrong)
    with pytest.raises(SystemExit, match=f"decode, {selection}, .* error of the last sequence"):
        next(decode.rows())


def test_means_are_those_of_the_complete_chunks():
    k = torch.randn(2, 300, 2, 16).bfloat16()
    expected = torch.stack([k[:, :128].float().mean(1), k[:, 128:256].float().mean(1)], dim=1)
    torch.testing.assert_close(decode.chunk_means(k), expected)
