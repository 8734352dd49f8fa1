"""The tables of docs/performance.md from the rows of the CSV files in this folder.

    python -m benchmarks.performance_tables

Training rates are rounded to hundreds, other numbers to three digits.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import fsdp_table, step_profile
from benchmarks.kernel_tables import Rows
from benchmarks.page_tables import Row, Table, digits, markdown, table, times
from seqarch.tables import read_csv

ALL_RECIPES, PROFILED = "19de233", "53e738b"
"""Commits of the call that timed all recipes, and of the one that profiled Transformer++ at 1.3B."""
PAPER = {"softmax": "1", "top1_chunk": "1.90 x", "top1_chunk_approx": "4.50 x", "window_256": "5.29 x"}
AIMS = {"transformer_pp_110m": 8.0, "top1_chunk_110m": 4.8}
"""Milliseconds of a decoding step at batch 16; others have 1.2, and all have 0.5 at batch 1."""
MFU_AIMS = {"small/transformer_pp": 0.45}
"""At the exam's size; recurrences have 0.25."""
FP8_AT_END = {("h200", "transformer_pp_1b"): 5, ("h100", "transformer_pp_1b"): 10, ("h200", "transformer_pp_110m"): 10}
"""How many of the last losses a row compares, by card and recipe."""


def read(name: str, card: str = "h200") -> list[Row]:
    return read_csv(Path(__file__).with_name(f"{name}_{card}.csv"))


def name(row: Row) -> str:
    return f"`{row['name']}`"


def rate(row: Row) -> str:
    return hundreds(row["tokens_per_s"])


def hundreds(number: str | float) -> str:
    return f"{round(float(number), -2):,.0f}"


def millions(row: Row) -> str:
    return f"{int(row['parameters']) / 1e6:,.1f}M"


def memory(row: Row) -> str:
    return f"{float(row['peak_gib']):.1f} GiB"


def percent(share: str | float, places: int = 0) -> str:
    return f"{100 * float(share):.{places}f} %"


def rounded(number: str) -> str:
    """Three digits, and no fraction."""
    return f"{float(f'{float(number):.3g}'):,.0f}"


def per_step(row: Row) -> str:
    return f"{row['micro_batch_size']} x {int(row['sequence_length']):,}"


def published() -> Table:
    columns: dict[str, Callable[[Row], str]] = {
        "recipe": name,
        "model": lambda row: row["of"],
        "parameters": millions,
        "tokens/s": rate,
        "20th to 80th percentile": lambda row: f"{hundreds(row['p20'])} to {hundreds(row['p80'])}",
        "peak memory": memory,
    }
    return table(columns, read("published"))


def profiled(recipe: str) -> list[Row]:
    """The kernels of a step, with gaps and step as the last rows."""
    return [row for row in read("step_profile") if row["recipe"] == recipe]


def profile() -> Table:
    rows = profiled("transformer_pp_1b")
    return step_profile.summary([[*list(row.values())[2:6], float(row["us"])] for row in rows])


def limits() -> Table:
    """What each part of the step of `profile` would take at its measured limit."""
    rows = profiled("transformer_pp_1b")
    kernels = [row for row in read("kernels") if row["commit"].startswith(PROFILED)]
    (model,) = (row for row in read("published") if (row["name"], row["of"]) == ("transformer_pp_1b", "seqarch"))
    parameters, tokens = int(model["parameters"]), int(model["micro_batch_size"]) * int(model["sequence_length"])
    layers, hidden = 24, 5504
    product, copy = (
        max(float(row["p50"]) for row in kernels if row["step"] == "limits" and row["unit"] == unit)
        for unit in ("TFLOP/s", "TB/s")
    )
    attention = Rows(kernels, "element").of("dense cuDNN fwd+bwd", ("16", "2048", "16", "128"))
    flops, optimizer, gated = 6e-12 * parameters * tokens, 32e-12 * parameters, 16e-12 * layers * tokens * hidden
    best = {
        "products": (1000 * flops / product, f"{flops:.0f} TFLOP at the {product:.0f} TFLOP/s of an 8192^3 product"),
        "attention": (layers * attention, f"{layers} times the {attention:.2f} ms of cuDNN by itself"),
        "optimizer": (1000 * optimizer / copy, f"{1000 * optimizer:.1f} GB at the {copy:.2f} TB/s of a copy"),
        "GeGLU": (1000 * gated / copy, f"{1000 * gated:.1f} GB at the same rate"),
        "gaps": (0.0, "no gaps"),
        "other": (None, "not known, taken as it is"),
    }
    found: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        found[part(row)] += float(row["us"]) / 1000
    whole = found.pop("step")
    least = {each: found[each] if ms is None else ms for each, (ms, _) in best.items()}
    cells = [["part of a step", "ms", "at its limit", "gain", "the limit"]]
    for each, (_, why) in best.items():
        cells.append([each, *(f"{ms:.1f}" for ms in (found[each], least[each], found[each] - least[each])), why])
    total = sum(least.values())
    gain = [f"{tokens / total * 1000 - tokens / whole * 1000:,.0f}", "all limits at once"]
    cells.append(["step", f"{whole:.1f}", f"{total:.1f}", f"{whole - total:.1f}", ""])
    return [*cells, ["tokens/s", *(f"{tokens / ms * 1000:,.0f}" for ms in (whole, total)), *gain]]


def part(row: Row) -> str:
    """The part of a step that a kernel belongs to in `limits`."""
    if row["kind"] == "product":
        return "products"
    if row["kind"] == "attention" or "cudnn" in row["kernel"]:
        return "attention"
    if row["part"] in ("(step)", "optimizer"):
        return {"(gaps)": "gaps", "(step)": "step"}.get(row["kind"], "optimizer")
    return "GeGLU" if "gelu" in row["kernel"] else "other"


def gpus() -> Table:
    return [fsdp_table.HEAD, *fsdp_table.table(read("fsdp"))]


def long_sequences() -> Table:
    """The latest row of each recipe next to softmax of the same call; later calls first."""
    rows = [row for row in read("mixers") if row["sequence_length"] == "102400"]
    softmax = {row["commit"]: float(row["tokens_per_s"]) for row in rows if "softmax" in row["name"]}
    rows = [row for row in rows if row["commit"] in softmax]
    calls = list(dict.fromkeys(row["commit"] for row in rows))
    latest = {row["name"]: row["commit"] for row in rows}
    rows = [row for row in rows if latest[row["name"]] == row["commit"] or "softmax" in row["name"]]
    rows.sort(key=lambda row: (-calls.index(row["commit"]), -float(row["tokens_per_s"])))
    columns: dict[str, Callable[[Row], str]] = {
        "recipe": name,
        "commit": lambda row: row["commit"][:7],
        "tokens/s": rate,
        "against full softmax": lambda row: times(float(row["tokens_per_s"]) / softmax[row["commit"]]),
        "the paper, on A100s": lambda row: PAPER.get(
            row["name"].removeprefix("rwkv7_shell_").removesuffix("_100k"), ""
        ),
        "MFU": lambda row: percent(row["mfu"]),
        "peak memory": memory,
    }
    return table(columns, rows)


def kept_activations() -> Table:
    rows = [row for row in read("shell") if row["kind"] == "(step)"]
    softmax = float(rows[-1]["tokens_per_s"])
    columns: dict[str, Callable[[Row], str]] = {
        "recipe": lambda row: f"`{row['recipe']}`",
        "recomputation": lambda row: {"true": "yes", "false": "no"}[row["activation_checkpointing"]],
        "tokens/s": rate,
        "against full softmax": lambda row: (
            times(float(row["tokens_per_s"]) / softmax) if row["activation_checkpointing"] == "false" else ""
        ),
        "MFU": lambda row: percent(row["mfu"]),
        "peak memory": memory,
    }
    return table(columns, rows)


def long_profile() -> Table:
    steps: defaultdict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in read("shell"):
        steps[row["recipe"], row["activation_checkpointing"]][row["kind"]] = float(row["step_ms"])
    columns = list(steps.values())
    head = ["kind of kernel, ms", "approximate, with recomputation", "approximate", "exact", "window", "softmax"]
    return [head, *([kind, *(f"{step.get(kind, 0):.1f}" for step in columns)] for kind in columns[0])]


def recipes(size: str) -> Table:
    rows = [row for row in read("mixers") if row["commit"].startswith(ALL_RECIPES) and row["name"].endswith(size)]
    rows = [row for row in rows if row["of"] == "seqarch" and not row["times_fla"]]
    columns: dict[str, Callable[[Row], str]] = {
        f"recipe, {size.strip('_').upper()}": name,
        "tokens per step": per_step,
        "tokens/s": rate,
        "MFU": lambda row: percent(row["mfu"]),
        "peak memory": memory,
        "start-up": lambda row: f"{float(row['start_up_s']):.0f} s",
        "loss, first to last": lambda row: f"{float(row['loss_first']):.1f} to {float(row['loss_last']):.1f}",
        "parameters": millions,
    }
    return table(columns, sorted(rows, key=lambda row: -float(row["tokens_per_s"])))


def next_to_fla() -> Table:
    rows = read("mixers")
    latest = {row["name"]: row for row in rows if row["times_fla"]}

    def peer(row: Row, precision: str) -> Row:
        (found,) = (
            each
            for each in rows
            if (each["name"], each["commit"], each["of"], each["precision"])
            == (row["name"], row["commit"], "fla", precision)
        )
        return found

    def both(row: Row) -> str:
        return f"{rate(row)}, {memory(row)}"

    columns: dict[str, Callable[[Row], str]] = {
        "recipe": name,
        "ours, bf16-mixed": both,
        "fla, bf16-mixed": lambda row: both(peer(row, "bf16-mixed")),
        "fla, bf16-true": lambda row: both(peer(row, "bf16-true")),
        "ours over fla's bf16-mixed": lambda row: (
            f"{float(row['tokens_per_s']) / float(peer(row, 'bf16-mixed')['tokens_per_s']):.2f}"
        ),
        "ours over fla's faster": lambda row: f"{float(row['times_fla']):.2f}",
    }
    return table(columns, sorted(latest.values(), key=lambda row: -float(row["tokens_per_s"])))


def exam_part(row: Row) -> str:
    """The part of a step that a kernel belongs to in `at_the_exams_size`."""
    if (found := part(row)) in ("products", "attention", "gaps", "step"):
        return found
    if row["kind"] == "other" and found == "other" and not row["kernel"].startswith("void "):
        return "the mixer's own kernels"  # not PyTorch's, whose names have a type
    return row["kind"] if row["kind"] == "compiled elementwise" else "other"


def at_the_exams_size() -> Table:
    """Rate and median step are of all steps, the parts of the profiled ones."""
    parts = ["products", "compiled elementwise", "attention", "the mixer's own kernels", "other", "gaps", "step"]
    cells = [["recipe", "tokens/s", "MFU", "aim", "median step, ms", *parts[:-1], "profiled step"]]
    for row in read("profiled_rates"):
        found: defaultdict[str, float] = defaultdict(float)
        for kernel in profiled(row["recipe"]):
            found[exam_part(kernel)] += float(kernel["us"]) / 1000
        mfu, aim = float(row["mfu"]), MFU_AIMS.get(row["recipe"], 0.25)
        step = 1000 * int(row["micro_batch_size"]) * int(row["sequence_length"]) / float(row["tokens_per_s"])
        shown = [rate(row), percent(mfu), f"{percent(aim)}: {'met' if mfu >= aim else 'missed'}", f"{step:.1f}"]
        cells.append([f"`{row['recipe']}`", *shown, *(f"{found[each]:.1f}" for each in parts)])
    return cells


def on_a_cpu() -> Table:
    reference, *rest = read_csv(Path(__file__).with_name("mixers_cpu.csv"))
    columns: dict[str, Callable[[Row], str]] = {
        "recipe": lambda row: f"`{row['name'].removesuffix('_110m')}`",
        "tokens/s": lambda row: rounded(row["tokens_per_s"]),
        "step time over Transformer++": lambda row: (
            f"{float(reference['tokens_per_s']) / float(row['tokens_per_s']):.1f}"
        ),
        "parameters": lambda row: f"{int(row['parameters']) / 1e6:.2f}M",
    }
    return table(columns, [reference, *sorted(rest, key=lambda row: -float(row["tokens_per_s"]))])


def fp8() -> Table:
    head = ["recipe", "GPU", "steps", "tokens/s, bf16", "tokens/s, FP8", "peak memory, bf16 and FP8"]
    cells = [[*head, "loss at the end, bf16", "FP8 above bf16"]]
    for (card, recipe), last in FP8_AT_END.items():
        rows = [row for row in read("float8", card) if row["recipe"] == recipe]
        both = [[row for row in rows if row["products"] == products] for products in ("bf16", "tensorwise")]
        a, b = (
            statistics.median(float(row["tokens_per_second"]) for row in run if int(row["step"]) > 10) for run in both
        )
        peaks = " and ".join(f"{max(float(row['peak_gib']) for row in run):.1f}" for run in both)
        above = [float(y["loss"]) - float(x["loss"]) for x, y in zip(*both, strict=True)][-last:]
        end = both[0][-1]
        speed = [hundreds(a), f"{hundreds(b)} ({b / a:.2f} x)", f"{peaks} GiB"]
        apart = f"{min(above):+.3f} to {max(above):+.3f}"
        cells.append([f"`{recipe}`", card.upper(), end["step"], *speed, f"{float(end['loss']):.3f}", apart])
    return cells


def ms(row: Row) -> str:
    return f"{digits(float(row['step_ms']))} ms"


def against_aim(row: Row, aim: float) -> str:
    over = float(row["step_ms"]) / aim - 1
    return f"{aim:g} ms: " + (f"missed by {percent(over)}" if over > 0 else "met")


def one_step() -> Table:
    rows = [row for row in read("generation") if row["of"] == "seqarch" and row["prompt"] == "51200"]
    alone = {row["name"]: row for row in rows if row["batch_size"] == "1"}
    rows = [row for row in rows if row["batch_size"] == "16" and row["commit"] == rows[0]["commit"]]
    slowest = max(float(row["step_ms"]) for row in rows)

    def at_one(row: Row, cell: Callable[[Row], str], otherwise: str = "") -> str:
        return cell(alone[row["name"]]) if row["name"] in alone else otherwise

    columns: dict[str, Callable[[Row], str]] = {
        "recipe": name,
        "batch 16": ms,
        "aim": lambda row: against_aim(row, AIMS.get(row["name"], 1.2)),
        "against Transformer++": lambda row: times(slowest / float(row["step_ms"])),
        "state": lambda row: f"{digits(float(row['state_gib']))} GiB",
        "batch 1": lambda row: at_one(row, ms, "not measured"),
        "aim at batch 1": lambda row: at_one(row, lambda one: against_aim(one, 0.5)),
    }
    return table(columns, sorted(rows, key=lambda row: -float(row["step_ms"])))


def decoding_next_to_fla() -> Table:
    rows = read("generation")
    (fla,) = (row for row in rows if row["of"] == "fla")
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: f"{name(row)}, {row['of'].replace('seqarch', 'ours')}",
        "prompts, tokens/s": lambda row: rounded(row["prefill_tokens_per_s"]),
        "step": ms,
        "new tokens/s": lambda row: rounded(row["decode_tokens_per_s"]),
        "total for 1,024 new tokens": lambda row: f"{float(row['total_s']):.1f} s",
    }
    return table(columns, [row for row in rows if row["commit"] == fla["commit"] and row["batch_size"] == "16"])


def table_3() -> Table:
    rows = [row for row in read("generation") if row["batch_size"] == "64"]
    total = {(row["of"], row["mode"]): float(row["total_s"]) for row in rows if row["name"][:5] in ("llama", "trans")}

    def over(reference: tuple[str, str]) -> Callable[[Row], str]:
        return lambda row: f"{total[reference] / float(row['total_s']):#.3g} x"

    def label(row: Row) -> str:
        how = {"python": "from Python"}.get(row["mode"], row["mode"])
        return name(row) if row["of"] == "seqarch" else f"transformers' Llama, {how}"

    columns: dict[str, Callable[[Row], str]] = {
        "model": label,
        "prompts, tokens/s": lambda row: rounded(row["prefill_tokens_per_s"]),
        "step": ms,
        "new tokens/s": lambda row: rounded(row["decode_tokens_per_s"]),
        "total": lambda row: f"{float(row['total_s']):.1f} s",
        "state": lambda row: f"{digits(float(row['state_gib']))} GiB",
        "against Transformer++": over(("seqarch", "compiled")),
        "against Llama, compiled": over(("transformers", "compiled")),
    }
    return table(columns, sorted(rows, key=lambda row: float(row["total_s"])))


def decoding_profile() -> Table:
    steps: dict[tuple[int, str], defaultdict[str, float]] = {}
    for row in read("decode_profile"):
        step = steps.setdefault((int(row["batch"]), row["recipe"]), defaultdict(float))
        step[row["kind"]] += float(row["us"])
        step["calls"] += float(row["calls"]) * (row["kind"] != "(step)")
    cells = [["recipe", "batch", "step", "matrix products", "decoding kernels", "other kernels", "gaps", "kernels"]]
    for (batch, recipe), step in sorted(steps.items(), key=lambda each: (each[0][0], each[1]["(step)"])):
        parts = [f"{step[kind]:.0f} µs" for kind in ("(step)", "product", "decoding", "other", "(gaps)")]
        cells.append([f"`{recipe}`", str(batch), *parts, f"{step['calls']:.0f}"])
    return cells


def ragged(width: str) -> Table:
    rows = [row for row in read("flex_decoding") if row["D"] == width]
    names = list(dict.fromkeys(row["name"] for row in rows))
    cells = [[f"batch, D = {width}", "capacity", *names, "to build the block mask"]]
    for (batch, capacity), group in itertools.groupby(rows, key=lambda row: (row["B"], row["capacity"])):
        found = {row["name"]: row for row in group}
        mask = float(found["FlexAttention, block mask"]["mask_ms"])
        shown = [f"{float(found[each]['ms']):.2f}" for each in names]
        cells.append([batch, f"{int(capacity):,}", *shown, f"{mask:.2f}"])
    return cells


def dynamic_shapes() -> Table:
    columns: dict[str, Callable[[Row], str]] = {
        "mixer": lambda row: f"`{row['mixer']}`",
        "error": lambda row: percent(row["error"], 2),
        "noise": lambda row: percent(row["noise"], 2) if row["noise"] else "",
        "graphs": lambda row: row["graphs"],
        "more at other lengths": lambda row: row["recompiled"],
        "first call, s": lambda row: f"{float(row['first_s']):.0f}",
        "longest call at another length, s": lambda row: f"{float(row['new_s']):.0f}",
    }
    return table(columns, sorted(read("dynamic_shapes"), key=lambda row: float(row["error"])))


def tables() -> Iterator[Table]:
    """All tables, in the order of the page."""
    yield published()
    yield profile()
    yield limits()
    yield gpus()
    yield long_sequences()
    yield kept_activations()
    yield long_profile()
    yield recipes("_110m")
    yield recipes("_1b")
    yield next_to_fla()
    yield at_the_exams_size()
    yield on_a_cpu()
    yield fp8()
    yield one_step()
    yield decoding_next_to_fla()
    yield table_3()
    yield decoding_profile()
    yield ragged("64")
    yield ragged("128")
    yield dynamic_shapes()


if __name__ == "__main__":
    print("\n\n".join(map(markdown, tables())))
