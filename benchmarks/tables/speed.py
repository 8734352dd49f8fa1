"""The tables of docs/performance.md, from the rows of CSV files in `benchmarks/`.

Training rates are rounded to hundreds, other numbers to three digits.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.tables.kernels import Rows, digits, times
from seqarch.tables import read_csv

FOLDER = Path(__file__).parents[1]
ALL_RECIPES = "19de233"
"""The commit of the call that timed all recipes."""
Row = dict[str, str]
Table = list[list[str]]


def read(name: str, card: str = "h200") -> list[Row]:
    return read_csv(FOLDER / f"{name}_{card}.csv")


def rivals() -> Table:
    """Our models next to published models of the same shape, from the same call; fla's in its faster precision."""
    table = [["recipe", "ours, tokens/s", "published model", "its tokens/s", "ours over its", "GiB, ours", "its"]]
    for recipe in ("transformer_pp_110m", "transformer_pp_1b"):
        ours, *others = (row for row in read("published") if row["name"] == recipe)
        table += [_pair(ours, other, other["of"]) for other in others]
    rows = read("mixers")
    latest = {row["name"]: row for row in rows if row["times_fla"]}
    for ours in sorted(latest.values(), key=lambda row: -float(row["tokens_per_s"])):
        call = [row for row in rows if (row["name"], row["commit"], row["of"]) == (ours["name"], ours["commit"], "fla")]
        fastest = max(call, key=lambda row: float(row["tokens_per_s"]))
        table.append(_pair(ours, fastest, f"fla, {fastest['precision']}"))
    return table


def _pair(ours: Row, other: Row, name: str) -> list[str]:
    ratio = float(ours["tokens_per_s"]) / float(other["tokens_per_s"])
    peaks = (f"{float(row['peak_gib']):.1f}" for row in (ours, other))
    return [f"`{ours['name']}`", rate(ours), name, rate(other), f"{ratio:.2f}", *peaks]


DENSE = ("cuDNN", "FlashAttention-2", "FlashAttention-4", "FlashAttention-4 in fixed order")


def dense() -> Table:
    """Our attention kernels next to the fastest dense kernel of the same call."""
    table = [["kernel", "shape", "ours, ms", "dense, ms", "by", "times as fast"]]

    def add(kernel: str, shape: str, ours: float, dense: float, by: str = "cuDNN") -> None:
        table.append([kernel, shape, digits(ours), digits(dense), by, times(dense / ours)])

    rows = read("kernels")
    long, element, decode = (Rows(rows, step) for step in ("time", "element", "decode"))
    for kernel in ("exact", "approx"):
        for shape in (("102400", "12", "64"), ("102400", "16", "128")):
            dense, by = min((long.of(f"dense {name} fwd+bwd", shape), name) for name in DENSE)
            ours = long.of(f"{kernel} fwd+bwd", shape)
            add(f"Top-1 chunk, {kernel}", f"102,400 tokens, {_heads(shape)}", ours, dense, by)
    short = Rows(read("kernels", "h100"), "replayed")
    for kernel in ("exact", "approx"):
        shape = ("2048", "16", "128")  # heads of 64 gain more
        both = (short.of(f"{name}, replayed: fwd+bwd", shape) for name in (kernel, "dense cuDNN"))
        add(f"Top-1 chunk, {kernel}", f"2,048 tokens, {_heads(shape)} (H100)", *both)
    for shape in (("2048", "12", "64"), ("16384", "16", "128")):
        both = (element.of(f"{name} fwd+bwd", shape) for name in ("element", "dense cuDNN"))
        add("Top-1 element", f"{int(shape[0]):,} tokens, {_heads(shape)}", *both)
    for kernel in ("exact", "approx"):
        for shape in (("64", "50000", "12", "64"), ("1", "102400", "12", "64")):
            fastest = min(decode.of(f"dense cuDNN{layout}, CUDA graph", shape) for layout in ("", ", by head"))
            where = f"{int(shape[1]):,} keys, batch {shape[0]}"
            add(f"decoding, {kernel}", where, decode.of(f"{kernel}, CUDA graph", shape), fastest)
    return table


def _heads(shape: tuple[str, ...]) -> str:
    return f"{shape[1]} heads of {shape[2]}"


def generation() -> Table:
    """64 prompts of 50,000 tokens with 5,000 new tokens each: arXiv 2505.18522, table 3."""
    rows = [row for row in read("generation") if row["batch_size"] == "64"]
    total = {row["name"]: float(row["total_s"]) for row in rows}
    table = [["model", "prompts, tokens/s", "new tokens/s", "total, s", "state, GiB", "times as fast"]]
    for row in sorted(rows, key=lambda row: float(row["total_s"])):
        how = "" if row["of"] == "seqarch" else f", {row['mode'].replace('python', 'from Python')}"
        speeds = [rounded(row["prefill_tokens_per_s"]), rounded(row["decode_tokens_per_s"])]
        against = f"{total['transformer_pp_110m'] / float(row['total_s']):#.3g}"
        name = f"`{row['name']}`" if row["of"] == "seqarch" else f"transformers' Llama{how}"
        table.append([name, *speeds, f"{float(row['total_s']):.1f}", digits(float(row["state_gib"])), against])
    return table


def memory() -> Table:
    """What each recipe takes on one GPU with the sequences per step that it has."""
    rows = [row for row in read("mixers") if row["commit"].startswith(ALL_RECIPES)]
    rows = [row for row in rows if row["of"] == "seqarch" and not row["times_fla"]]
    table = [["recipe", "peak, GiB", "tokens/s", "MFU, %"]]
    for size in ("110m", "1b"):
        own = [row for row in rows if row["name"].endswith(size)]
        table += [_step(row) for row in sorted(own, key=lambda row: -float(row["tokens_per_s"]))]
    return table + [_step(row) for row, _ in _long()]


def _step(row: Row) -> list[str]:
    return [f"`{row['name']}`", f"{float(row['peak_gib']):.1f}", rate(row), f"{100 * float(row['mfu']):.0f}"]


def _long() -> list[tuple[Row, float]]:
    """The recipes of 102,400 tokens with recomputation, and their speed over full softmax in the same call."""
    rows = [row for row in read("mixers") if row["sequence_length"] == "102400"]
    softmax = {row["commit"]: float(row["tokens_per_s"]) for row in rows if "softmax" in row["name"]}
    latest = {row["name"]: row for row in rows if row["commit"] in softmax}
    ordered = sorted(latest.values(), key=lambda row: -float(row["tokens_per_s"]))
    return [(row, float(row["tokens_per_s"]) / softmax[row["commit"]]) for row in ordered]


def gpus() -> Table:
    """One and two GPUs, the largest speed-up first; rates are medians from the third step on."""
    head = ["recipe", "one GPU, tokens/s", "two GPUs, tokens/s", "speed-up", "GiB on one", "GiB on each of two"]
    found = []
    rows = read("fsdp")
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        runs = [[row for row in rows if (row["recipe"], row["gpus"]) == (recipe, gpus)] for gpus in ("1", "2")]
        one, two = (
            statistics.median(float(row["tokens_per_s"]) for row in run if int(row["step"]) > 2) for run in runs
        )
        peaks = (f"{max(float(row['peak_gib']) for row in run):.1f}" for run in runs)
        found.append((two / one, [f"`{recipe}`", hundreds(one), hundreds(two), f"{two / one:.2f}", *peaks]))
    return [head, *(cells for _, cells in sorted(found, reverse=True))]


def float8_gain(recipe: str, card: str = "h200") -> str:
    """The speed of training with FP8 products over bf16: medians after the tenth step."""
    rows = [row for row in read("float8", card) if row["recipe"] == recipe and int(row["step"]) > 10]
    bf16, fp8 = (
        statistics.median(float(row["tokens_per_second"]) for row in rows if row["products"] == products)
        for products in ("bf16", "tensorwise")
    )
    return f"{fp8 / bf16:.2f}"


def float8_losses(recipe: str, card: str) -> str:
    """The losses after the last step, in bf16 and with FP8 products."""
    rows = [row for row in read("float8", card) if row["recipe"] == recipe]
    last = {row["products"]: row for row in rows}
    bf16, fp8 = (f"{float(last[products]['loss']):.3f}" for products in ("bf16", "tensorwise"))
    return f"{bf16} and {fp8} after {last['bf16']['step']} steps"


def trains_long(model: str) -> str:
    """How many times as fast as full softmax a shell trains at 102,400 tokens, with recomputation."""
    return next(f"{ratio:.1f}" for row, ratio in _long() if row["name"] == f"rwkv7_shell_{model}_100k")


def keeps_long(model: str) -> str:
    """The same without recomputation."""
    kept = [row for row in read("shell") if (row["kind"], row["activation_checkpointing"]) == ("(step)", "false")]
    speeds = {row["recipe"]: float(row["tokens_per_s"]) for row in kept}
    return f"{speeds[f'rwkv7_shell_{model}_100k'] / speeds['rwkv7_shell_softmax_100k']:.1f}"


def trains(recipe: str) -> str:
    """Tokens per second of a recipe next to published models."""
    return next(row[1] for row in rivals() if row[0] == f"`{recipe}`")


def mamba2() -> str:
    """Tokens per second and MFU of the latest run of `mamba2_110m`."""
    row = [row for row in read("mixers") if (row["name"], row["of"]) == ("mamba2_110m", "seqarch")][-1]
    return f"{rate(row)} tokens/s, an MFU of {100 * float(row['mfu']):.1f} %"


def rate(row: Row) -> str:
    return hundreds(row["tokens_per_s"])


def hundreds(number: str | float) -> str:
    return f"{round(float(number), -2):,.0f}"


def rounded(number: str) -> str:
    """Three digits, and no fraction."""
    return f"{float(f'{float(number):.3g}'):,.0f}"


def start_up() -> str:
    """Seconds of the first step of the recipes with empty caches."""
    rows = [row for row in read("mixers") if row["commit"].startswith(ALL_RECIPES) and not row["times_fla"]]
    seconds = [float(row["start_up_s"]) for row in rows if row["of"] == "seqarch"]
    return f"{min(seconds):.0f} to {max(seconds):.0f}"


def fla_step() -> str:
    """How many times as fast as fla's model our RWKV-7 decodes."""
    rows = read("generation")
    (fla,) = (row for row in rows if row["of"] == "fla")
    (ours,) = (
        row for row in rows if (row["name"], row["commit"], row["of"]) == (fla["name"], fla["commit"], "seqarch")
    )
    return f"{float(fla['step_ms']) / float(ours['step_ms']):.0f} times"


def prompts(mode: str) -> str:
    """Tokens per second at which RWKV-7 reads 16 prompts: ours with passes from Python or compiled, or fla's."""
    rows = [row for row in read("generation") if row["name"] == "rwkv7_110m"]
    (row,) = (row for row in rows if (row["of"] == "fla" if mode == "fla" else _only_prompts(row, mode)))
    return rounded(row["prefill_tokens_per_s"])


def _only_prompts(row: Row, mode: str) -> bool:
    return row["mode"] == mode and not row["step_ms"]
