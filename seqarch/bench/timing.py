"""Times an op on a GPU, on drawn tensors, next to dense attention; and what limits all of them there."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqarch import kernels
from seqarch.bench.jobs import Row
from seqarch.kernels.op import load_function
from seqarch.kernels.packages import is_installed
from seqarch.kernels.top1_chunk.op import Selection

Ops = Mapping[str, Callable[..., Any]]
"""Functions of the tensors, by the names of their rows."""
LONG = ((12, 64), (16, 128))
"""Heads and head dims of the timings at 102,400 tokens."""


def draw(B: int, T: int, H: int, D: int, *, HK: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Random q, k and v on the GPU, q and k of unit length."""
    q, k, v = (torch.randn(B, T, heads, D, device="cuda") for heads in (H, HK or H, HK or H))
    return [t.to(dtype).requires_grad_() for t in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)]


def measure(name: str, fn: Callable[[], Any], *, replay: bool = False, **shape: Any) -> Row:
    """Time `fn` and return its row: the median, 20th and 80th percentile of its time in ms, and its peak memory.

    With `replay` a CUDA graph is timed: the work of the GPU, without launches from Python.
    """
    fn()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    timed = captured(fn) if replay else fn
    times: Any = triton.testing.do_bench(timed, warmup=20, rep=150, quantiles=[0.5, 0.2, 0.8])
    p50, p20, p80 = times
    return {"name": name, **shape, "p20": p20, "p50": p50, "p80": p80, "unit": "ms", "peak_mib": round(memory, 1)}


def captured(fn: Callable[[], Any]) -> Callable[[], Any]:
    """A call that replays `fn`, which runs once before, from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph.replay


def outputs(op: Callable[..., Any], tensors: Iterable[Tensor], **options: Any) -> list[Tensor]:
    """The outputs of `op`, one tensor or several."""
    found = op(*tensors, **options)
    return list(found) if isinstance(found, tuple) else [found]


def forward_backward(
    op: Callable[..., Any], tensors: list[Tensor], weights: list[Tensor] | None = None, **options: Any
) -> Callable[[], Any]:
    """Return a call that runs `op` forward and backward. Without weights, its output has the first tensor's shape."""
    weights = weights or [torch.randn_like(tensors[0])]
    return lambda: torch.autograd.grad(outputs(op, tensors, **options), tensors, weights, allow_unused=True)


def passes(name: str, op: Callable[..., Any], tensors: list[Tensor], **options: Any) -> Iterator[Row]:
    """The rows of `op` forward, without gradients, and forward and backward; `options` as for `measure`."""
    with torch.no_grad():
        weights = [torch.randn_like(t) for t in outputs(op, tensors)]
        forward = measure(f"{name} fwd", lambda: op(*tensors), **options)
    yield forward
    yield measure(f"{name} fwd+bwd", forward_backward(op, tensors, weights), **options)


def dense(backend: SDPBackend) -> Callable[..., Tensor]:
    """Dense causal attention through one backend of SDPA."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention by FlashAttention-4, whose backward pass adds in any order."""
    attend: Any = load_function("flash_attn.cute:flash_attn_func")
    return attend(q, k, v, causal=True)[0]


DENSE = {"dense cuDNN": dense(SDPBackend.CUDNN_ATTENTION), "dense FlashAttention-2": dense(SDPBackend.FLASH_ATTENTION)}
if is_installed("flash-attn-4"):
    DENSE["dense FlashAttention-4"] = fa4
    DENSE["dense FlashAttention-4 in fixed order"] = partial(kernels.softmax_attention, backend="fa4")


def race(ops: Ops, tensors: list[Tensor], dense: Ops = DENSE, /, **shape: Any) -> Iterator[Row]:
    """The rows of dense attention, then of `ops`, each forward, and forward and backward."""
    baseline = [row for name, op in dense.items() for row in passes(name, op, tensors, **shape)]
    yield from baseline
    for name, op in ops.items():
        for row in passes(name, op, tensors, **shape):
            yield against(baseline, row)


def against(dense: Iterable[Row], row: Row) -> Row:
    """The row with how many times faster it is than the fastest dense baseline of the same pass, if there is one."""
    times = [each["p50"] for each in dense if each["name"].split()[-1] == row["name"].split()[-1]]
    return {**row, "times_dense": min(times) / row["p50"]} if times else row


KINDS: tuple[Selection, ...] = ("exact", "approx")
SELECTIONS = {selection: partial(kernels.top1_chunk_attention, selection=selection) for selection in KINDS}
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
        yield measure(f"select {selection}", partial(kernels.select_chunks, q, k, selection=selection), **shape)
    chunks = kernels.select_chunks(q, k, selection="approx")
    yield from passes("attend", partial(kernels.top1_chunk_attention, chunks=chunks), tensors, **shape)
    yield from race(SELECTIONS, tensors, DENSE if with_dense else {}, **shape)


def element() -> Iterator[Row]:
    attend = partial(kernels.top1_element_attention, scale=8.0, backend="triton")
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
        f"entropy chunks {CHUNK}": {"chunk_size": CHUNK, "chunks": kernels.select_chunks(q, k, selection="approx")},
    }
    for name, options in cases.items():
        run = partial(kernels.attention_entropy, q, k, scale=8.0, backend="triton", **options)
        yield measure(name, run, B=1, T=T, H=H, D=D)
