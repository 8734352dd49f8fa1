"""FlexAttention for one query per sequence against caches of several lengths, next to our decoding and SDPA.

    python benchmarks/flex_decoding.py --csv flex.csv

Two ways tell FlexAttention the lengths: a block mask per sequence, so that it reads only blocks with keys, and a
modification of the scores, which reads the whole cache. Each way is compiled once with dynamic=True and then runs at
two capacities and with other lengths. `error` is relative to SDPA with a mask in float32, `graphs` counts compilations.
SDPA takes the lengths as a mask. `mask_ms` is the time to build the block mask.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from seqarch.kernels import attention_decode
from seqarch.tables import write_csv

COLUMNS = ("name", "B", "capacity", "H", "D", "result", "error", "graphs", "first_s", "ms", "mask_ms")
TOLERANCE = 1e-2
Call = Callable[[], Tensor]


class Case:
    """Queries `[B, H, 1, D]`, caches `[B, H, capacity, D]` and the lengths, drawn at random."""

    def __init__(self, B: int, capacity: int, H: int, D: int, device: str, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        like: dict[str, Any] = {"generator": generator, "device": device}
        like["dtype"] = torch.bfloat16 if device == "cuda" else torch.float32
        self.q = torch.randn(B, H, 1, D, **like)
        self.k, self.v = (torch.randn(B, H, capacity, D, **like) for _ in range(2))
        drawn = torch.randint(1, capacity + 1, (B,), generator=generator, device=device)
        self.lengths, self.capacity = drawn.int(), capacity

    def block_mask(self, build: Callable[..., Any]) -> Any:
        lengths = self.lengths
        B = self.q.shape[0]
        return build(lambda b, h, i, j: j < lengths[b], B, None, 1, self.capacity, device=self.q.device)

    def by_score(self, flex: Callable[..., Any]) -> Tensor:
        lengths = self.lengths
        hidden = float("-inf")
        return flex(
            self.q, self.k, self.v, score_mod=lambda score, b, h, i, j: torch.where(j < lengths[b], score, hidden)
        )

    def sdpa(self, *, wide: bool = False) -> Tensor:
        seen = torch.arange(self.capacity, device=self.q.device) < self.lengths[:, None]
        q, k, v = ((t.float() if wide else t) for t in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, seen[:, None, None])

    def ours(self) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (self.q, self.k, self.v))
        return attention_decode(q, k, v, self.lengths).transpose(1, 2)


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """The median time of a call."""
    if device == "cuda":
        import triton

        return float(triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median"))
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def rows(
    shape: tuple[int, int, int], capacities: Sequence[int], device: str, *, compiled: bool
) -> Iterator[dict[str, Any]]:
    """The rows of a batch, heads and head dim: each way at each capacity."""
    B, H, D = shape
    torch.compiler.reset()
    flex = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
    build = torch.compile(create_block_mask, dynamic=True) if compiled and device == "cuda" else create_block_mask
    for seed, capacity in enumerate(capacities):
        case = Case(B, capacity, H, D, device, seed)
        wanted = case.sdpa(wide=True)
        yield from measured("SDPA with a mask", case.sdpa, wanted, case)
        yield from measured("attention_decode", case.ours, wanted, case)
        yield from measured("FlexAttention, scores", lambda case=case: case.by_score(flex), wanted, case)
        yield from with_block_mask(case, build, flex, wanted)


def with_block_mask(case: Case, build: Any, flex: Any, wanted: Tensor) -> Iterator[dict[str, Any]]:
    name = "FlexAttention, block mask"
    try:
        mask = case.block_mask(build)
        spent = milliseconds(lambda: case.block_mask(build), case.q.device.type)
    except Exception as failure:  # a compiler may raise anything; what it says is the result
        yield {**described(name, case), "result": first_line(failure)}
        return
    call = lambda: flex(case.q, case.k, case.v, block_mask=mask)  # noqa: E731
    for row in measured(name, call, wanted, case):
        yield {**row, "mask_ms": spent}


def described(name: str, case: Case) -> dict[str, Any]:
    B, H, capacity, D = case.k.shape
    return {"name": name, "B": B, "capacity": capacity, "H": H, "D": D}


def first_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).strip().splitlines() or [''])[0]}"


def measured(name: str, call: Call, wanted: Tensor, case: Case) -> Iterator[dict[str, Any]]:
    """The row of one way: whether it is right, how many graphs it compiled and its time."""
    counters.clear()
    start = time.perf_counter()
    try:
        error = ((call().float() - wanted).norm() / wanted.norm()).item()
        first = time.perf_counter() - start
        spent = milliseconds(call, case.q.device.type)
    except Exception as failure:  # a compiler may raise anything; what it says is the result
        yield {**described(name, case), "result": first_line(failure)}
        return
    result = "works" if error < TOLERANCE else "differs"
    graphs = counters["stats"]["unique_graphs"]
    yield {**described(name, case), "result": result, "error": error, "graphs": graphs, "first_s": first, "ms": spent}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 64, 16, 128], help="H and D, in pairs")
    parser.add_argument("--capacity", type=int, nargs="+", default=[8192, 12_345])
    parser.add_argument("--eager", action="store_true", help="do not compile FlexAttention")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which no other shape begins")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args(arguments)
    end, found = time.monotonic() + args.limit, []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for H, D in zip(args.heads[::2], args.heads[1::2], strict=True):
        for B in args.batch:
            if time.monotonic() > end:
                print(f"no time left for B {B}, H {H}, D {D}", flush=True)
                continue
            for row in rows((B, H, D), args.capacity, device, compiled=not args.eager):
                values = (f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values())
                print("  ".join(f"{name} {value}" for name, value in zip(row, values, strict=True)), flush=True)
                found.append([row.get(name) for name in COLUMNS])
                if args.csv:
                    write_csv(args.csv, COLUMNS, found)


if __name__ == "__main__":
    with torch.no_grad():
        main()
