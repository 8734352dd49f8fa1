"""Checks the ops on a GPU against float64 references, outputs and gradients: no speed without correctness."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from seqarch.bench.timing import draw, forward_backward, outputs
from seqarch.kernels import (
    linear_cross_entropy,
    select_chunks,
    softmax_attention,
    top1_chunk_attention,
    top1_element_attention,
)

CHOICES: tuple[tuple[Literal["exact", "approx"], int], ...] = (("exact", 128), ("approx", 64))


def checks() -> Iterator[bool]:
    """Runs and prints every check; yields whether it holds."""
    for group in (check_top1, check_softmax, check_compiled, check_loss):
        yield from group()


def say(good: bool, text: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)
    return good


def within(name: str, errors: Iterable[float], bound: float) -> bool:
    """Print the errors and whether all are below the bound."""
    errors = list(errors)
    return say(all(e < bound for e in errors), f"{name}: {' '.join(f'{e:.1e}' for e in errors)}")


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an element that a kernel does not write shows."""
    blocks = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(16)]
    del blocks


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-3)).item()


def compare(name: str, op: Callable[..., Any], tensors: list[Tensor], bound: float, **options: Any) -> bool:
    """Outputs and gradients of `op` against its reference in float64."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    poison()
    found = results(op, tensors, options)
    if "alibi_slopes" in options:
        options = {**options, "alibi_slopes": options["alibi_slopes"].double()}
    expected = results(op, wide, {**options, "backend": "reference"})
    return within(name, map(error, found, expected), bound)


def results(op: Callable[..., Any], tensors: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Return outputs and the gradients of their weighted sum. The weights are the same numbers in every dtype."""
    found = outputs(op, tensors, **options)
    generator = torch.Generator(found[0].device).manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, device=t.device).bfloat16().to(t.dtype) for t in found]
    return [t.detach() for t in (*found, *torch.autograd.grad(found, tensors, weights))]


def repeats(name: str, op: Callable[..., Any], tensors: list[Tensor]) -> bool:
    """Whether two runs of `op` give the same gradients, bit for bit."""
    run = forward_backward(op, tensors)
    same = all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
    return say(same, f"{name}: {'the same bits' if same else 'different'}")


def compare_selected(name: str, tensors: list[Tensor], bound: float = 1e-2, **options: Any) -> Iterator[bool]:
    """Check the selected chunks and the attention to them. Choices may differ if masses are equal within rounding."""
    q, k, _ = (t.detach() for t in tensors)
    actual = select_chunks(q, k, backend="triton", **options)
    expected = select_chunks(q.double(), k.double(), backend="reference", **options)
    differ = (actual != expected).float().mean().item()
    good = differ < 2e-3 and torch.equal(actual < 0, expected < 0)
    yield say(good, f"{name}: {differ:.1e} of the choices differ")
    yield compare(name, top1_chunk_attention, tensors, bound, chunks=actual, backend="triton", **options)


def check_top1() -> Iterator[bool]:
    shapes = {
        torch.bfloat16: [
            (1, 1, 2, 2, 64),
            (2, 127, 2, 2, 64),
            (1, 129, 4, 1, 128),
            (1, 4097, 2, 2, 64),
            (1, 20001, 2, 1, 128),
        ],
        torch.float16: [(1, 1000, 4, 2, 64)],
        torch.float32: [(1, 1000, 4, 2, 96), (2, 127, 2, 1, 64)],
    }
    for dtype, cases in shapes.items():
        bound = 1e-3 if dtype == torch.float32 else 1e-2
        for B, T, H, HK, D in cases:
            tensors = draw(B, T, H, D, HK=HK, dtype=dtype)
            for selection, C in CHOICES:
                name = f"{selection} B{B} T{T} H{H} HK{HK} D{D} C{C} {dtype}"
                yield from compare_selected(name, tensors, bound, chunk_size=C, selection=selection)
    for C, D, scale, K in (
        *((256, 128, None, 1), (128, 256, None, 1), (16, 32, 1.0, 1), (128, 64, 10.0, 1), (128, 64, 200.0, 1)),
        *((128, 64, None, 2), (64, 128, 10.0, 3), (16, 64, None, 8), (256, 128, None, 2)),
    ):
        tensors = draw(1, 1000 if K == 1 else 4001, 2, D)
        options: dict[str, Any] = {"chunk_size": C, "scale": scale, "remote_chunks": K}
        yield from compare_selected(f"C{C} D{D} scale {scale} K{K}", tensors, **options)
    cu_seqlens = torch.tensor([0, 1, 130, 130, 700, 1000], dtype=torch.int32, device="cuda")
    tensors = draw(1, 1000, 2, 64)
    for selection, _ in CHOICES:
        yield from compare_selected(f"packed {selection}", tensors, selection=selection, cu_seqlens=cu_seqlens)
    tensors = draw(1, 20000, 2, 64)
    one = torch.where(torch.arange(20000, device="cuda") < 128, -1, 0).to(torch.int32).view(1, -1, 1).expand(1, -1, 2)
    yield compare("one chunk takes all", top1_chunk_attention, tensors, 1e-2, chunks=one)
    tail = [draw(2, 300, 4, 64)[0], *draw(2, 1000, 4, 64)[1:]]
    yield compare("last queries", top1_chunk_attention, tail, 1e-2, chunks=select_chunks(*tail[:2]))
    huge = [torch.randn(1, 2**20, 34, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    last = top1_chunk_attention(*(t[:, :, -1:].contiguous() for t in huge), selection="approx")
    good = torch.equal(top1_chunk_attention(*huge, selection="approx")[:, :, -1:], last)
    yield say(good, "more than 2^31 elements")
    del huge, last
    yield repeats("run to run", top1_chunk_attention, tensors)


def check_softmax() -> Iterator[bool]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    cu_seqlens = torch.tensor([0, 1, 130, 130, 700, 1000], dtype=torch.int32, device="cuda")
    cases: dict[str, dict[str, Any]] = {"causal": {}, "window": {"window": 100}, "alibi": {"alibi_slopes": slopes}}
    for T in (1, 129, 1000):
        tensors = draw(1, T, 4, 64, HK=2)
        for name, options in cases.items():
            yield compare(f"softmax {name} T{T}", softmax_attention, tensors, 1e-2, scale=1.0, **options)
    yield compare("softmax packed", softmax_attention, tensors, 1e-2, scale=1.0, cu_seqlens=cu_seqlens)
    tail = [draw(2, 300, 4, 64)[0], *draw(2, 1000, 4, 64)[1:]]
    yield compare("softmax last queries", softmax_attention, tail, 1e-2, scale=1.0)


def check_compiled() -> Iterator[bool]:
    """Check that the ops give the same results inside and outside of a compiled graph."""
    tensors = draw(2, 1000, 4, 64, HK=2)
    ops = {"softmax": softmax_attention, "window": partial(softmax_attention, window=100)}
    ops |= {"exact": top1_chunk_attention, "element": top1_element_attention}
    for name, op in ops.items():
        compiled = torch.compile(lambda q, k, v, op=op: op(2 * q, k, v), fullgraph=True)
        do = torch.randn_like(tensors[0])
        wanted = torch.autograd.grad(op(2 * tensors[0], *tensors[1:]), tensors, do)
        got = torch.autograd.grad(compiled(*tensors), tensors, do)
        yield within(f"compiled {name}", (error(a, b.double()) for a, b in zip(got, wanted, strict=True)), 1e-2)


def check_loss() -> Iterator[bool]:
    hidden = torch.randn(5000, 256, device="cuda", requires_grad=True)
    weight = (torch.randn(1000, 256, device="cuda") / 16).requires_grad_()
    targets = torch.randint(0, 1000, (5000,), device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = F.cross_entropy(wide[0] @ wide[1].T, targets)
    gradients = torch.autograd.grad(wanted, wide)
    ops = {"eager": linear_cross_entropy, "compiled": torch.compile(linear_cross_entropy, fullgraph=True)}
    for name, op in ops.items():
        with torch.autocast("cuda", torch.bfloat16):
            loss = op(hidden, weight, targets, chunk_tokens=2048)
        got = torch.autograd.grad(loss, (hidden, weight))
        yield within(f"loss {name}", map(error, (loss, *got), (wanted, *gradients)), 1e-2)
