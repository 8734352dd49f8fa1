"""Timings of Top-1 chunk attention and of the loss next to dense attention and a loss with all logits."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.bench.rows import Row
from seqarch.bench.timing import DENSE, LONG, Ops, draw, forward_backward, measure, passes, race
from seqarch.kernels import linear_cross_entropy, select_chunks, top1_chunk_attention

SELECTIONS = {each: partial(top1_chunk_attention, selection=each) for each in ("exact", "approx")}
"""Our op, by what it selects by."""


def time_shape(B: int, T: int, H: int, D: int, *, with_dense: bool = True) -> Iterator[Row]:
    shape: Row = {"B": B, "T": T, "H": H, "D": D}
    tensors = draw(B, T, H, D)
    q, k = (t.detach() for t in tensors[:2])
    for selection in ("exact", "approx"):
        yield measure(f"select {selection}", lambda s=selection: select_chunks(q, k, selection=s), **shape)
    chunks = select_chunks(q, k, selection="approx")
    yield from passes("attend", partial(top1_chunk_attention, chunks=chunks), tensors, **shape)
    yield from race(SELECTIONS, tensors, DENSE if with_dense else {}, **shape)


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


def growth() -> Iterator[Row]:
    yield from time_shape(1, 1048576, 12, 64, with_dense=False)


def skew() -> Iterator[Row]:
    for H, D in LONG:
        tensors = draw(1, 102400, H, D)
        position = torch.arange(102400, device="cuda").view(1, -1, 1)
        spread = select_chunks(*tensors[:2], selection="approx")
        to_first = (torch.rand(spread.shape, device="cuda") < 0.9) & (position >= 128)
        for name, chunks in (("spread", spread), ("90 % on chunk 0", torch.where(to_first, 0, spread))):
            run = forward_backward(top1_chunk_attention, tensors, chunks=chunks)
            yield measure(f"attend fwd+bwd, {name}", run, B=1, T=102400, H=H, D=D)


def remote(others: Ops | None = None) -> Iterator[Row]:
    """Time dense attention, `others` and our op, each with 1, 2, 4 and 8 `remote_chunks`."""
    ops = {**(others or {}), **SELECTIONS}
    counted = {
        f"{name}, remote chunks: {K}": partial(op, remote_chunks=K) for name, op in ops.items() for K in (1, 2, 4, 8)
    }
    for H, D in LONG:
        yield from race(counted, draw(1, 102400, H, D), B=1, T=102400, H=H, D=D)


def profile() -> Iterator[Row]:
    """Print the time of each kernel, the mean of three runs."""
    for B, T, H, D in ((1, 102400, 12, 64), (1, 102400, 16, 128), (32, 2048, 12, 64)):
        run = forward_backward(top1_chunk_attention, draw(B, T, H, D))
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
        shape = {"B": B, "T": T, "H": H, "D": D, "unit": "ms"}
        events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
        yield {"name": "on the GPU", **shape, "p50": sum(event.device_time_total for event in events) / 3000}
        for event in events[:14]:
            name = f"{event.count // 3} x {event.key[:70]}"
            yield {"name": name, **shape, "p50": event.device_time_total / 3000}


def loss() -> Iterator[Row]:
    N, d, V = 65536, 768, 32000
    hidden = torch.randn(N, d, device="cuda", requires_grad=True)
    weight = (torch.randn(V, d, device="cuda") / 28).requires_grad_()
    targets = torch.randint(0, V, (N,), device="cuda")

    def gradients(op: Callable[..., Tensor], **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            with torch.autocast("cuda", torch.bfloat16):
                return torch.autograd.grad(op(hidden, weight, targets, **options), (hidden, weight))

        return run

    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for chunk in (4096, 8192, 16384):
        run = gradients(linear_cross_entropy, chunk_tokens=chunk)
        yield measure(f"loss eager, chunks of {chunk}", run, T=N, D=d)
    yield measure("loss compiled", gradients(compiled), T=N, D=d)

    def plain(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), t)

    yield measure("loss with all logits, compiled", gradients(torch.compile(plain)), T=N, D=d)
