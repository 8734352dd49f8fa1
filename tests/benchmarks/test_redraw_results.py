"""The figures of the results are drawn from the CSV files next to them."""

from __future__ import annotations

import csv
import re
import runpy
import shutil
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
SCRIPT = runpy.run_path(str(ROOT / "benchmarks/redraw_results.py"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["relation", "figure_1a"])
def test_findings_are_those_of_the_tables(name: str):
    found = SCRIPT["findings"](RESULTS / name)
    gaps = {(row["run"], row["domain"]): row for row in rows(RESULTS / name / "gap.csv")}
    assert len(gaps) == sum(len(one.gaps) for one in found.comparisons.values()) > 0
    for model, one in found.comparisons.items():
        for gap in one.gaps:
            row = gaps[model, gap.domain]
            assert (gap.value, gap.low, gap.high) == tuple(float(row[key]) for key in ("gap", "low", "high"))
    points = rows(RESULTS / name / "scatter.csv")
    for group in found.groups:
        for run in group.runs:
            own = [row for row in points if (row["run"], row["seed"]) == (run.name, str(run.seed))]
            assert run.evaluations.with_mean().keys() == {row["domain"] for row in own}
            for domain, losses in run.evaluations.with_mean().items():
                table = [row for row in own if row["domain"] == domain]
                assert [float(row["in_domain_loss"]) for row in table] == run.evaluations.in_domain.tolist()
                loss = "ood_loss" if "ood_loss" in table[0] else "holdout_loss"
                assert [float(row[loss]) for row in table] == pytest.approx(losses.tolist(), abs=1e-9)


@pytest.mark.parametrize("folder", ["budgets", "budgets_two_domains"])
def test_finished_models_are_those_of_the_table(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(RESULTS / folder, tmp_path / "budgets")
    (tmp_path / "budgets/budgets.png").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["redraw_results.py", str(tmp_path)])
    SCRIPT["main"]()
    assert (tmp_path / "budgets/budgets.png").read_bytes().startswith(b"\x89PNG")
    found = SCRIPT["finished"](tmp_path / "budgets")
    table = [row for row in rows(RESULTS / folder / "gaps.csv") if row["domain"] == "mean"]
    drawn = [(name, at.tokens, at.mean, at.half_width) for name, one in found.finished.items() for at in one.budgets]
    assert len(drawn) == len(table)
    for (name, tokens, mean, half), row in zip(drawn, table, strict=True):
        assert (name, tokens, mean) == (row["run"], int(row["tokens"]), float(row["gap"]))
        assert half == pytest.approx((float(row["high"]) - float(row["low"])) / 2)
        assert found.finished[name].settled == (row["settled"] == "True")


def test_recall_is_that_of_the_points_and_the_page_has_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    shutil.copytree(RESULTS / "recall", tmp_path / "recall")
    (tmp_path / "recall/mqar.png").write_bytes(b"")
    monkeypatch.setattr(sys, "argv", ["redraw_results.py", str(tmp_path)])
    SCRIPT["main"]()
    assert (tmp_path / "recall/mqar.png").read_bytes().startswith(b"\x89PNG")
    *table, _ = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 13
    assert "\n".join(table) in (RESULTS / "README.md").read_text(encoding="utf-8")


def cells(page: str) -> dict[str, list[str]]:
    """The rows of a page's tables whose first cell is a metric, by metric."""
    lines = [line.strip("| ").split(" | ") for line in (ROOT / page).read_text(encoding="utf-8").splitlines()]
    return {first.strip("`"): rest for first, *rest in lines if first.startswith("`") and "/" in first and rest}


def test_the_pages_have_the_results_of_the_evaluated_models():
    values: dict[str, dict[str, str]] = {}
    for row in rows(RESULTS / "capabilities.csv"):
        digits = 1 if row["metric"].endswith("/log_likelihood") else 3
        value, low, high = (f"{float(row[key]):.{digits}f}" for key in ("value", "low", "high"))
        values.setdefault(row["metric"], {})[row["run"]] = f"{value} [{low}, {high}]"
    page = cells("docs/evaluation.md")
    shown = {metric: each for metric, each in values.items() if not metric.endswith("/contains")}
    for metric, each in shown.items():
        assert page[metric][-2:] == [each["transformer_pp_2k"], each.get("shell_100k", "-")]
    assert len(shown) == 22
    short = {metric: rest[0] for metric, rest in cells("README.md").items() if metric in values}
    assert len(short) == 3
    assert short == {metric: values[metric]["transformer_pp_2k"] for metric in short}


def test_the_page_has_the_results_of_retrieval():
    page = cells("docs/evaluation.md")
    table = [row for row in rows(RESULTS / "retrieval.csv") if "_v0" not in row["metric"]]
    for row in table:
        digits = 1 if row["metric"].endswith("/log_likelihood") else 3
        value, low, high = (f"{float(row[key]):.{digits}f}" for key in ("value", "low", "high"))
        column = ["transformer_pp_2k_short", "shell_100k_short"].index(row["run"])
        assert page[row["metric"]][1:][column] == f"{value} [{low}, {high}]"
    assert len(table) == 12
    twins = {(row["metric"].replace("_v0", ""), row["run"], row["value"]) for row in rows(RESULTS / "retrieval.csv")}
    assert len(twins) == 12


def test_the_page_has_the_tasks_that_only_the_third_model_took():
    page = cells("docs/evaluation.md")
    table = {row["metric"]: row for row in rows(RESULTS / "all_tasks.csv")}
    shown = [metric for metric in table if metric.startswith(("mmlu", "repeat_gain", "loss_by_position"))]
    for metric in shown:
        digits = {"mmlu": 3, "repeat_gain": 4, "loss_by_position": 2}[metric.split("/")[0]]
        value, low, high = (f"{float(table[metric][key]):.{digits}f}" for key in ("value", "low", "high"))
        assert page[metric][::2] == [table[metric]["samples"], f"{value} [{low}, {high}]"]
    assert len(shown) == 10
    few_shot = [row for metric, row in table.items() if metric.endswith(("/acc", "/acc_norm")) and metric != "mmlu/acc"]
    assert (len(few_shot), sum(row["at_chance"] == "True" for row in few_shot)) == (17, 10)


def test_the_page_has_the_parts_of_profiled_steps():
    parts: dict[tuple[str, str], defaultdict[str, float]] = {}
    for row in rows(ROOT / "benchmarks/decode_profile_h200.csv"):
        part = parts.setdefault((row["recipe"], row["batch"]), defaultdict(float))
        part[row["kind"]] += float(row["us"])
        part["calls"] += float(row["calls"]) * (row["kind"] != "(step)")
    lines = (ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()
    for (recipe, batch), part in parts.items():
        times = [f"{part[key]:.0f} µs" for key in ("(step)", "product", "decoding", "other", "(gaps)")]
        assert "| " + " | ".join([f"`{recipe}`", batch, *times, f"{part['calls']:.0f}"]) + " |" in lines
    assert len(parts) == 9


def test_the_page_has_the_speed_and_loss_of_fp8():
    runs: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows(ROOT / "benchmarks/float8_h200.csv"):
        runs.setdefault((row["recipe"], row["products"]), []).append(row)
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for recipe, last in (("transformer_pp_1b", 5), ("transformer_pp_110m", 10)):
        bf16, fp8 = runs[recipe, "bf16"], runs[recipe, "tensorwise"]
        late = [[float(row["tokens_per_second"]) for row in run if int(row["step"]) > 10] for run in (bf16, fp8)]
        a, b = (round(statistics.median(speeds), -2) for speeds in late)
        memory = [max(float(row["peak_gib"]) for row in run) for run in (bf16, fp8)]
        above = [float(y["loss"]) - float(x["loss"]) for x, y in zip(bf16, fp8, strict=True)]
        cells = (
            f"`{recipe}`",
            bf16[-1]["step"],
            f"{a:,.0f}",
            f"{b:,.0f} ({b / a:.2f} x)",
            f"{memory[0]:.1f} and {memory[1]:.1f} GiB",
            f"{float(bf16[-1]['loss']):.3f}",
            f"{min(above[-last:]):+.3f} to {max(above[-last:]):+.3f}",
        )
        assert "| " + " | ".join(cells) + " |" in page
    assert f"at most {max(map(abs, above)):.3f} nats apart" in page


def test_the_page_has_the_speed_of_published_models():
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    table = rows(ROOT / "benchmarks/published_h200.csv")
    speeds: defaultdict[str, list[float]] = defaultdict(list)
    for row in table:
        rate, low, high = (round(float(row[key]), -2) for key in ("tokens_per_s", "p20", "p80"))
        speeds[row["name"]].append(rate)
        cells = (
            f"`{row['name']}`",
            row["of"],
            f"{int(row['parameters']) / 1e6:,.1f}M",
            f"{rate:,.0f}",
            f"{low:,.0f} to {high:,.0f}",
            f"{float(row['peak_gib']):.1f} GiB",
        )
        assert "| " + " | ".join(cells) + " |" in page
    assert len(table) == 6
    small, large = (ours / max(others) for ours, *others in speeds.values())
    assert f"Ours takes {small:.2f} times as many" in page
    assert f"{large:.2f} times as many at 1.3B" in page
    ours = speeds["transformer_pp_110m"][0]
    assert f"[{ours:,.0f}](#compared-with-published-models), {1 - ours / 580_000:.1%}".replace("%", " % less") in page


def test_the_page_has_the_speed_and_the_profile_at_100k_tokens_without_recomputation():
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    steps: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows(ROOT / "benchmarks/shell_h200.csv"):
        steps.setdefault((row["recipe"], row["activation_checkpointing"]), {})[row["kind"]] = row
    columns = list(steps.values())
    kept = {recipe: step for (recipe, recomputes), step in steps.items() if recomputes == "false"}
    softmax = float(kept["rwkv7_shell_softmax_100k"]["(step)"]["tokens_per_s"])
    gains = []
    for recipe, step in kept.items():
        whole = step["(step)"]
        rate = float(whole["tokens_per_s"])
        before = re.search(rf"^\| `{recipe}`(?: \(cuDNN\))? \| ([\d,]+) \|", page, flags=re.MULTILINE)
        assert before
        gains.append(rate / int(before[1].replace(",", "")) - 1)
        ratio = "1" if rate == softmax else f"{rate / softmax:.1f}x"
        cells = (f"`{recipe}`", f"{round(rate, -2):,.0f}", f"{gains[-1]:.0%}".replace("%", " %"), ratio)
        more = (f"{float(whole['mfu']):.0%}".replace("%", " %"), f"{whole['peak_gib']} GiB")
        assert "| " + " | ".join((*cells, *more)) + " | " in page
    assert len(gains) == 4
    assert f"by {100 * min(gains):.0f} to {100 * max(gains):.0f} %" in page
    for kind in columns[0]:
        cells = [f"{float(step[kind]['step_ms']) if kind in step else 0:.1f}" for step in columns]
        assert f"| {kind} | {' | '.join(cells)} |" in page
    exact, approx = (kept[f"rwkv7_shell_top1_chunk{each}_100k"] for each in ("", "_approx"))

    def ms(step: dict[str, dict[str, str]], *kinds: str) -> float:
        return sum(float(step[kind]["step_ms"]) for kind in kinds)

    mixing = "attention", "selection"
    allowed = 102_400_000 / softmax
    rest = ms(exact, "(step)") - ms(exact, *mixing)
    per_layer = (allowed / 5.5 - rest - ms(exact, "attention")) / 12
    assert f"selection may take {per_layer:.1f} ms per layer, and it takes {ms(exact, 'selection') / 12:.1f}." in page
    attention = ms(kept["rwkv7_shell_softmax_100k"], "attention")
    assert f"differ only by {attention / ms(exact, *mixing):.1f}x" in page
    rest = ms(approx, "(step)") - ms(approx, *mixing)
    said = f"selection may take {allowed / 10 - ms(approx, *mixing):.0f} ms, and it takes {rest:.0f}."
    assert said in page
