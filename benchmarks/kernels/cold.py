"""The first call of each op in a new process with empty compile caches."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from seqarch.bench.jobs import Job, Row, run_job
from seqarch.bench.timing import draw, forward_backward
from seqarch.kernels import attention_entropy, top1_chunk_attention, top1_element_attention

LENGTHS = {"exact": 32768, "approx": 32768, "element": 4096, "entropy": 4096}
"""Tokens by op. Exact selection gets enough tokens to rule chunks out, which takes further kernels."""


def rows() -> Iterator[Row]:
    """Yield the seconds from the call to its result, forward and backward, with compilation and tuning."""
    for D in (64, 128):
        for op, T in LENGTHS.items():
            done = run_job(Job(op, "benchmarks.kernels.cold:first_call", {"op": op, "D": D}), own_caches=False)
            if "error" in done:
                raise RuntimeError(f"the first call of {op} failed in its own process: {done['error']}")
            yield {"name": f"first call, {op}", "B": 1, "T": T, "H": 4, "D": D, "p50": done["p50"], "unit": "s"}


def first_call(op: str, D: int) -> Row:
    """The seconds that the first call of an op takes in this process, as `p50`."""
    tensors = draw(1, LENGTHS[op], 4, D)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    _call(op, tensors)()
    torch.cuda.synchronize()
    return {"p50": time.perf_counter() - begin}


def _call(op: str, tensors: list[torch.Tensor]) -> Callable[[], Any]:
    if op == "entropy":
        return lambda: attention_entropy(*tensors[:2])
    if op == "element":
        return forward_backward(top1_element_attention, tensors)
    return forward_backward(top1_chunk_attention, tensors, selection=op)
