"""What the pages say about speed in words follows from the tables and their rows."""

import re
from pathlib import Path

import pytest

from benchmarks import performance_tables
from benchmarks.page_tables import Row, Table
from seqarch.exam.models import find_model, load_size
from seqarch.experiment.experiment import Experiment

ROOT = Path(__file__).parents[2]
EXACT_AND_APPROX = "top1_chunk", "top1_chunk_approx"


def said(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


PAGE = said("docs/performance.md")


def limit(commit: str) -> float:
    """The rate of an 8192^3 product, the higher one of several calls."""
    rows = performance_tables.read("kernels")
    return max(float(row["p50"]) for row in rows if row["unit"] == "TFLOP/s" and row["commit"].startswith(commit))


def number(cell: str) -> float:
    """The first number of a cell."""
    found = re.match(r"[-+\d.,]+", cell)
    assert found, cell
    return float(found[0].replace(",", ""))


def column(table: Table, head: str, key: int = 0) -> dict[str, float]:
    """The numbers of a column by the cells of another one; of several rows with one key the first counts."""
    place = table[0].index(head)
    return {row[key].strip("`"): number(row[place]) for row in reversed(table[1:]) if row[place]}


def test_the_readme_has_the_speeds_of_the_tables():
    readme = said("README.md")
    long = column(performance_tables.long_sequences(), "against full softmax")
    kept = column(performance_tables.kept_activations(), "against full softmax")
    exact, approx = ([each[f"rwkv7_shell_{name}_100k"] for each in (long, kept)] for name in EXACT_AND_APPROX)
    assert f"train {exact[0]} times as fast as full attention at 102,400 tokens" in readme
    assert f"approximate ones {approx[0]} times ({exact[1]} and {approx[1]} times without" in readme
    ours = column(performance_tables.published(), "tokens/s")["transformer_pp_1b"]
    assert f"trains at {ours:,.0f} tokens per second" in readme


def test_published_models():
    table = performance_tables.published()
    small, large = ([number(row[3]) for row in table[1:] if row[0].endswith(end)] for end in ("_110m`", "_1b`"))
    assert f"Ours takes {small[0] / max(small[1:]):.2f} times as many" in PAGE
    assert f"{large[0] / max(large[1:]):.2f} times as many at 1.3B" in PAGE
    assert f"[{small[0]:,.0f}](#compared-with-published-models), {100 - small[0] / 5800:.1f} % less" in PAGE
    assert f"bf16 misses its aim by {100 - large[0] / 700:.0f} %" in PAGE
    hours, days = (1e11 / rate for rate in (3600 * small[0], 86400 * large[0]))
    assert f"about {hours:.0f} hours at 110M parameters and {days:.0f} days at 1.3B" in said("docs/recipes.md")


def test_what_70000_tokens_per_second_need():
    profile, limits = performance_tables.profile(), performance_tables.limits()
    now, best = (column(limits, head) for head in ("ms", "at its limit"))
    assert sum(now.values()) - now["step"] - now["tokens/s"] == pytest.approx(now["step"], abs=0.2)
    leave = 32768 / 70
    assert f"70,000 tokens/s leave {leave:.1f} ms for a step. This one takes {now['step']} ms" in PAGE
    assert f"so {now['step'] - leave:.1f} ms are missing" in PAGE
    assert f"together give {round(best['tokens/s'], -2):,.0f} tokens/s" in PAGE
    without = 32768e3 / (best["step"] + now["products"] - best["products"])
    assert f"keep their present rate, the other limits give {round(without, -2):,.0f}." in PAGE
    missing = best["step"] - leave
    assert f"and {missing:.1f} ms are still missing" in PAGE
    missing += now["products"] - best["products"]
    assert f"Then {missing:.1f} of the {now['other']} ms of other kernels would have to go" in PAGE
    (model,) = (row for row in performance_tables.read("published") if row["flops_counted"] and "_1b" in row["name"])
    head = 32000 * 2048
    blocks = int(model["parameters"]) - head
    product = dict(zip(profile[0][1:], map(float, profile[1][1:5]), strict=False))
    rates = [
        65.536e-6 * weights / product[part]
        for part, weights in (("forward", blocks), ("loss", 3 * head), ("backward", 2 * blocks))
    ]
    assert {round(each) for each in rates} == {677}
    assert "They run at 677 TFLOP/s, 95 % of the limit. Forward pass, backward pass and loss each have" in PAGE
    assert round(best["products"] / now["products"], 2) == 0.95
    slower = float(model["tokens_per_s"]) / now["tokens/s"] - 1
    assert f"This step is {slower:.1%} slower".replace("%", " %") in PAGE
    lower, higher = limit("71f7a17"), limit("9e8b08b")
    assert lower < higher
    assert f"the same product reached {lower:.0f} and {higher:.0f} TFLOP/s (commits 71f7a17 and 9e8b08b)" in PAGE
    saved = now["products"] - 6e-9 * int(model["parameters"]) * 32768 / lower
    assert f"At the lower of these rates products would save {saved:.1f} ms, which is enough" in PAGE
    assert saved > now["step"] - leave


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"part": "loss", "kind": "product", "kernel": "nvjet"}, "products"),
        ({"part": "backward", "kind": "other", "kernel": "void cudnn::fusion::dot"}, "attention"),
        ({"part": "optimizer", "kind": "other", "kernel": "adam"}, "optimizer"),
        ({"part": "forward", "kind": "compiled elementwise", "kernel": "triton_gelu_mul"}, "GeGLU"),
        ({"part": "forward", "kind": "compiled elementwise", "kernel": "triton_rsqrt"}, "other"),
        ({"part": "(step)", "kind": "(gaps)", "kernel": "(gaps)"}, "gaps"),
    ],
)
def test_the_part_of_a_kernel(row: Row, part: str):
    assert performance_tables.part(row) == part


def test_the_shells_with_recomputation_are_the_latest_next_to_softmax_of_their_call():
    table = performance_tables.long_sequences()
    rows = {(row["name"], row["commit"][:7]): float(row["tokens_per_s"]) for row in performance_tables.read("mixers")}
    calls = {commit for name, commit in rows if "softmax" in name}
    last = {name: commit for name, commit in rows if name.endswith("_100k") and commit in calls}
    shown = [(row[0].strip("`"), row[1]) for row in table[1:]]
    assert {each for each in shown if "softmax" not in each[0]} == {
        each for each in last.items() if "softmax" not in each[0]
    }
    assert {commit for name, commit in shown if "softmax" in name} == {commit for _, commit in shown}
    for (name, commit), row in zip(shown, table[1:], strict=True):
        assert row[3] == f"{rows[name, commit] / rows['rwkv7_shell_softmax_100k', commit]:.1f} x"
    found = column(table, "against full softmax")
    exact, approx = (found[f"rwkv7_shell_{name}_100k"] for name in EXACT_AND_APPROX)
    assert exact < 5.5
    assert approx < 10
    assert f"Both are missed, with {exact} and {approx} times" in PAGE
    log = said("docs/kernels_log.md")
    assert (
        f"exact selection is {exact} times as fast as softmax, not 5.5. Approximate selection is {approx} times" in log
    )


def test_shells_without_recomputation():
    steps: dict[tuple[str, str], dict[str, float]] = {}
    rates: dict[tuple[str, str], float] = {}
    for row in performance_tables.read("shell"):
        key = row["recipe"].removeprefix("rwkv7_shell_").removesuffix("_100k"), row["activation_checkpointing"]
        steps.setdefault(key, {})[row["kind"]] = float(row["step_ms"])
        if row["kind"] == "(step)":
            rates[key] = float(row["tokens_per_s"])
    gain = rates["top1_chunk_approx", "false"] / rates.pop(("top1_chunk_approx", "true"))
    assert f"Approximate selection is {gain:.2f} times as fast without recomputation" in PAGE
    assert f"[{gain:.2f} times as fast](performance.md#without-recomputation)" in said("docs/recipes.md")
    found = re.search(r"predictions were ([\d,]+), ([\d,]+), ([\d,]+) and ([\d,]+) tokens/s", PAGE)
    assert found
    off = [abs(number(each) / rate - 1) for each, rate in zip(found.groups(), rates.values(), strict=True)]
    assert f"They are at most {100 * max(off):.1f} % off" in PAGE
    exact, approx, softmax = (steps[name, "false"] for name in (*EXACT_AND_APPROX, "softmax"))

    def mixing(step: dict[str, float]) -> float:
        return step["attention"] + step["selection"]

    allowed = 102_400_000 / rates["softmax", "false"]
    per_layer = (allowed / 5.5 - exact["(step)"] + exact["selection"]) / 12
    assert f"selection may take {per_layer:.1f} ms per layer, and it takes {exact['selection'] / 12:.1f}." in PAGE
    assert f"differ only by {softmax['attention'] / mixing(exact):.1f} x" in PAGE
    rest = approx["(step)"] - mixing(approx)
    assert f"selection may take {allowed / 10 - mixing(approx):.0f} ms, and it takes {rest:.0f}." in PAGE


def test_later_rates_of_rwkv7():
    rows = {(row["name"], row["commit"][:7]): row for row in performance_tables.read("mixers")}
    calls = (("rwkv7_110m", "364b2de"), ("rwkv7_100k", "364b2de"), ("rwkv7_100k", performance_tables.ALL_RECIPES))
    small, large, before = (rows[call] for call in calls)
    rates = [performance_tables.rate(row) for row in (small, large, before)]
    assert f"gave {rates[0]} tokens/s and {performance_tables.memory(small)} for `rwkv7_110m`" in PAGE
    assert f"{rates[1]} tokens/s for `rwkv7_100k` ({rates[2]} at commit {performance_tables.ALL_RECIPES})" in PAGE


def test_exact_selection_next_to_full_attention():
    small, large = (column(performance_tables.recipes(size), "tokens/s") for size in ("_110m", "_1b"))
    ratios = (
        each[f"top1_chunk_{size}"] / each[f"transformer_pp_{size}"] for each, size in ((small, "110m"), (large, "1b"))
    )
    assert "trains {:.2f} times as fast as full attention at 110M, and {:.2f} times".format(*ratios) in PAGE


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"part": "loss", "kind": "product", "kernel": "nvjet"}, "products"),
        ({"part": "backward", "kind": "other", "kernel": "void cudnn::fusion::dot"}, "attention"),
        ({"part": "forward", "kind": "other", "kernel": "chunk_dplr_fwd_kernel_h"}, "the mixer's own kernels"),
        ({"part": "backward", "kind": "other", "kernel": "void at::native::reduce_kernel<128>"}, "other"),
        ({"part": "optimizer", "kind": "other", "kernel": "adamw_kernel"}, "other"),
        ({"part": "forward", "kind": "compiled elementwise", "kernel": "triton_gelu"}, "compiled elementwise"),
        ({"part": "backward", "kind": "copy, cast", "kernel": "triton_poi_fused__to_copy_2"}, "other"),
        ({"part": "(step)", "kind": "(gaps)", "kernel": "(gaps)"}, "gaps"),
    ],
)
def test_the_part_of_a_kernel_at_the_exams_size(row: Row, part: str):
    assert performance_tables.exam_part(row) == part


def kernels(recipe: str, *names: str, part: str = "") -> float:
    """Milliseconds of the kernels with these names, by default of the mixer's own."""
    return sum(
        float(row["us"]) / 1000
        for row in performance_tables.profiled(f"small/{recipe}")
        if (row["kernel"] in names if names else performance_tables.exam_part(row) == "the mixer's own kernels")
        and part in row["part"]
    )


def test_at_the_exams_size():
    head, *cells = performance_tables.at_the_exams_size()
    table = {row[0].strip("`").removeprefix("small/"): dict(zip(head, row, strict=True)) for row in cells}
    assert list(table) == ["rwkv7", "mamba2", "delta_net", "transformer_pp"]
    parts = head[head.index("products") : head.index("profiled step")]
    for row in table.values():
        assert sum(float(row[each]) for each in parts) == pytest.approx(float(row["profiled step"]), abs=0.3)
    assert [name for name, row in table.items() if row["aim"].endswith("missed")] == [
        "rwkv7",
        "mamba2",
        "transformer_pp",
    ]
    assert "RWKV-7 and Mamba-2 miss the aim of 25 %, and Transformer++ misses 45 %. DeltaNet meets its aim" in PAGE
    millions = sorted(float(row["millions"]) for row in performance_tables.read("profiled_rates"))
    assert f"have {millions[0]:.0f}M to {millions[-1]:.0f}M parameters and 64 x 1,024 tokens per step" in PAGE
    products = [float(row["products"]) for row in table.values()]
    assert f"Products take {min(products)} to {max(products)} ms in all four" in PAGE
    step = {name: float(row["profiled step"]) for name, row in table.items()}
    own = kernels("rwkv7")
    longest = "chunk_dplr_bwd_kernel_intra_tensorcore"
    assert f"{own:.1f} ms, {own / step['rwkv7']:.0%} of the profiled step, in fla's".replace("%", " %") in PAGE
    assert f"The longest is `{longest}` with {kernels('rwkv7', longest):.1f} ms" in PAGE
    gradients = "input_gradient_kernel", "projection_gradient_kernel", "state_kernel"
    ssd = kernels("mamba2", *gradients, "output_kernel")
    assert f"{ssd:.1f} ms, {ssd / step['mamba2']:.0%} of the profiled step, in the".replace("%", " %") in PAGE
    assert f"three backward kernels take {kernels('mamba2', *gradients, part='backward'):.1f} ms" in PAGE
    attention = table["transformer_pp"]
    assert round(float(attention["products"]) / step["transformer_pp"], 2) == 0.5
    rows = performance_tables.profiled("small/transformer_pp")
    rate = 6e-6 * 42_082_816 * 65_536 / sum(float(row["us"]) for row in rows if row["kind"] == "product")
    most = limit("9e8b08b")
    assert f"at {rate:.0f} TFLOP/s, {rate / most:.0%} of the {most:.0f} TFLOP/s".replace("%", " %") in PAGE
    assert f"Compiled elementwise kernels take {attention['compiled elementwise']} ms" in PAGE
    delta = table["delta_net"]
    busy = step["delta_net"] - float(delta["gaps"])
    assert f"kernels for {busy:.1f} ms, and its median step takes {delta['median step, ms']} ms" in PAGE
    assert f"most of the gaps of {delta['gaps']} ms" in PAGE


@pytest.mark.parametrize("row", performance_tables.read("profiled_rates"), ids=lambda row: row["recipe"])
def test_rates_at_the_exams_size_are_of_its_models(row: Row):
    """Parameters and MFU follow from the exam's recipe; so does the step that the aim would need."""
    size, model = row["recipe"].split("/")
    experiment = Experiment.from_recipe(find_model(load_size(size, {}), model, {})[1])
    tokens = experiment.data.batch_size(world_size=1) * experiment.data.sequence_length
    lm = experiment.build_on_meta()
    assert f"{lm.n_parameters() / 1e6:.1f}" == row["millions"]
    assert tokens == int(row["micro_batch_size"]) * int(row["sequence_length"])
    rate = float(row["tokens_per_s"])
    mfu = rate * lm.flops_per_token(experiment.data.sequence_length, training=True) / 989e12
    assert f"{mfu:.2f}" == row["mfu"]
    aim = performance_tables.MFU_AIMS.get(row["recipe"], 0.25)
    step = 1000 * tokens / rate
    needed = (
        f"With {100 * aim:.0f} % a step would take {step * mfu / aim:.1f} ms, {step * (1 - mfu / aim):.1f} ms less."
    )
    assert (needed in PAGE) == (mfu < aim)


def test_fp8_has_the_losses_of_bf16():
    def apart(card: str, recipe: str, start: int = 0) -> float:
        losses: dict[str, dict[int, float]] = {"bf16": {}, "tensorwise": {}}
        for row in performance_tables.read("float8", card):
            if row["recipe"] == recipe and int(row["step"]) >= start:
                losses[row["products"]][int(row["step"])] = float(row["loss"])
        return max(abs(losses["tensorwise"][step] - loss) for step, loss in losses["bf16"].items())

    assert f"at most {apart('h200', 'transformer_pp_110m'):.3f} nats apart" in PAGE
    whole, later = apart("h100", "transformer_pp_1b"), apart("h100", "transformer_pp_1b", 200)
    assert f"at most {whole:.3f} nats from bf16's. From step 200 on it is at most {later:.3f} nats from it." in PAGE


def test_mixers_at_other_lengths():
    rows = performance_tables.read("dynamic_shapes")
    works = [float(row["error"]) for row in rows if row["result"] == "works"]
    assert f"{len(works)} of {len(rows)} mixers train at" in PAGE
    assert f"within {max(works):.1%} of those without".replace("%", " %") in PAGE
    noisy = {row["mixer"]: float(row["error"]) / float(row["noise"]) for row in rows if row["noise"]}
    assert "Errors of the four RWKVs are below their noise" in PAGE
    assert sorted(noisy) == ["RWKV5", "RWKV6", "RWKV7", "RWKV7Shell"]
    assert max(noisy.values()) < 1


def test_training_with_two_remote_chunks():
    rows = [row for row in performance_tables.read("mixers") if row["name"].startswith("top1_chunk_2_remote")]
    one, two = (float(row["tokens_per_s"]) for row in rows)
    page = said("docs/kernels.md")
    assert f"trains at {round(two, -2):,.0f} tokens/s with two remote chunks" in page
    assert f"With one it trains at {round(one, -2):,.0f}, {one / two - 1:.0%} faster".replace("%", " %") in page
