"""Where a training step of a recipe spends its time: kernels by part and kind, from torch's profiler.

    python -m benchmarks.step_profile rwkv7_shell_top1_chunk_approx_100k --steps 12 --csv profile.csv
    python -m benchmarks.step_profile transformer_pp --model.activation_checkpointing=true
    python -m benchmarks.step_profile rwkv7 transformer_pp --size small

Each recipe runs in its own process, and the steps are those of `seqarch bench mixers`. The profiler records the last
three. The rate is the median of all. `calls` and `us` are per step. "(gaps)" is the time in which no kernel runs.

* "forward": the embedding and the blocks.
* "loss": the final norm and the loss, which computes the gradients of the head and of its input at once.
* "backward": the rest of the backward pass, with what activation checkpointing computes again.
* "optimizer": clipping and AdamW.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse import ArgumentParser, Namespace
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.script import run
from seqarch.bench.jobs import Job, Row, report_failures, run_job
from seqarch.bench.mixers import find_recipes, line
from seqarch.bench.training_step import time_recipe
from seqarch.exam.derive import find_model, load_size
from seqarch.model.lm import Blocks
from seqarch.runs.keys import flatten
from seqarch.tables import aligned, write_csv

COLUMNS = ("recipe", "options", "part", "kind", "kernel", "calls", "us", "share")
PARTS = ("backward", "optimizer", "forward", "loss")
"""What follows each of a step's marks; a profile begins before a backward pass."""
MARK = "seqarch_mark"
PROFILED = 3
KINDS = {
    "attention": r"sdpa|scaled_dot_product|flash|fmha|flex_attention|local_forward|remote_forward|chunk_backward"
    r"|local_backward|add_extra|sum_partials|top1_chunk",
    "selection": r"candidates_kernel|chunk_stats|segment_keys|select_(approx|high|exact)|top1_select",
    "sort, search": r"RadixSort|radixSort|searchsorted|DeviceScan|::(sort|cumsum)",
    "copy, cast": r"^Mem(cpy|set)|copy_kernel|FillFunctor|CatArray|^triton_poi_fused__to_copy_\d+$"
    r"|::(copy_|_to_copy|fill_|zero_|clone)$",
    "compiled elementwise": r"^triton_|CompiledFxGraph",
}


def is_product(name: str) -> bool:
    """Whether a kernel multiplies matrices."""
    return name.startswith("nvjet") or re.search(r"cublas|gemm|splitK|::(add)?[bm]?mm$", name) is not None


class Slice(NamedTuple):
    """A kernel or, on a CPU, the own time of an operator; times in microseconds."""

    name: str
    start: float
    us: float


def is_mark(name: str) -> bool:
    return name == MARK or "spin_kernel" in name


def kind(name: str) -> str:
    """The kind of a kernel."""
    if is_product(name):
        return "product"
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def by_kernel(slices: Sequence[Slice], steps: int) -> list[tuple[str, str, str, float, float]]:
    """Part, kind, name, calls and microseconds per step of each kernel, the longest first; then gaps and step.

    Args:
        slices: what ran, with the marks before, between and after the parts of the steps.
        steps: how many there are.
    """
    slices = sorted(slices, key=lambda each: each.start)
    marks = [each for each in slices if is_mark(each.name)]
    if len(marks) != len(PARTS) * steps + 1:
        raise RuntimeError(f"the profile of {steps} steps has {len(marks)} marks, not {len(PARTS) * steps + 1}")
    found: dict[tuple[str, str], tuple[int, float]] = {}
    seen = 0
    for each in slices:
        if is_mark(each.name):
            seen += 1
        elif 0 < seen < len(marks):
            key = PARTS[(seen - 1) % len(PARTS)], each.name
            calls, us = found.get(key, (0, 0.0))
            found[key] = calls + 1, us + each.us
    rows = [(part, kind(name), name, calls / steps, us / steps) for (part, name), (calls, us) in found.items()]
    rows.sort(key=lambda row: -row[-1])
    whole = (marks[-1].start - marks[0].start) / steps
    gaps = max(0.0, whole - sum(row[-1] for row in rows))
    return [*rows, ("(step)", "(gaps)", "(gaps)", 0, gaps), ("(step)", "(step)", "(step)", 1, whole)]


@contextlib.contextmanager
def marked_steps(steps: int, on_gpu: bool) -> Iterator[Any]:
    """A profile, started in the step before the last `PROFILED` ones of `steps`; each step is marked by its parts."""
    record = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    backward, blocks = torch.Tensor.backward, Blocks.forward
    passed = 0

    def mark() -> None:
        with record_function(MARK):
            if on_gpu:
                torch.cuda._sleep(1)  # a kernel, which lies between the kernels of two parts

    def switch(start: bool) -> None:
        if on_gpu:
            torch.cuda.synchronize()
        record.start() if start else record.stop()

    def marked_backward(*args: Any, **options: Any) -> None:
        nonlocal passed
        passed += 1
        if passed == steps - PROFILED:
            switch(True)
        mark()
        if passed == steps:
            switch(False)
        backward(*args, **options)
        mark()

    def marked_blocks(*args: Any, **options: Any) -> torch.Tensor:
        x = blocks(*args, **options)
        mark()
        return x

    hook = register_optimizer_step_post_hook(lambda *_: mark())
    torch.Tensor.backward, Blocks.forward = marked_backward, marked_blocks
    try:
        yield record
    finally:
        torch.Tensor.backward, Blocks.forward = backward, blocks
        hook.remove()


def profile_recipe(recipe: str, overrides: dict[str, Any], steps: int) -> Row:
    """The row of `seqarch bench mixers`, with `kernels`, the rows of `by_kernel`."""
    on_gpu = torch.cuda.is_available()
    with marked_steps(steps + 1, on_gpu) as record:  # with the first, which is not timed
        row = time_recipe(recipe, overrides, steps)
    slices = [
        Slice(each.name, each.time_range.start, each.time_range.elapsed_us() if on_gpu else each.self_cpu_time_total)
        for each in record.events()
        if (each.device_type.name == "CUDA") == on_gpu and not (on_gpu and getattr(each, "is_user_annotation", False))
    ]
    return {**row, "kernels": by_kernel(slices, PROFILED)}


def summary(kernels: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The cells of a table of milliseconds per step by kind and part."""
    *kernels, gaps, step = kernels
    times: dict[str, dict[str, float]] = {}
    for part, kind, *_, us in kernels:
        parts = times.setdefault(kind, dict.fromkeys(PARTS, 0.0))
        parts[part] += us / 1000
    order = [*PARTS[2:], *PARTS[:2]]
    whole = step[-1] / 1000
    rows = [
        [
            kind,
            *(f"{parts[part]:.2f}" for part in order),
            f"{sum(parts.values()):.2f}",
            f"{sum(parts.values()) / whole:.1%}",
        ]
        for kind, parts in sorted(times.items(), key=lambda each: -sum(each[1].values()))
    ]
    totals = [f"{sum(parts[part] for parts in times.values()):.2f}" for part in order]
    rows.append(["all kernels", *totals, f"{whole - gaps[-1] / 1000:.2f}", f"{1 - gaps[-1] / step[-1]:.1%}"])
    rows.append(["gaps", *[""] * len(order), f"{gaps[-1] / 1000:.2f}", f"{gaps[-1] / step[-1]:.1%}"])
    return [["ms per step", *order, "step", "share"], *rows]


def exam_recipes(size: str, names: Sequence[str], folder: Path) -> list[Path]:
    """Write the recipes of models in an exam of `size`, by `--mixer`'s names, into `folder`."""
    derived = [find_model(load_size(size, {}), name, {}) for name in names]
    for name, recipe in derived:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(recipe), sort_keys=False), encoding="utf-8")
    return [folder / f"{name}.yaml" for name, _ in derived]


def main(args: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="+", help="as for `seqarch bench mixers`")
    parser.add_argument("--size", default=None, help="take the models that an exam of this size has for these names")
    parser.add_argument("--steps", type=int, default=12, help=f"steps after the first; more than {PROFILED}")
    parser.add_argument("--micro_batch_size", type=int | None, default=None)
    parser.add_argument("--sequence_length", type=int | None, default=None)
    parser.add_argument("--model", type=dict[str, Any], default={}, help="as --model.activation_checkpointing=false")
    parser.add_argument("--csv", type=Path | None, default=None)
    parser.add_argument("--own_caches", action="store_true", help="use the compile caches of earlier runs")
    options = parser.parse_args(args)
    if options.steps <= PROFILED:
        parser.error(f"--steps must be more than {PROFILED}, not {options.steps}")
    data = {key: getattr(options, key) for key in ("micro_batch_size", "sequence_length")}
    overrides = flatten({"model": options.model, "data": {key: n for key, n in data.items() if n}})
    with tempfile.TemporaryDirectory() as folder:
        names = options.recipes
        recipes = exam_recipes(options.size, names, Path(folder)) if options.size else find_recipes(names)
        profile_all(recipes, overrides, options)


def profile_all(recipes: Sequence[Path], overrides: Mapping[str, Any], options: Namespace) -> None:
    """Profile each recipe in its own process, print its table and write the kernels of all."""
    said = " ".join(f"{key}={value}" for key, value in options.model.items())
    rows, errors = [], []
    for path in recipes:
        arguments = {"recipe": str(path), "overrides": overrides, "steps": options.steps}
        row = run_job(Job(path.stem, "benchmarks.step_profile:profile_recipe", arguments), options.own_caches)
        print(line(row), said, flush=True)
        if "error" in row:
            errors.append(row["error"])
            continue
        kernels = row["kernels"]
        cells = summary(kernels)
        print(*aligned(cells, right=range(1, len(cells[0]))), sep="\n")
        for part, _, name, calls, us in kernels[:24]:
            print(f"  {us / 1000:8.2f} ms  {calls:6.1f} calls  {part:9s}  {name[:110]}", flush=True)
        recipe = f"{options.size}/{path.stem}" if options.size else path.stem
        rows += [(recipe, said, *each, each[-1] / kernels[-1][-1]) for each in kernels]
        if options.csv:
            write_csv(options.csv, COLUMNS, rows)
    report_failures(errors, len(recipes), "recipes were not profiled")


if __name__ == "__main__":
    run(main)
