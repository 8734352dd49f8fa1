"""Times Top-1 attention and its entropy next to dense attention, and what limits all of them on this GPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from seqarch.bench.jobs import Row
from seqarch.bench.timing import DENSE, LONG, draw, measure, passes, race
from seqarch.kernels import attention_entropy, select_chunks, top1_chunk_attention, top1_element_attention
from seqarch.kernels.top1_chunk.op import Selection

KINDS: tuple[Selection, ...] = ("exact", "approx")
SELECTIONS = {selection: partial(top1_chunk_attention, selection=selection) for selection in KINDS}
"""Top-1 chunk attention, by what it selects by."""
ELEMENT = ((32, 2048, 12, 64), (16, 2048, 16, 128), (4, 16384, 12, 64), (2, 16384, 16, 128))
"""B, T, H and D of Top-1 element attention."""
WINDOW, CHUNK = 512, 128


def limits(size: int = 8192, device: str = "cuda") -> Iterator[Row]:
    """The rates of a bf16 product of size^3, and of a copy by the bytes that it reads and writes."""
    a = torch.randn(size, size, device=device).bfloat16()
    source, target = a.repeat(8, 1), a.new_empty(8 * size, size)
    product, copy = (measure("limit", run)["p50"] for run in (lambda: a @ a, lambda: target.copy_(source)))
    yield {"name": f"bf16 product, {size}^3", "p50": 2e-9 * size**3 / product, "unit": "TFLOP/s"}
    yield {"name": f"copy of {source.nbytes / 2**20:.0f} MiB", "p50": 2e-9 * source.nbytes / copy, "unit": "TB/s"}


def time() -> Iterator[Row]:
    for H, D in LONG:
        yield from time_shape(1, 102400, H, D)
    yield from time_shape(32, 2048, 12, 64)
    yield from time_shape(16, 2048, 16, 128)


def time_shape(B: int, T: int, H: int, D: int, *, with_dense: bool = True) -> Iterator[Row]:
    """Selection, attention to a selection, and both together."""
    shape: Row = {"B": B, "T": T, "H": H, "D": D}
    tensors = draw(B, T, H, D)
    q, k = (t.detach() for t in tensors[:2])
    for selection in KINDS:
        yield measure(f"select {selection}", partial(select_chunks, q, k, selection=selection), **shape)
    chunks = select_chunks(q, k, selection="approx")
    yield from passes("attend", partial(top1_chunk_attention, chunks=chunks), tensors, **shape)
    yield from race(SELECTIONS, tensors, DENSE if with_dense else {}, **shape)


def element() -> Iterator[Row]:
    attend = partial(top1_element_attention, scale=8.0, backend="triton")
    for B, T, H, D in ELEMENT:
        yield from race({"element": attend}, draw(B, T, H, D), B=B, T=T, H=H, D=D)
    for T in (2048, 16384, 102400):
        yield from time_entropy(T)


def time_entropy(T: int) -> Iterator[Row]:
    H, D = 12, 64
    q, k, _ = (t.detach() for t in draw(1, T, H, D))
    cases: dict[str, dict[str, Any]] = {
        "entropy full": {},
        f"entropy window {WINDOW}": {"window": WINDOW},
        f"entropy chunks {CHUNK}": {"chunk_size": CHUNK, "chunks": select_chunks(q, k, selection="approx")},
    }
    for name, options in cases.items():
        run = partial(attention_entropy, q, k, scale=8.0, backend="triton", **options)
        yield measure(name, run, B=1, T=T, H=H, D=D)
