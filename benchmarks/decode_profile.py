"""Where a decoding step spends its time: the kernels of a step by name, from torch's profiler.

    python benchmarks/decode_profile.py mamba2 rwkv7 --prompt 51200 --batch 1 16 --csv profile.csv

Weights are new and the state is empty, because their values do not change the time of a step. `calls` and `us` are per
step. "(gaps)" is the part of a step in which no kernel runs. On a GPU the step is compiled and runs as a CUDA graph.
"""

import argparse
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.script import run
from seqarch.bench.generation import MODES, WARM_UP, new_model, time_steps
from seqarch.bench.mixers import find_recipes
from seqarch.model import Decoder, SequenceLM, StaticStep
from seqarch.tables import write_csv

COLUMNS = ("recipe", "batch", "prompt", "kernel", "calls", "us", "share", "kind")
STEPS = 20


def is_product(name: str) -> bool:
    """Whether a kernel multiplies matrices."""
    return name.startswith("nvjet") or re.search(r"cublas|gemm|splitK|::(add)?[bm]?mm$", name) is not None


def kind(name: str) -> str:
    """The part of a step that a kernel belongs to in docs/performance.md."""
    if name.startswith("("):
        return name
    if is_product(name):
        return "product"
    return "decoding" if name.startswith("decode_") else "other"


def kernels(lm: SequenceLM, prompt: int, batch: int) -> Iterator[tuple[str, float, float]]:
    """Name, calls and microseconds per step of each kernel, the longest first; then the gaps and the whole step."""
    device = lm.embedding.weight.device
    on_gpu = device.type == "cuda"
    options: dict[str, Any] = MODES["compiled"] if on_gpu else MODES["python"]
    decoder = Decoder(lm, temperature=1.0, **options)
    new = WARM_UP + 3 * STEPS
    tokens = torch.zeros((batch, prompt + new), dtype=torch.int64, device=device)
    state = lm.init_state(batch, prompt + new, device, decoder.dtype)
    step = StaticStep(decoder, state, tokens, prompt - 1)
    for _ in range(WARM_UP):
        step()
    seconds = statistics.median(time_steps(step, STEPS, device))
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as record:
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    times = [
        (row.key, row.count / STEPS, (row.self_device_time_total if on_gpu else row.self_cpu_time_total) / STEPS)
        for row in record.key_averages()
    ]
    times = sorted((each for each in times if each[2] > 0), key=lambda each: -each[2])
    yield from times
    yield "(gaps)", 0, max(0.0, 1e6 * seconds - sum(each[2] for each in times))
    yield "(step)", 1, 1e6 * seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="as for `seqarch bench generation`")
    parser.add_argument("--prompt", type=int, default=51_200)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    for recipe in find_recipes(args.recipes):
        lm, _ = new_model(recipe)
        for batch in args.batch:
            found = list(kernels(lm, args.prompt, batch))
            whole = found[-1][2]
            rows += [(recipe.stem, batch, args.prompt, *each, each[2] / whole, kind(each[0])) for each in found]
            print(f"{recipe.stem}, batch {batch}: {whole:,.0f} us a step", flush=True)
            for name, calls, us in [*found[:12], found[-2]]:
                print(f"  {us:9.1f} us  {us / whole:6.1%}  {calls:6.1f} calls  {name[:100]}", flush=True)
            if args.csv:
                write_csv(args.csv, COLUMNS, rows)


if __name__ == "__main__":
    run(main)
