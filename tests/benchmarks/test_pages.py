"""The numbers on pages are those of CSV files and records, and what the pages claim about them holds."""

import itertools
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks import pages
from benchmarks.tables import left, options, predictions, recall, results, sizes, speed
from seqarch.tables import read_csv

ROOT = Path(__file__).parents[2]
POOLED = {"low", "high", "settled", "word", "verdict"}
"""Columns of gaps that depend on the seeds of all models."""
FAR = ("rwkv6", "rwkv5", "based", "mamba1", "window_64", "window_128")


@pytest.mark.commands
def test_no_page_is_stale() -> None:
    assert not [page.name for page in pages.stale()], "run `python -m benchmarks.pages`"


def test_what_stands_between_markers_is_made_anew() -> None:
    value = "<!-- value: gap mamba2 340M -->{}<!-- end -->"
    assert pages.updated(f"a {value.format('0')} b") == f"a {value.format(results.gap('mamba2'))} b"
    table = "<!-- table: gpus -->\n\n{}\n\n<!-- end -->\n"
    assert pages.updated(table.format("old")) == table.format(pages.markdown(speed.gpus()))
    with pytest.raises(ValueError, match="0 functions in benchmarks/tables are called 'nosuch'"):
        pages.updated(value.replace("gap", "nosuch").join("ab"))
    with pytest.raises(ValueError, match="put a word in front of the value on this line"):
        pages.updated(f"* a\n  {value} b")


def raw(model: str, domain: str = "mean, raw", tokens: int = results.SMALL) -> float:
    return results.raw(model, domain, tokens)


def test_the_table_has_every_architecture_of_the_paper() -> None:
    assert set(results.PAPER) - set(results.models()) <= {"window_128"}


def test_models_that_are_called_far_behind_are_so_on_every_domain() -> None:
    assert all(raw(model, domain) > 0 for model in FAR for domain in results.DOMAINS)
    others = set(results.models()) - set(FAR)
    assert min(raw(model) for model in FAR) > max(raw(model) for model in others)


def test_models_that_are_called_close_are_so() -> None:
    assert max(abs(raw(model)) for model in ("transformer", "rwkv7", "top1_chunk")) < 0.1
    assert max(abs(raw(model, "mean, other tokens")) for model in results.models()) < 0.1


def test_the_gap_is_one_in_recall() -> None:
    behind = [model for model in results.models() if raw(model) > 0]
    assert all(raw(model, "mean, recallable tokens") > raw(model, "mean, other tokens") for model in behind)
    assert float(results.order_by_copying()) < -0.8
    assert float(results.order_by_domain().split()[0]) > 0.9


def test_approximate_and_element_selection_are_behind_exact() -> None:
    assert all(raw(model) > raw("top1_chunk") for model in ("top1_chunk_approx", "top1_element"))


def test_intervals_of_models_that_are_called_behind_do_not_hold_zero_and_the_others_do() -> None:
    for behind, models in (
        (True, ("delta_net", "gated_delta_net", "mamba2", "top1_element")),
        (False, ("transformer", "top1_chunk", "rwkv7")),
    ):
        for model in models:
            gap, half = (float(part) for part in results.gap(model).split(" ± "))
            assert (gap > half) == behind
    settled = {model: word for model, word in results.verdicts().items() if word != "not settled"}
    worse = dict.fromkeys(("delta_net", "gated_delta_net", "top1_element"), "worse")
    assert settled == {**worse, "top1_chunk": "no difference"}


def test_what_110m_parameters_show() -> None:
    written = [list(row.values()) for row in read_csv(sizes.RESULTS / "medium/sizes.csv")]
    assert written == [[str(value) for value in point] for point in sizes.points()]
    for loss in sizes.LOSSES:
        assert sizes.order_of_110m(loss, sizes.BUDGETS[1]) == "9 of 10"
    assert [sizes.order_of_110m("gap", tokens) for tokens in sizes.BUDGETS[2:]] == ["27 of 28", "19 of 21"]
    budgets = ({model: gap for model, *_, gap, _ in sizes.points(tokens)} for tokens in sizes.BUDGETS)
    first, second, early, last = budgets
    assert all(abs(early[model] - last[model]) < 0.03 for model in ("transformer", "top1_chunk", "window_256"))
    assert max(early, key=early.__getitem__) == max(last, key=last.__getitem__) == "based"
    assert early["mamba2"] > early["window_256"] > early["top1_chunk"]  # the only pair of 262M that changed its order
    assert 0 < early["rwkv7"] < early["top1_chunk"]
    assert first["delta_net"] < 0 < second["delta_net"] < early["delta_net"] < last["delta_net"] - 0.03
    assert 0 < last["delta_net"] - last["window_256"] < 0.01 > abs(last["delta_net"] - raw("delta_net"))
    assert early["mamba2"] - 0.09 > last["mamba2"] > last["delta_net"]
    assert float(sizes.copying_at_110m("65.5M")) < float(sizes.copying_at_110m("524M")) / 2
    assert raw("window_128") > 1.5 * last["window_256"]


def test_what_canon_layers_do() -> None:
    rows = {row[0].strip("`"): [float(cell) for cell in row[1:]] for row in predictions.canon()[1:]}
    falls = {model: gap - canon for model, (_, _, gap, canon, *_) in rows.items()}
    assert 0.09 < falls.pop("transformer_pp") < 0.105
    assert 0.125 < falls.pop("top1_chunk") < 0.135
    assert falls.keys() == {"delta_net", "mamba2", "gated_delta_net"}
    assert max(falls.values()) <= 0
    copying = {model: after - before for model, (*_, before, after) in rows.items()}
    assert max(copying.pop(model) for model in falls) < 0.02 < 1 < min(copying.values())
    plain, canon = (sorted(rows, key=lambda model: rows[model][column]) for column in (2, 3))
    assert canon == [model for model in plain if model != "delta_net"] + ["delta_net"]
    assert plain.index("delta_net") == len(plain) - 3


def test_gaps_keep_their_sign_and_mamba2_falls() -> None:
    later = [model for model in results.models() if (model, results.LONG, "mean, raw") in results.gaps("fourteen")]
    assert all(raw(model) * raw(model, tokens=results.LONG) > 0 for model in later)
    assert raw("mamba2", tokens=results.LONG) < raw("mamba2") / 2


def test_orders_of_the_short_runs() -> None:
    ood = {row["run"]: float(row["ood"]) for row in read_csv(results.RESULTS / "drafts.csv") if row["study"] != "mixed"}
    assert ood["window_16"] > ood["window_64"] > ood["window_256"]
    assert ood["temperature_1.0"] > ood["temperature_0.25"] > ood["qk_norm"] > ood["temperature_0.0625"]


def test_recall_needs_the_keys() -> None:
    points = {row[0].strip("`"): float(row[2]) for row in recall.mqar()[1:]}
    whole = {"Attention", "Top1Chunk", "Top1Element"}
    assert min(points[name] for name in whole) > 0.99 > max(points[name] for name in points.keys() - whole) + 0.1


def test_orders_of_speed() -> None:
    assert min(float(row[4]) for row in speed.rivals()[1:]) > 1
    for ratio in (speed.trains_long, speed.keeps_long):
        assert float(ratio("top1_chunk_approx")) > float(ratio("top1_chunk")) > 1
    assert min(float(row[3]) for row in speed.gpus()[1:]) > 1.9
    by_kernel = {tuple(row[:2]): float(row[5].removesuffix(" x")) for row in speed.dense()[1:]}
    assert all((ratio < 1) == (kernel == "Top-1 element") for (kernel, _), ratio in by_kernel.items() if ratio != 1)


@pytest.mark.commands
@pytest.mark.parametrize(
    "models", [("transformer_pp", "top1_chunk"), pytest.param(("*",), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_records_give_the_published_files(
    models: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = runpy.run_path(str(ROOT / "benchmarks/exam_records.py"))
    for name, folder in (("unpack", "benchmarks/exam_x3"), ("merge", "plugins/seqarch-zoo/benchmarks/exam_small")):
        (archives := tmp_path / name).mkdir()
        for path in itertools.chain(*((ROOT / folder).glob(f"{model}-seed_*.tar.xz") for model in models)):
            (archives / path.name).symlink_to(path)
        records[name](archives, tmp_path / "exam")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    [command] = re.findall(r"budget_tables.py build/records docs/results/fourteen (.*)", makefile)
    arguments = [str(tmp_path / "exam"), str(tmp_path / "tables"), *shlex.split(command)]
    monkeypatch.setattr(sys, "argv", ["budget_tables.py", *arguments])
    monkeypatch.setattr("seqarch.report.Comparison.figures", MagicMock())
    runpy.run_path(str(ROOT / "benchmarks/budget_tables.py"), run_name="__main__")
    every = "*" in models
    for name, key in (("gaps", "run"), ("losses", "model"), ("settled", "model"), *([("ranks", "")] if every else [])):
        published = [row for row in read_csv(results.RESULTS / f"fourteen/{name}.csv") if every or row[key] in models]
        assert published
        for made, row in itertools.zip_longest(read_csv(tmp_path / f"tables/{name}.csv"), published, fillvalue={}):
            kept = row.keys() - (set() if every else POOLED)
            assert {column: made.get(column) for column in kept} == {column: row[column] for column in kept}


@pytest.mark.commands
def test_records_of_drafts_give_the_published_losses_and_masks_keep_their_gaps(tmp_path: Path) -> None:
    options.write(tmp_path / "masks.csv", tmp_path / "optimizers.csv")
    assert read_csv(tmp_path / "optimizers.csv") == read_csv(options.OPTIMIZERS)
    rows = read_csv(tmp_path / "masks.csv")
    assert rows == read_csv(options.MASKS)
    gaps = {(row["model"], row["mask"]): float(row["gap"]) for row in rows if row["gap"]}
    for model in ("rwkv7", "top1_chunk"):
        assert abs(gaps[model, "yes"] - gaps[model, "no"]) < 0.01


def test_what_is_left_misses_an_aim_that_its_floor_allows() -> None:
    for work, *cells in left.left()[1:]:
        for aim, measured, floor in zip(
            *([float(n.replace(",", "")) for n in cell.split(" / ")] for cell in cells[:3]), strict=True
        ):
            assert floor < aim < measured if work.endswith(", ms") else measured < aim < floor, work
