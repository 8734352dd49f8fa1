"""What the rows of the decoding benchmark say; the timings themselves need a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.kernels import decode
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


@pytest.mark.usefixtures("on_cpu")
def test_rows_compare_with_the_fastest_dense():
    rows = {row["name"]: row for row in decode.rows()}
    fastest = len("dense FlashAttention-2")
    assert rows["decode exact"]["times_dense"] == fastest / len("exact")
    for name in ("exact", "approx"):
        for K in (2, 8):
            several = f"{name}, remote chunks: {K}"
            assert rows[f"decode {several}, CUDA graph"]["times_dense"] == fastest / len(several)
    assert rows["decode approx, CUDA graph"]["times_dense"] == fastest / len("approx")
    assert rows["decode dense FlashAttention-2, by head"]["times_dense"] < 1
    for row in rows.values():
        assert {"B": 2, "T": 300, "H": 2, "D": 16}.items() <= row.items()


@pytest.mark.usefixtures("on_cpu")
def test_as_many_chunks_are_timed_as_a_row_says(monkeypatch):
    right, given = decode.top1_chunk_decode, []

    def noted(*args, **options):
        given.append((options.get("selection", "exact"), options.get("remote_chunks", 1)))
        return right(*args, **options)

    monkeypatch.setattr(decode, "top1_chunk_decode", noted)
    timed = [name for name in (row["name"] for row in decode.rows()) if "dense" not in name and "graph" not in name]
    wanted = [("exact", 1), ("approx", 1), ("approx", 1), ("exact", 2), ("exact", 8), ("approx", 2), ("approx", 8)]
    assert given[-len(timed) :] == wanted
    assert timed[3:] == [f"decode {name}, remote chunks: {K}" for name, K in wanted[3:]]


def test_means_are_those_of_the_complete_chunks():
    k = torch.randn(2, 300, 2, 16).bfloat16()
    expected = torch.stack([k[:, :128].float().mean(1), k[:, 128:256].float().mean(1)], dim=1)
    torch.testing.assert_close(decode.chunk_means(k), expected)
