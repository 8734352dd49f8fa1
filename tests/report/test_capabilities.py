"""Results of `seqarch eval` in a report: paired differences, chance, the table, the figures."""

import csv
import json

import numpy as np
import pytest
from markupsafe import escape

from seqarch.errors import UserError
from seqarch.report import compare
from seqarch.report.capabilities import paired_difference
from seqarch.report.capability_figures import loss_by_position, passkey
from seqarch.report.findings import Findings
from seqarch.report.page import capability_table, render
from seqarch.report.tables import capabilities, write_tables
from seqarch.runs import few_shot
from seqarch.runs.folder import result_path
from seqarch.runs.results import interval
from tests.report.runs_for_tests import write_run
from tests.report.runs_for_tests import write_samples as write


def test_the_average_is_over_the_tasks_that_all_models_have(runs):
    right = np.array([1.0, 1.0, 0.0, 1.0])
    for index, run in enumerate(runs):
        write(run, "piqa", {"piqa/acc": right, "piqa/acc_norm": 1 - index * right}, chance=0.5)
        write(run, "mmlu", {"mmlu/acc": right}, chance=0.25)
        write(run, "sciq", {"sciq/acc": right}, chance=0.25)  # the paper's is acc_norm
    write(runs[0], "copa", {"copa/acc": right}, chance=0.5)
    left_out = [task for task in few_shot.METRICS if task not in ("piqa", "mmlu")]
    found = Findings.read(runs).capabilities
    measured = found[f"few_shot/average without {', '.join(left_out)}"]
    assert [one.value.value for one in measured.values()] == [0.875, 0.5]
    assert {one.value.chance for one in measured.values()} == {0.375}
    one, parts = measured["other"], [found[tag]["other"].difference for tag in ("mmlu/acc", "piqa/acc_norm")]
    assert one.difference is not None
    assert parts[1] is not None
    _, low, high = parts[1]  # the models agree on MMLU
    assert one.difference == pytest.approx((-0.375, -0.375 - (high - low) / 4, -0.375 + (high - low) / 4))
    assert capability_table(Findings.read(runs)) is not None
    assert [*capabilities(Findings.read(runs))[1]]


def test_the_average_of_one_task_is_not_shown(runs):
    for run in runs:
        write(run, "piqa", {"piqa/acc_norm": np.ones(3)})
    assert [*Findings.read(runs).capabilities] == ["piqa/acc_norm"]


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / name, name) for name in ("base", "other")]


@pytest.mark.parametrize(
    ("facts", "samples"),
    [
        ({"metrics": {"a/b": {"value": "<b>"}}}, {}),
        ({"metrics": {"a/b": {"valeu": 0.5}}}, {}),
        ({"metrics": [0.5]}, {}),
        ({"settings": None}, {}),
        ({"rows": "here"}, {}),
        ({"rows": {"sha256": "0"}}, {}),
        ({}, {"a/b": np.array(["a", "b"])}),
        ({}, {"a/b": np.ones((2, 2))}),
        ({}, {"a/b": np.ones(0)}),
        ({}, {"a/b": np.array([1.0, np.nan])}),
        ({"metrics": {"a" * 20_000: {"value": 0.5}}}, {}),
        ({}, {"a/b": np.array([{"a": 1}], dtype=object)}),
    ],
    ids=range(12),
)
def test_damaged_results_are_named(runs, facts, samples):
    whole = {"task": "a", "group": "few_shot", "version": 1, "rows": None, "settings": {}}
    path = result_path(runs[0], 400, "a")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**whole, "metrics": {"a/b": {"value": 0.5, "low": 0.4, "high": 0.6, "n": 2}}, **facts}))
    np.savez(path.with_suffix(".samples.npz"), **(samples or {"a/b": np.ones(2)}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"evaluations/step_00000400/a\.(samples\.npz|json)"):
        _ = Findings.read(runs).capabilities


def test_odd_names_in_evaluations_and_odd_depths_do_no_harm(runs):
    (runs[0] / "evaluations/step_x").mkdir(parents=True)
    (runs[0] / "evaluations/step_x/a.json").write_text("{")
    for length, depth in (
        ("x", [0.5, 0.5]),
        ("1" * 200, [0.5, 0.5]),
        ("\u00b2", [0.5, 0.5]),
        (9, [-7.0, 0.5]),
        (10, [0.5]),
        (11, [1e300, 1.0]),
    ):
        samples = {f"passkey_{length}/contains": np.ones(2), "depth": np.array(depth)}
        write(runs[0], f"passkey_{length}", samples, settings={"length": length})
    found = Findings.read(runs)
    assert passkey.draw(found) is not None
    assert "passkey_10/contains" in render(found, {})


RANDOM = np.random.default_rng(7)
RIGHT = (RANDOM.random(400) < 0.6).astype(np.float32)
WORSE = np.where(RANDOM.random(400) < 0.15, 0, RIGHT).astype(np.float32)


def test_models_are_compared_on_the_same_samples(runs):
    write(runs[0], "piqa", {"piqa/acc": RIGHT}, chance=0.5)
    write(runs[1], "piqa", {"piqa/acc": WORSE}, chance=0.5)
    measured = Findings.read(runs).capabilities["piqa/acc"]
    assert measured["base"].difference is None
    assert not measured["base"].value.at_chance
    assert measured["other"].difference is not None
    by, _, high = measured["other"].difference
    assert by == pytest.approx(float(WORSE.mean() - RIGHT.mean()))
    assert high < 0, "paired, a fall of a few points is seen"
    assert interval(WORSE)[1] > interval(RIGHT)[0], "which the two intervals cannot tell"
    assert not measured["other"].alike


def test_the_paired_interval_covers_the_difference_as_often_as_it_says():
    random, hits = np.random.default_rng(0), 0
    for _ in range(100):
        base = random.normal(size=80)
        _, low, high = paired_difference(base + random.normal(0.2, 0.5, size=80), base)
        hits += low <= 0.2 <= high
    assert 0.91 < hits / 100 < 0.98


def test_results_on_other_rows_or_settings_are_not_compared(runs):
    write(runs[0], "piqa", {"piqa/acc": RIGHT})
    write(runs[1], "piqa", {"piqa/acc": WORSE}, sha256="b")
    write(runs[0], "sciq", {"sciq/acc": RIGHT})
    write(runs[1], "sciq", {"sciq/acc": WORSE}, settings={"limit": 400})
    for run, tokenizer in zip(runs, ("byte", "mixtral"), strict=True):
        write(run, "piqa_of_text", {"arc/acc": RIGHT}, group="few_shot", tokenizer=tokenizer)
        write(run, "passkey", {"passkey/acc": RIGHT}, group="passkey", tokenizer=tokenizer)
    found = Findings.read(runs).capabilities
    assert found["passkey/acc"]["other"].difference is None, "prompts of other tokens"
    assert found["arc/acc"]["other"].difference == (0, 0, 0), "the same texts"
    assert found["piqa/acc"]["other"].difference is None
    assert found["sciq/acc"]["other"].difference is None


def test_the_newest_checkpoint_counts_and_seeds_are_averaged(tmp_path):
    runs = [write_run(tmp_path / "base" / f"seed_{seed}", "base", seed=seed) for seed in (0, 1)]
    runs.append(write_run(tmp_path / "other", "other"))
    for run, samples in zip(runs, (RIGHT, WORSE, RIGHT), strict=True):
        write(run, "piqa", {"piqa/acc": 1 - samples}, step=200)
        write(run, "piqa", {"piqa/acc": samples})
    measured = Findings.read(runs).capabilities["piqa/acc"]
    assert measured["base"].value.value == pytest.approx((RIGHT.mean() + WORSE.mean()) / 2)
    assert measured["base"].step == 400
    assert measured["other"].value.value == pytest.approx(float(RIGHT.mean()))


def test_seeds_count_that_were_evaluated_at_the_latest_step(tmp_path):
    runs = [write_run(tmp_path / "base" / f"seed_{seed}", "base", seed=seed) for seed in (0, 1, 2)]
    runs.append(write_run(tmp_path / "other", "other"))
    for run, step, samples in zip(runs, (200, 400, 400, 300), (1 - RIGHT, RIGHT, WORSE, RIGHT), strict=True):
        write(run, "piqa", {"piqa/acc": samples}, step=step)
    found = Findings.read(runs)
    assert found.capabilities["piqa/acc"]["base"].value.value == pytest.approx((RIGHT.mean() + WORSE.mean()) / 2)
    table = capability_table(found)
    assert table is not None
    assert [cell.note.rpartition("; ")[2] for cell in table[1][0][2:]] == ["step 400", "step 300"]
    head, rows = capabilities(found)
    assert [row[head.index("step")] for row in rows] == [400, 300]


def test_only_seeds_with_the_same_measurement_are_averaged(tmp_path):
    runs = [write_run(tmp_path / "base" / f"seed_{seed}", "base", seed=seed) for seed in (0, 1, 2)]
    for run, samples, other in zip(runs, (RIGHT, WORSE, 1 - RIGHT), (False, False, True), strict=True):
        write(run, "piqa", {"piqa/acc": samples}, sha256="b" if other else "a")
        write(run, "sciq", {"sciq/acc": samples}, settings={"limit": 400} if other else None)
    found = Findings.read(runs).capabilities
    for metric in ("piqa/acc", "sciq/acc"):
        assert found[metric]["base"].value.value == pytest.approx((RIGHT.mean() + WORSE.mean()) / 2)


def test_page_and_table_show_what_was_found(runs, tmp_path):
    write(runs[0], "piqa", {"piqa/acc": RIGHT}, chance=0.59, settings={"limit": 400})
    write(runs[1], "piqa", {"piqa/acc": RIGHT}, chance=0.59, settings={"limit": 400})
    write(runs[1], "LossByDomain", {"loss/ood": RIGHT}, group="loss")
    found = Findings.read(runs)
    page = render(found, {})
    assert "<h2>Capabilities</h2>" in page
    for words in ("piqa/acc", "400 samples, --limit 400", "at chance", "cannot be told apart"):
        assert words in page
    assert "loss/ood</td>" not in page
    table = capability_table(found)
    assert table is not None
    head, _ = table
    assert head == ["metric", "chance", "base", "other"]
    write_tables(found, tmp_path)
    with (tmp_path / "capabilities.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["run"] for row in table] == ["base", "other"]
    assert float(table[1]["difference"]) == 0
    assert table[0]["limit"] == "400"


@pytest.mark.parametrize(("n", "said"), [(1, "1 sample"), (2, "2 samples")])
def test_the_page_counts_samples(runs, n, said):
    write(runs[0], "piqa", {"piqa/acc": RIGHT[:n]})
    table = capability_table(Findings.read(runs))
    assert table is not None
    assert table[1][0][0].note == said


def test_without_results_there_is_no_section(runs):
    found = Findings.read(runs)
    assert capability_table(found) is None
    assert "Capabilities" not in render(found, {})
    assert passkey.draw(found) is None
    assert loss_by_position.draw(found) is None


ONE_DOMAIN = {"domains": (), "facts": {"train": {"docs": 1.0}}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ONE_DOMAIN, "cannot be compared, they differ in OOD domains (code, legal and none)"),
        ({"domains": ("code",)}, "they differ in OOD domains (code, legal and code)"),
        ({"facts": {"tokenizer": "mixtral"}}, "they differ in tokenizer (byte and mixtral)"),
    ],
)
def test_results_are_reported_where_no_losses_can_be_compared(tmp_path, options, said):
    runs = [write_run(tmp_path / "base", "base"), write_run(tmp_path / "other", "other", **options)]
    with pytest.raises(UserError):
        compare(runs)
    for run, right in zip(runs, (RIGHT, WORSE), strict=True):
        write(run, "boolq", {"boolq/acc": right})
    comparison = compare(runs)
    assert comparison.table.count("\n") == 4
    line = comparison.table.splitlines()[4]
    assert line.startswith("The report shows no losses and no gap: '")
    assert said.replace("RUNS", str(tmp_path)) in line
    begin = "metric           base   other\ntraining tokens  1.64M  1.64M\nparameters       1.65M  1.65M\nboolq/acc "
    assert comparison.table.startswith(begin)
    written = comparison.write(tmp_path / "out")
    tables = ["capabilities.csv", "entropy.csv", "models.csv"]
    assert sorted(path.name for path in written if path.suffix == ".csv") == tables
    with (tmp_path / "out/capabilities.csv").open() as file:
        base, other = csv.DictReader(file)
    assert float(other["difference"]) == pytest.approx(WORSE.mean() - RIGHT.mean())
    assert base["difference"] == ""
    with (tmp_path / "out/models.csv").open() as file:
        assert [row["ood_loss"] for row in csv.DictReader(file)] == ["", ""]
    page = written[0].read_text()
    assert f"<p>{escape(line)}</p>" in page
    assert "<h2>Capabilities</h2>" in page
    assert "Attention entropy" in page
    assert "<h2>The" in page
    assert "Losses in nats" not in page


def test_positions_in_long_documents_and_in_sequences_are_not_mixed(tmp_path):
    base = write_run(tmp_path / "base", "base")
    other = write_run(tmp_path / "other", "other", facts={"tokenizer": "mixtral"})
    by_position = "loss_by_position/books/{}".format
    for run, task, group, means in (
        (base, "LossByPosition", "loss", {"0-64": 1.0, "64-128": 1.0}),
        (base, "ALongTask", "long", {"0-64": 3.0, "128-256": 3.0}),
        (other, "LossByPosition", "loss", {"0-64": 1.0}),
    ):
        write(run, task, {by_position(each): np.full(9, mean) for each, mean in means.items()}, group=group)
    found = Findings.read([base, other])
    values = {tag: {name: one.value.value for name, one in each.items()} for tag, each in found.capabilities.items()}
    assert values == {by_position(each): {"base": mean} for each, mean in (("0-64", 3), ("64-128", 1), ("128-256", 3))}
    figure = loss_by_position.draw(found)
    assert figure is not None
    assert [np.asarray(line.get_ydata()).tolist() for line in figure.axes[0].get_lines()] == [[3, 3]]


def test_the_heat_map_has_a_panel_for_each_haystack(runs):
    depth = np.linspace(0, 1, 50)
    for name, run, found in (
        ("passkey", runs[0], 1.0),
        ("passkey_essays", runs[0], 0.0),
        ("passkey_essays", runs[1], 1.0),
        ("needle", runs[0], 1.0),
    ):
        samples = {f"{name}_8192/contains": np.full(50, found, np.float32), "depth": depth}
        write(run, f"{name}_8192", samples, group="passkey", settings={"length": 8192})
    read = Findings.read(runs)
    figure = passkey.draw(read)
    assert figure is not None
    panels = {axes.get_title().replace("\n", " "): axes for axes in figure.axes[:4]}
    base, other = read.reference.name, next(each.name for each in read.groups if each.name != read.reference.name)
    values = {title: np.ma.asarray(axes.images[0].get_array()).min() for title, axes in panels.items()}
    assert values == {base: 1, f"{base}, essays": 0, f"{other}, essays": 1, f"{base}, needle": 1}
    assert panels[f"{other}, essays"].texts[0].get_text() == "100%\n(+100%)", "the difference on the same prompts"


def test_heat_map_and_losses_by_position(runs):
    random, depth = np.random.default_rng(0), np.linspace(0, 1, 50)
    for run, length in ((runs[0], 8192), (runs[0], 16384), (runs[1], 8192)):
        samples = {f"passkey/{length}/contains": (depth > 0.5).astype(np.float32), "depth": depth}
        write(run, f"passkey_{length}", samples, group="passkey", settings={"length": length})
    for run, falls in zip(runs, (0.1, 0.3), strict=True):
        means = {(0, 2048): 3.0, (2048, 8192): 3.0 - falls}
        write(
            run,
            "long",
            {f"loss_by_position/books/{a}-{b}": random.normal(mean, 0.1, 30) for (a, b), mean in means.items()},
            group="long",
        )
    found = Findings.read(runs)
    figure = passkey.draw(found)
    assert figure is not None
    base, other = (np.ma.asarray(axes.images[0].get_array()) for axes in figure.axes[:2])
    assert base.shape == (5, 2)
    assert base[:2].max() == 0
    assert base[3:].min() == 1
    assert np.ma.getmaskarray(other)[:, 1].all() or np.isnan(np.asarray(other)[:, 1]).all(), "it was not measured there"
    figure = loss_by_position.draw(found)
    assert figure is not None
    lines = figure.axes[0].get_lines()
    values = [np.asarray(line.get_ydata(), float) for line in lines]
    falls = [float(each[0] - each[1]) for each in values]
    assert falls == pytest.approx([0.1, 0.3], abs=0.1)
    assert falls[1] > falls[0]
