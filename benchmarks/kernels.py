"""Check the kernels on a GPU against float64 references, then time them beside SDPA.

    python benchmarks/kernels.py check time --csv kernels.csv

Steps: `check` (a failure ends the run: no speed without correctness), `time` (forward + backward at 102,400 and 2,048
tokens beside dense attention), `skew`, `sharp`, `growth`, `loss`, `profile`. Times are medians in milliseconds, with
the 20th and 80th percentile, inputs in bf16 with q and k normalised.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqarch.kernels import (
    attention_entropy,
    linear_cross_entropy,
    select_chunks,
    softmax_attention,
    top1_chunk_attention,
    top1_element_attention,
)

LONG = ((12, 64), (16, 128))
CHOICES: tuple[tuple[Literal["exact", "approx"], int], ...] = (("exact", 128), ("approx", 64))
ROWS: list[dict[str, Any]] = []


def draw(B: int, T: int, H: int, D: int, *, HK: int | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    q, k, v = (torch.randn(B, T, heads, D, device="cuda") for heads in (H, HK or H, HK or H))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return [t.to(dtype).requires_grad_() for t in (q, k, v)]


def poison() -> None:
    """Fill the allocator's free memory with NaN, so that an element left unwritten shows."""
    blocks = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(16)]
    del blocks


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-3)).item()


def compare(name: str, op: Callable[..., Tensor], tensors: list[Tensor], bound: float, **options: Any) -> bool:
    """Forward and gradients of `op` against its reference in float64."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    poison()
    o = op(*tensors, **options)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, tensors, do)
    if "alibi_slopes" in options:
        options = {**options, "alibi_slopes": options["alibi_slopes"].double()}
    expected = op(*wide, **{**options, "backend": "reference"})
    wanted = torch.autograd.grad(expected, wide, do.double())
    pairs = zip((o, *gradients), (expected, *wanted), strict=True)
    errors = [error(a.detach(), b.detach()) for a, b in pairs]
    good = all(e < bound for e in errors)
    print(f"{'ok  ' if good else 'FAIL'} {name}: {' '.join(f'{e:.1e}' for e in errors)}", flush=True)
    return good


def compare_selection(name: str, q: Tensor, k: Tensor, **options: Any) -> bool:
    """Equal choices except where the masses differ by less than the arithmetic can tell."""
    actual = select_chunks(q, k, backend="triton", **options)
    q64, k64 = q.detach().double(), k.detach().double()
    expected = select_chunks(q64, k64, backend="reference", **options)
    differ = (actual != expected).float().mean().item()
    good = differ < 2e-3 and torch.equal(actual < 0, expected < 0)
    print(f"{'ok  ' if good else 'FAIL'} {name}: {differ:.1e} of the choices differ", flush=True)
    return good


def check_top1() -> Iterable[bool]:
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
                yield compare_selection(name, *tensors[:2], chunk_size=C, selection=selection)
                with torch.no_grad():
                    chunks = select_chunks(*tensors[:2], chunk_size=C, selection=selection)
                yield compare(name, top1_chunk_attention, tensors, bound, chunks=chunks, chunk_size=C, backend="triton")
    for C, D, scale in ((256, 128, None), (128, 256, None), (16, 32, 1.0), (128, 64, 10.0), (128, 64, 200.0)):
        tensors = draw(1, 1000, 2, D)
        name = f"C{C} D{D} scale {scale}"
        yield compare_selection(name, *tensors[:2], chunk_size=C, scale=scale)
        chunks = select_chunks(*tensors[:2], chunk_size=C, scale=scale)
        yield compare(name, top1_chunk_attention, tensors, 1e-2, chunks=chunks, chunk_size=C, scale=scale)
    cu_seqlens = torch.tensor([0, 1, 130, 130, 700, 1000], dtype=torch.int32, device="cuda")
    tensors = draw(1, 1000, 2, 64)
    for selection in ("exact", "approx"):
        options = {"selection": selection, "cu_seqlens": cu_seqlens}
        yield compare_selection(f"packed {selection}", *tensors[:2], **options)
        chunks = select_chunks(*tensors[:2], **options)
        yield compare("packed", top1_chunk_attention, tensors, 1e-2, chunks=chunks, cu_seqlens=cu_seqlens)
    tensors = draw(1, 20000, 2, 64)
    one = torch.where(torch.arange(20000, device="cuda") < 128, -1, 0).to(torch.int32).view(1, -1, 1).expand(1, -1, 2)
    yield compare("one chunk takes all", top1_chunk_attention, tensors, 1e-2, chunks=one)
    tail = [draw(2, 300, 4, 64)[0], *draw(2, 1000, 4, 64)[1:]]
    yield compare("last queries", top1_chunk_attention, tail, 1e-2, chunks=select_chunks(*tail[:2]))
    huge = draw(1, 2**20, 34, 64)
    options = {"selection": "approx", "scale": 1.0}
    last = top1_chunk_attention(*(t.detach()[:, :, -1:].contiguous() for t in huge), **options)
    good = torch.equal(top1_chunk_attention(*(t.detach() for t in huge), **options)[:, :, -1:], last)
    print(f"{'ok  ' if good else 'FAIL'} more than 2^31 elements", flush=True)
    yield good
    del huge, last
    first, second = (torch.autograd.grad(top1_chunk_attention(*tensors).float().sum(), tensors) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    print(f"{'ok  ' if same else 'FAIL'} run to run: {'the same bits' if same else 'different'}", flush=True)
    yield same


def check_softmax() -> Iterable[bool]:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    cu_seqlens = torch.tensor([0, 1, 130, 130, 700, 1000], dtype=torch.int32, device="cuda")
    for T in (1, 129, 1000):
        tensors = draw(1, T, 4, 64, HK=2)
        for name, options in (
            ("causal", {}),
            ("window", {"window": 100}),
            ("alibi", {"alibi_slopes": slopes}),
        ):
            yield compare(f"softmax {name} T{T}", softmax_attention, tensors, 1e-2, scale=1.0, **options)
    yield compare("softmax packed", softmax_attention, tensors, 1e-2, scale=1.0, cu_seqlens=cu_seqlens)
    tail = [draw(2, 300, 4, 64)[0], *draw(2, 1000, 4, 64)[1:]]
    yield compare("softmax last queries", softmax_attention, tail, 1e-2, scale=1.0)
    yield compare("top1 element", top1_element_attention, draw(1, 300, 2, 64, dtype=torch.float32), 1e-3)
    q, k, _ = draw(1, 1000, 4, 64, HK=2)
    for name, options in (
        ("causal", {}),
        ("window", {"window": 100}),
        ("alibi", {"alibi_slopes": slopes}),
        ("packed", {"cu_seqlens": cu_seqlens}),
    ):
        wanted = attention_entropy(q.double(), k.double(), scale=10.0, **options)
        good = error(attention_entropy(q, k, scale=10.0, backend="triton", **options), wanted) < 1e-3
        print(f"{'ok  ' if good else 'FAIL'} entropy {name}", flush=True)
        yield good


def check_compiled() -> Iterable[bool]:
    """The ops inside a compiled graph give what they give outside."""
    tensors = draw(2, 1000, 4, 64, HK=2)
    for name, op, options in (
        ("softmax", softmax_attention, {}),
        ("window", softmax_attention, {"window": 100}),
        ("exact", top1_chunk_attention, {}),
        ("element", top1_element_attention, {}),
    ):
        compiled = torch.compile(lambda q, k, v, op=op, options=options: op(2 * q, k, v, **options), fullgraph=True)
        do = torch.randn_like(tensors[0])
        wanted = torch.autograd.grad(op(2 * tensors[0], *tensors[1:], **options), tensors, do)
        got = torch.autograd.grad(compiled(*tensors), tensors, do)
        errors = [error(a, b.double()) for a, b in zip(got, wanted, strict=True)]
        good = all(e < 1e-2 for e in errors)
        print(f"{'ok  ' if good else 'FAIL'} compiled {name}: {' '.join(f'{e:.1e}' for e in errors)}", flush=True)
        yield good


def check_loss() -> Iterable[bool]:
    hidden = torch.randn(5000, 256, device="cuda", requires_grad=True)
    weight = (torch.randn(1000, 256, device="cuda") / 16).requires_grad_()
    targets = torch.randint(0, 1000, (5000,), device="cuda")
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = F.cross_entropy(wide[0] @ wide[1].T, targets)
    gradients = torch.autograd.grad(wanted, wide)
    for name, op in (
        ("eager", linear_cross_entropy),
        ("compiled", torch.compile(linear_cross_entropy, fullgraph=True)),
    ):
        with torch.autocast("cuda", torch.bfloat16):
            loss = op(hidden, weight, targets, chunk_tokens=2048)
        got = torch.autograd.grad(loss, (hidden, weight))
        errors = [error(a, b) for a, b in zip((loss, *got), (wanted, *gradients), strict=True)]
        good = all(e < 1e-2 for e in errors)
        print(f"{'ok  ' if good else 'FAIL'} loss {name}: {' '.join(f'{e:.1e}' for e in errors)}", flush=True)
        yield good


def measure(name: str, fn: Callable[[], Any], **shape: Any) -> float:
    """Median time of `fn` in ms; the row for the CSV has the percentiles and the memory it takes at its peak."""
    fn()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fn()
    torch.cuda.synchronize()
    memory = (torch.cuda.max_memory_allocated() - before) / 2**20
    p50, p20, p80 = triton.testing.do_bench(fn, warmup=20, rep=150, quantiles=[0.5, 0.2, 0.8])
    ROWS.append({"name": name, **shape, "p20": p20, "p50": p50, "p80": p80, "peak_mib": round(memory, 1)})
    print(f"{name:34s} {shape} {p50:8.3f} ms  [{p20:.3f}, {p80:.3f}]  +{memory:.0f} MiB", flush=True)
    return p50


def step(op: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> Callable[[], Any]:
    """Forward and backward."""
    do = torch.randn_like(tensors[0])
    return lambda: torch.autograd.grad(op(*tensors, **options), tensors, do)


def dense(backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


DENSE = {"dense cuDNN": dense(SDPBackend.CUDNN_ATTENTION), "dense FlashAttention-2": dense(SDPBackend.FLASH_ATTENTION)}


def time_shape(B: int, T: int, H: int, D: int, *, with_dense: bool = True) -> None:
    shape = {"B": B, "T": T, "H": H, "D": D}
    tensors = draw(B, T, H, D)
    best = float("inf")
    for name, op in DENSE.items() if with_dense else []:
        best = min(best, measure(f"{name} fwd+bwd", step(op, tensors), **shape))
    for selection in ("exact", "approx"):
        q, k = (t.detach() for t in tensors[:2])
        measure(f"select {selection}", lambda q=q, k=k, s=selection: select_chunks(q, k, selection=s), **shape)
    chunks = select_chunks(*tensors[:2], selection="approx")
    with torch.no_grad():
        measure("attend fwd", lambda: top1_chunk_attention(*tensors, chunks=chunks), **shape)
    measure("attend fwd+bwd", step(top1_chunk_attention, tensors, chunks=chunks), **shape)
    for selection in ("exact", "approx"):
        t = measure(f"{selection} fwd+bwd", step(top1_chunk_attention, tensors, selection=selection), **shape)
        if with_dense:
            print(f"{'':34s} {best / t:.1f} x dense", flush=True)


def run_time() -> None:
    for H, D in LONG:
        time_shape(1, 102400, H, D)
    time_shape(32, 2048, 12, 64)
    time_shape(16, 2048, 16, 128)


def run_skew() -> None:
    for H, D in LONG:
        tensors = draw(1, 102400, H, D)
        position = torch.arange(102400, device="cuda").view(1, -1, 1)
        spread = select_chunks(*tensors[:2], selection="approx")
        to_first = (torch.rand(spread.shape, device="cuda") < 0.9) & (position >= 128)
        for name, chunks in (("spread", spread), ("90 % on chunk 0", torch.where(to_first, 0, spread))):
            measure(f"attend fwd+bwd, {name}", step(top1_chunk_attention, tensors, chunks=chunks), T=102400, H=H, D=D)


def run_sharp() -> None:
    """Exact selection by how sharp the attention is: the larger the scores, the less the bounds rule out."""
    for H, D in LONG:
        q, k, _ = (t.detach() for t in draw(1, 102400, H, D))
        for scale in (D**-0.5, 1.0, 4.0, 16.0, 100.0):
            name = f"select exact, scale {scale:.3g}"
            measure(name, lambda q=q, k=k, s=scale: select_chunks(q, k, scale=s), T=102400, H=H, D=D)


def run_profile() -> None:
    """Where the time goes, by kernel."""
    for B, T, H, D in ((1, 102400, 12, 64), (1, 102400, 16, 128), (32, 2048, 12, 64)):
        run = step(top1_chunk_attention, draw(B, T, H, D))
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
        rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
        print(f"B {B}, T {T}, H {H}, D {D}: {sum(row.device_time_total for row in rows) / 3000:.3f} ms on the GPU")
        for row in rows[:14]:
            print(f"  {row.device_time_total / 3000:8.3f} ms {row.count // 3:4d} x {row.key[:70]}")


def run_growth() -> None:
    time_shape(1, 1048576, 12, 64, with_dense=False)


def run_loss() -> None:
    N, d, V = 65536, 768, 32000
    hidden = torch.randn(N, d, device="cuda", requires_grad=True)
    weight = (torch.randn(V, d, device="cuda") / 28).requires_grad_()
    targets = torch.randint(0, V, (N,), device="cuda")

    def loss(op: Callable[..., Tensor], **options: Any) -> Callable[[], Any]:
        def run() -> Any:
            with torch.autocast("cuda", torch.bfloat16):
                return torch.autograd.grad(op(hidden, weight, targets, **options), (hidden, weight))

        return run

    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for chunk in (4096, 8192, 16384):
        measure(f"loss eager, chunks of {chunk}", loss(linear_cross_entropy, chunk_tokens=chunk), T=N, D=d)
    measure("loss compiled", loss(compiled), T=N, D=d)

    def plain(h: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), t)

    measure("loss with all logits, compiled", loss(torch.compile(plain)), T=N, D=d)


STEPS = {
    "time": run_time,
    "skew": run_skew,
    "sharp": run_sharp,
    "growth": run_growth,
    "loss": run_loss,
    "profile": run_profile,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", choices=["check", *STEPS])
    parser.add_argument("--csv", help="write the rows to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    if "check" in args.steps:
        results = [*check_top1(), *check_softmax(), *check_compiled(), *check_loss()]
        if not all(results):
            sys.exit(f"{results.count(False)} of {len(results)} checks failed")
    for key in args.steps:
        if key in STEPS:
            STEPS[key]()
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            fields = ["gpu", "torch", "triton", "name", "B", "T", "H", "D", "p20", "p50", "p80", "peak_mib"]
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            versions = {"gpu": name, "torch": torch.__version__, "triton": triton.__version__}
            writer.writerows({**versions, **row} for row in ROWS)


if __name__ == "__main__":
    main()
