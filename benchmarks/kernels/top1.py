"""More timings of Top-1 chunk attention: skewed selections, several remote chunks, a million tokens, by kernel."""

from collections.abc import Iterator
from functools import partial

import torch

from seqarch.bench.jobs import Row
from seqarch.bench.timing import LONG, SELECTIONS, Ops, draw, forward_backward, measure, race, time_shape
from seqarch.kernels import select_chunks, top1_chunk_attention


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
    """The time of each kernel, the mean of three runs."""
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
