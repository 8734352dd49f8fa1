"""What is read from a run folder, and the message for each kind of bad folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.report import compare
from seqarch.report.page import render
from seqarch.report.runs import load_run, pick_reference
from seqarch.report.tables import write_tables
from tests.report.runs_for_tests import load_groups, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", "a", steps=100)


def edit(run: Path, change) -> Path:
    """Rewrites curves.csv with `change(rows)`. Rows are lists of cells; the header is first."""
    path = run / "curves.csv"
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    change(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def set_facts(run: Path, **facts) -> None:
    path = run / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def refusal(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_is_read_back(run):
    read = load_run(run)
    assert (read.name, read.seed, read.steps, read.tokens) == ("a", 0, 100, 100 * 4096)
    assert read.domains == ["code", "legal"]
    assert read.evaluations.step.tolist() == [20, 40, 60, 80, 100]
    assert read.evaluations.tokens.tolist() == [4096 * step for step in (20, 40, 60, 80, 100)]
    assert len(read.curves["loss/train"].value) == 25
    assert sorted(read.entropy_layers()) == [0, 1, 2, 3]
    assert read.config["model"]["d_model"] == 128
    assert read.evaluations_left_out == 0
    both = read.evaluations.losses["code"] + read.evaluations.losses["legal"]
    assert read.evaluations.with_mean()["mean"] == pytest.approx(both / 2)
    assert read.curves["loss/ood"].value == pytest.approx(both / 2)


def test_evaluations_that_are_incomplete_or_not_finite_are_left_out_and_counted(run):
    def spoil(rows):
        rows[20 // 4][rows[0].index("loss/ood/code")] = "nan"
        rows[60 // 4][rows[0].index("loss/ood/legal")] = ""

    edit(run, spoil)
    read = load_run(run)
    assert read.evaluations.step.tolist() == [40, 80, 100]
    assert all(np.isfinite(loss).all() for loss in read.evaluations.losses.values())
    assert read.evaluations_left_out == 2


@pytest.mark.parametrize(
    ("step", "value", "status"), [(100, "nan", "diverged"), (100, "inf", "diverged"), (80, "nan", "finished")]
)
def test_a_run_whose_last_evaluation_is_no_number_diverged(run, step, value, status, tmp_path):
    def spoil(rows):
        rows[step // 4][rows[0].index("loss/ood/code")] = value

    edit(run, spoil)
    assert load_run(run).status == status
    said = (
        f"'a' ({run}) diverged: a loss of its last evaluation is not a finite number. "
        "The report shows the run up to step 80."
    )
    comparison = compare([run])
    assert (said in comparison.table) == (status == "diverged")
    write_tables(comparison.findings, tmp_path)
    with (tmp_path / "models.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == [status]
    assert ("diverged: a loss" in render(comparison.findings, {})) == (status == "diverged")


def test_rows_without_tokens_have_no_place_on_the_axis(run):
    assert 28 in load_run(run).curves["loss/train"].step
    edit(run, lambda rows: rows[28 // 4].__setitem__(1, ""))
    assert 28 not in load_run(run).curves["loss/train"].step


def test_entropy_by_head_is_not_a_layer(run):
    edit(run, lambda rows: [row.append("entropy/layer_09/head_00" if i == 0 else "1") for i, row in enumerate(rows)])
    assert sorted(load_run(run).entropy_layers()) == [0, 1, 2, 3]


@pytest.mark.parametrize("more", ["101,413", "\n101"])
@pytest.mark.parametrize("status", ["running", "failed", "stopped"])
def test_an_unfinished_last_line_of_an_unfinished_run_is_left_out(run, status, more):
    """A full disk leaves half a line of a run that failed."""
    set_facts(run, status=status)
    path = run / "curves.csv"
    path.write_text(path.read_text() + more)
    assert load_run(run).steps == 100


@pytest.mark.parametrize("kept", [-2, -3, -30, -400])
def test_cut_curves_of_a_finished_run_are_refused(run, kept):
    """Cut within the last cell, `21000.0` would be read as `2100`."""
    path = run / "curves.csv"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} ends at step " in refusal(load_run, run)


def test_curves_that_end_before_a_finished_run_are_refused(run):
    path = run / "curves.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert f"{path} ends at step 96 of 100: it was cut" in refusal(load_run, run)
    edit(run, lambda rows: rows[0].__setitem__(rows[0].index("loss/train"), "other"))
    assert load_run(run).steps == 96  # as where no callback measured after the last step


def test_a_folder_that_is_no_run(tmp_path, run):
    assert refusal(load_run, tmp_path / "missing") == f"there is no run folder '{tmp_path / 'missing'}'"
    (tmp_path / "empty").mkdir()
    said = refusal(load_run, tmp_path / "empty")
    assert "it has no run.json and no config.yaml and no curves.csv: name one that seqarch fit wrote" in said
    assert "(a file)" in refusal(load_run, run / "curves.csv")
    assert refusal(load_run, tmp_path).endswith(f"did you mean the runs inside it: {run}")


BAD_CURVES = {
    "missing column": (
        lambda rows: rows[0].__setitem__(1, "tokns"),
        "curves.csv:1: expected columns step, tokens and printable tags, each once, found ['step', 'tokns'",
    ),
    "column twice": (lambda rows: rows[0].__setitem__(3, "loss/train"), "each once, found ['step', 'tokens', 'loss/tr"),
    "no number": (
        lambda rows: rows[5].__setitem__(0, "five"),
        "curves.csv:6: could not convert string to float: 'five'",
    ),
    "no step": (lambda rows: rows[5].__setitem__(0, ""), "curves.csv:6: could not convert string to float: ''"),
    "step not finite": (lambda rows: rows[5].__setitem__(0, "inf"), "curves.csv:6: step and tokens must be whole"),
    "short row": (lambda rows: rows[5].pop(), "curves.csv:6: "),
    "steps fall": (lambda rows: rows[5].__setitem__(0, "2"), "curves.csv:6: expected a step above 16 and at least "),
    "tokens fall": (lambda rows: rows[5].__setitem__(1, "2"), "curves.csv:6: expected a step above 16 and at least "),
}


@pytest.mark.parametrize("kind", BAD_CURVES)
def test_malformed_curves_name_file_and_line(run, kind):
    change, expected = BAD_CURVES[kind]
    edit(run, change)
    assert expected in refusal(load_run, run)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("curves.csv", b"", "curves.csv ends at step 0 of 100"),
        ("curves.csv", b"\xff\xfe\x00", "curves.csv is not UTF-8 text"),
        ("curves.csv", b'step,tokens\n1,"2\n', "curves.csv: malformed CSV: line 2"),
        ("run.json", b'{"name": "a",\n "seed" 0}', "run.json:2: is not JSON"),
        ("run.json", b"[]", "run.json:1: expected an object"),
        ("run.json", b'{"name": "a"}', "run.json: 'seed' must be a whole number, found None"),
        ("run.json", b'{"name": 3, "seed": 0}', "run.json: 'name' must be a text of at most 255 letters, found 3"),
        ("run.json", b'{"name": "' + b"a" * 20_000 + b'", "seed": 0}', "must be a text of at most 255 letters"),
        ("run.json", b'{"name": "a", "seed": 0, "versions": {"a": "' + b"a" * 256 + b'"}}', "must be a mapping, found"),
        (
            "curves.csv",
            b"step,tokens,loss/ood/" + b"a" * 20_000 + b"\n1,1,1\n",
            "curves.csv:1: expected columns step, tokens and printable tags",
        ),
        ("run.json", b'{"name": "a\\u001b[2J", "seed": 0}', "found 'a\\x1b[2J'"),
        ("run.json", b'{"name": "a", "seed": 0, "train": {"\\u202e": 1}}', "'train' must be a mapping of numbers"),
        ("run.json", b"[" * 100_000, "run.json:1: is not JSON (maximum recursion depth exceeded"),
        ("run.json", b'{"seed": ' + b"1" * 5000 + b"}", "run.json:1: is not JSON (Exceeds the limit (4300 digits)"),
        (
            "curves.csv",
            b"step,tokens,loss/ood/\x1b[2J\n1,1,1\n",
            "curves.csv:1: expected columns step, tokens and printable tags",
        ),
        ("curves.csv", b"step,tokens\n2.5,1\n", "curves.csv:2: step and tokens must be whole numbers"),
        ("curves.csv", b"step,tokens\n1e300,1\n", "curves.csv:2: step and tokens must be whole numbers"),
        ("config.yaml", b"a: 1\nb: [", "config.yaml:2: is not valid YAML"),
        ("config.yaml", b"- 1", "config.yaml: expected a mapping"),
    ],
)
def test_malformed_files_are_named(run, file, content, expected):
    (run / file).write_bytes(content)
    assert expected in refusal(load_run, run)


def test_a_run_without_an_evaluation_says_how_far_it_is(tmp_path):
    run = write_run(tmp_path / "young", "young", steps=100, every=500)
    said = refusal(load_groups, [run])
    assert (
        f"'young' ({run}) has 100 of 100 steps and no complete evaluation: wait for one, or evaluate more often" in said
    )
    edit(run, lambda rows: [row.__delitem__(slice(3, 8)) for row in rows])
    assert refusal(load_groups, [run]) == said


@pytest.mark.parametrize(
    ("status", "said"), [("finished", None), ("failed", "failed"), ("stopped", "was stopped"), ("running", "it is")]
)
def test_the_table_says_which_run_has_not_ended(run, status, said):
    set_facts(run, status=status)
    table = compare([run]).table
    assert (f"'a' ({run}) " in table) == bool(said)
    assert not said or f"{said} at step 100 of 100." in table


def test_a_run_of_one_domain_has_losses_and_no_comparison(tmp_path):
    runs = [write_run(tmp_path / name, name, steps=100, domains=()) for name in ("narrow", "other")]
    alone = compare(runs[:1])
    assert alone.figures(["losses", "scatter", "gap"]).keys() == {"losses"}
    assert "narrow" in alone.table
    assert "has one domain, so nothing to compare: name some in data.ood" in refusal(load_groups, runs)


def test_runs_of_one_name_are_seeds_in_order_of_appearance(tmp_path):
    names = [("b", 0), ("a", 0), ("b", 1)]
    folders = [write_run(tmp_path / f"{name}{seed}", name, seed=seed, steps=100) for name, seed in names]
    groups = load_groups(folders)
    assert [(group.name, [run.seed for run in group.runs]) for group in groups] == [("b", [0, 1]), ("a", [0])]
    assert pick_reference(groups, None).name == "b"
    assert pick_reference(groups, "a").name == "a"
    assert refusal(pick_reference, groups, "c").startswith("unknown reference run 'c'")


def test_the_final_losses_are_those_of_the_seeds_that_have_come_to_the_end(tmp_path):
    folders = [write_run(tmp_path / "it" / f"seed_{seed}", "it", seed=seed) for seed in range(3)]
    table = folders[2] / "curves.csv"
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(lines[:51]))  # it has taken half of the steps
    set_facts(folders[2], status="running")
    (group,) = load_groups(folders)
    ends = [run.evaluations.in_domain[-1] for run in group.runs]
    assert ends[2] > max(ends[:2]) + 0.05
    assert group.final_losses()["in_domain"] == pytest.approx(sum(ends[:2]) / 2)


def test_two_runs_of_one_name_and_seed_are_refused(tmp_path, run):
    twin = write_run(tmp_path / "twin", "a", steps=100)
    said = refusal(load_groups, [run, twin])
    assert f"{run} and {twin} are both 'a' of seed 0: leave one out" in said


def test_two_models_of_one_name_are_refused(tmp_path, run):
    other = write_run(tmp_path / "other", "a", steps=100, seed=1, facts={"parameters": 7})
    assert "they differ in parameters" in refusal(load_groups, [run, other])


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"model": {"warmup_steps": 9}}, "model.warmup_steps"),
        ({"model": {"learning_rate": 0.01}}, ""),
        ({"model": {"mixers": {"a": {"init_args": {"window": 8}}}}}, "model.mixers.a.init_args.window"),
        ({"model": {"compile": True}}, ""),
        ({"model": {"mixers": {"a": {"init_args": {"backend": "triton"}}}}}, ""),
        ({"model": {"option_of_a_later_version": 1}}, ""),
    ],
)
def test_runs_of_one_name_with_other_options_of_the_model_are_refused(tmp_path, options, refused):
    first = {
        "learning_rate": 0.02,
        "warmup_steps": 1,
        "compile": False,
        "mixers": {"a": {"init_args": {"window": 4, "backend": "auto"}}},
    }
    folders = [write_run(tmp_path / f"seed_{seed}", "a", steps=100, seed=seed) for seed in range(2)]
    for folder, config in zip(folders, ({"model": first}, options), strict=True):
        (folder / "config.yaml").write_text(json.dumps(config))
    if refused:
        assert f"but they differ in {refused}" in refusal(load_groups, folders)
    else:
        assert len(load_groups(folders)) == 1


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"tokenizer": "mixtral"}, "they differ in tokenizer (byte and mixtral)"),
        ({"train": {"docs": 1.0, "web": 2.0}}, "they differ in train"),
        ({"unigram_entropy": {"docs": 3.2}}, "they differ in unigram entropy of the hold-out of docs (3.125 and 3.2)"),
    ],
)
def test_losses_that_are_not_the_same_quantity_are_not_compared(tmp_path, run, facts, expected):
    other = write_run(tmp_path / "other", "other", steps=100, facts=facts)
    assert expected in refusal(load_groups, [run, other])


@pytest.mark.parametrize(
    ("key", "value"), [("sequence_length", 512), ("eval_tokens", 8192), ("eval_documents", 256), ("num_workers", 4)]
)
def test_losses_on_other_text_or_in_another_context_are_not_compared(tmp_path, key, value):
    folders = [write_run(tmp_path / name, name, steps=100) for name in ("first", "other")]
    data = {"sequence_length": 256, "eval_tokens": 4096, "num_workers": 0}
    for folder, config in zip(folders, (data, {**data, key: value}), strict=True):
        (folder / "config.yaml").write_text(json.dumps({"data": config}))
    if key == "num_workers":
        assert len(load_groups(folders)) == 2
    else:
        expected = f"they differ in data.{key} ({data.get(key, 1)} and {value}): evaluate both alike"
        assert expected in refusal(load_groups, folders)


def test_other_ood_domains_are_not_compared(tmp_path, run):
    other = write_run(tmp_path / "other", "other", steps=100, domains=("code",))
    assert "they differ in OOD domains (code, legal and code)" in refusal(load_groups, [run, other])


def test_no_run_at_all_is_refused():
    assert refusal(load_groups, []) == "a report needs at least one run folder"
