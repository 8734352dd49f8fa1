"""Top-1 element attention and the entropy of attention on a GPU: checks against float64, then timings."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from seqarch.bench.kernels_check import error, poison, repeats, say, within
from seqarch.bench.rows import Row, require
from seqarch.bench.timing import draw, measure, race
from seqarch.kernels import attention_entropy, select_chunks, top1_element_attention

SHAPES = ((32, 2048, 12, 64), (16, 2048, 16, 128), (4, 16384, 12, 64), (2, 16384, 16, 128))
"""B, T, H and D of the timings of Top-1 element attention."""
LENGTHS = (2048, 16384, 102400)
WINDOW, CHUNK = 512, 128
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""Largest relative error of a gradient, by norm."""
FLIPS = 1e-3
"""Largest share of queries that may select another key than float64 does, because two scores are nearly equal."""
ENTROPY_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-3}
"""Largest error of an entropy, in nats."""


def rows() -> Iterator[Row]:
    """Check the ops, then yield a row for each shape and op; `times_dense` goes by the fastest dense backend."""
    require([*check_element(), *check_entropy()])
    attend = partial(top1_element_attention, scale=8.0, backend="triton")
    for B, T, H, D in SHAPES:
        yield from race({"element": attend}, draw(B, T, H, D), B=B, T=T, H=H, D=D)
    for T in LENGTHS:
        yield from entropy_rows(T)


def check_element() -> Iterator[bool]:
    cases = {
        torch.bfloat16: [
            (1, 1, 2, 2, 64),
            (2, 127, 2, 2, 32),
            (1, 128, 2, 1, 96),
            (1, 129, 4, 1, 128),
            (1, 300, 2, 2, 256),
            (1, 4097, 4, 2, 64),
            (1, 20001, 2, 1, 128),
        ],
        torch.float16: [(1, 1000, 4, 2, 64), (1, 129, 2, 1, 256)],
        torch.float32: [(1, 129, 1, 1, 32), (2, 1000, 2, 1, 64), (1, 1000, 4, 2, 96), (1, 300, 2, 1, 128)],
    }
    cases[torch.float32].append((1, 200, 2, 1, 256))
    for dtype, shapes in cases.items():
        for B, T, H, HK, D in shapes:
            for scale in (None, 8.0, 50.0):
                name = f"B{B} T{T} H{H} HK{HK} D{D} scale {scale} {dtype}"
                yield compare(name, draw(B, T, H, D, HK=HK, dtype=dtype), scale=scale)
    borders = torch.tensor([0, 1, 130, 130, 700, 1000], dtype=torch.int32, device="cuda")
    yield compare("packed", draw(1, 1000, 4, 64, HK=2), scale=8.0, cu_seqlens=borders)
    yield compare("last queries", [draw(2, 300, 4, 64)[0], *draw(2, 1000, 4, 64, HK=2)[1:]], scale=8.0)
    yield compare("one query", [draw(2, 1, 4, 128)[0], *draw(2, 1000, 4, 128)[1:]], scale=8.0)
    by_head = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in draw(2, 500, 4, 64)]
    yield compare("heads before positions", by_head, scale=8.0)
    q, k, v = draw(1, 20000, 2, 64)
    with torch.no_grad():
        q[..., 0], k[:, 0, :, 0] = 1.0, 10.0
    yield compare("one key takes all queries", [q, k, v], scale=1.0)
    yield check_large()
    yield repeats("element, run to run", top1_element_attention, draw(2, 3000, 4, 64, HK=2))


def compare(name: str, tensors: list[Tensor], **options: Any) -> bool:
    """Check outputs against the reference in float64, except at near ties; and gradients of the queries that agree."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    expected = top1_element_attention(*wide, backend="reference", **options)
    poison()
    o = top1_element_attention(*tensors, backend="triton", **options)
    same = (o.detach().double() == expected.detach()).all(-1, keepdim=True)
    flips = 1 - same.double().mean().item()
    do = torch.randn_like(o) * same
    poison()
    gradients = torch.autograd.grad(o, tensors, do)
    wanted = torch.autograd.grad(expected, wide, do.double())
    errors = [error(a, b) for a, b in zip(gradients, wanted, strict=True)]
    good = flips <= FLIPS and all(e <= BOUNDS[o.dtype] for e in errors)
    return say(good, f"element {name}: {flips:.1e} select otherwise; {' '.join(f'{e:.1e}' for e in errors)}")


def check_large() -> bool:
    """Check more than 2^31 elements between the first and the last position, by running the last head by itself."""
    tensors = draw(1, 2100, 16400, 64)
    do = torch.randn_like(tensors[0])
    whole = torch.autograd.grad(top1_element_attention(*tensors, scale=8.0), tensors, do)
    alone = [t.detach()[:, :, -1:].contiguous().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(top1_element_attention(*alone, scale=8.0), alone, do[:, :, -1:])
    errors = (error(a[:, :, -1:], b.double()) for a, b in zip(whole, wanted, strict=True))
    return within("element, more than 2^31 elements", errors, 1e-3)


def check_entropy() -> Iterator[bool]:
    """Check entropies of scores up to 8. The vectors have unit root mean square, as in the mixers."""
    borders = torch.tensor([0, 1, 130, 130, 700, 1500], dtype=torch.int32, device="cuda")
    slopes = torch.tensor([0.5, 0.0625], device="cuda")
    for dtype, bound in ENTROPY_BOUNDS.items():
        for T, HK, D, C in ((1, 2, 64, 128), (129, 1, 64, 128), (1500, 2, 64, 128), (1500, 2, 128, 64)):
            q, k, _ = (t.detach() for t in draw(1, T, 2, D, HK=HK, dtype=torch.float32))
            q, k = (math.sqrt(D) * q).to(dtype), (math.sqrt(D) * k).to(dtype)
            packed: dict[str, Any] = {"cu_seqlens": borders} if T == 1500 else {}
            cases: dict[str, dict[str, Any]] = {"full": {}, "packed": packed, "window": {"window": 100}}
            cases["alibi"] = {"alibi_slopes": slopes}
            for name, options in {"chunks": {}, "chunks, packed": packed}.items():
                chunks = select_chunks(q, k, chunk_size=C, scale=8 / D, **options)
                cases[name] = {"chunk_size": C, "chunks": chunks, **options}
            for name, options in cases.items():
                poison()
                actual = attention_entropy(q, k, scale=8 / D, backend="triton", **options)
                wanted = attention_entropy(q.double(), k.double(), scale=8 / D, backend="reference", **options)
                worst = (actual - wanted).abs().max().item()
                yield say(worst <= bound, f"entropy {name} T{T} HK{HK} D{D} {dtype}: {worst:.1e} nats")


def entropy_rows(T: int) -> Iterator[Row]:
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
