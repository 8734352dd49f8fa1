"""`seqarch fit --from RUN`: its recipe, weights, optimizer and unseen text; other text begins at its start."""

import csv
import json
import shutil

import pytest
import torch

from seqarch import cli
from seqarch.data.prepare import prepare
from seqarch.errors import UserError
from seqarch.runs.folder import newest_checkpoint
from tests.conftest import MODEL, TINY, flags
from tests.training.test_optimizers import interrupted

pytestmark = pytest.mark.commands

CONSTANT = {"model.decay_share": 0, "model.learning_rate": 0.01}


def curves(run):
    with (run / "curves.csv").open(newline="") as file:
        return [{key: row[key] for key in row if "throughput" not in key} for row in csv.DictReader(file)]


def rates(run):
    return {int(row["step"]): float(row["learning_rate"]) for row in curves(run) if row["learning_rate"]}


def content(run):
    newest = newest_checkpoint(run)
    assert newest is not None
    return torch.load(newest, weights_only=True)


@pytest.fixture(scope="module")
def parent(shards, tmp_path_factory):
    """A finished run of 4 steps at a constant rate."""
    run = tmp_path_factory.mktemp("going_on") / "parent"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])
        cli.run(["fit", *flags(**{**TINY, **MODEL, **CONSTANT, "data.root": shards, "run_dir": run})])
    return run


@pytest.fixture
def go_on(parent, tmp_path, without_figures):
    def run(name="new", **options):
        args = {"run_dir": tmp_path / name, "from": parent, "trainer.max_steps": 8, **options}
        cli.run(["fit", *flags(**args)])
        return tmp_path / name

    return run


def test_a_longer_run_is_as_one_that_was_never_finished(fit, go_on):
    """With a constant rate: the recipe, the order of the text, the optimizer, the curves are those of one run."""
    whole, new = fit("whole", **CONSTANT, **{"trainer.max_steps": 8}), go_on()
    assert curves(new) == curves(whole)
    saved, expected = content(new)["state_dict"], content(whole)["state_dict"]
    assert all(torch.equal(saved[name], each) for name, each in expected.items())
    evaluated = sorted(path.name for path in (whole / "evaluations").glob("*"))
    assert sorted(path.name for path in (new / "evaluations").glob("*")) == evaluated


def test_the_rate_rises_again_and_an_interrupted_run_resumes(go_on):
    options = {"model.rewarm_steps": 3, "checkpoint.every_n_steps": 2}
    new = go_on(**options)
    assert [rates(new)[step] for step in (4, 5, 6, 7, 8)] == pytest.approx([0.01, 0.0025, 0.005, 0.0075, 0.01])
    before, saved = interrupted(new)
    assert newest_checkpoint(new).name == "step_00000006.ckpt"  # pyright: ignore[reportOptionalMemberAccess]
    go_on(**options)
    assert curves(new) == before
    assert all(torch.equal(content(new)["state_dict"][name], each) for name, each in saved["state_dict"].items())


def test_curves_hold_measurements_of_one_kind(parent, go_on, shards, tmp_path, capsys):
    """Losses of other tokens, or means over other domains, do not go on in the curves of the other run."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/docs").symlink_to(shards / "docs")
    prepare([shards / "docs.jsonl"], tmp_path / "own", "code", "byte", holdout=0.3, workers=1)
    for name, options, said in (
        ("a", {"data.eval_tokens": 48, "data.ood": "[]"}, "data.eval_tokens, data.ood differ from those of"),
        ("b", {"data.root": tmp_path / "own"}, "the hold-out of code differ from those of"),
    ):
        new = go_on(name, **options, **{"trainer.max_steps": 5})
        assert f"{said} {parent}: its curves stay there" in capsys.readouterr().out
        assert {int(row["step"]) for row in curves(new)} == {5}
        assert content(new)["TextDataModule"]["position"] == 2 * 5


def test_other_text_begins_at_its_start_and_both_count_as_trained_on(parent, go_on, shards, tmp_path, capsys):
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"text": f"own text {number} " * 30}) + "\n" for number in range(80)))
    (tmp_path / "own").mkdir()
    for domain in ("docs", "code"):
        (tmp_path / "own" / domain).symlink_to(shards / domain)
    prepare([file], tmp_path / "own", "mine", "byte", holdout=0.3, workers=1)
    options = {"data.root": tmp_path / "own", "data.train": "{mine: 1.0}"}
    new = go_on(**options)
    assert "shards, train differ from those of" in capsys.readouterr().out
    assert content(new)["TextDataModule"]["position"] == 2 * 4  # two micro-batches for each of four steps
    assert {*content(new)["seqarch"]["sources"].values()} == {"docs.jsonl of docs", "own.jsonl of mine"}
    assert {*rates(new)} == {5, 6, 7, 8}
    before, saved = interrupted(new)
    go_on(**options)
    assert curves(new) == before
    assert content(new)["seqarch"]["sources"] == saved["seqarch"]["sources"]


def test_tokens_of_steps_with_sequences_of_another_length_stay_as_they_are(go_on):
    options = {"data.sequence_length": 24, "checkpoint.every_n_steps": 2}
    expected = {step: 4 * 4 * 48 + (step - 4) * 4 * 24 for step in (5, 6, 7, 8)}
    new = go_on(**options)
    assert {int(row["step"]): int(row["tokens"]) for row in curves(new)} == expected
    before, _ = interrupted(new)
    go_on(**options)
    assert curves(new) == before
    third = go_on("third", **{"from": new, "data.sequence_length": 48, "trainer.max_steps": 9})
    assert [int(row["tokens"]) for row in curves(third)] == [expected[8] + 4 * 48]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"from": "nowhere"}, "--from nowhere: there is no run with a config.yaml: name a run folder"),
        ({"trainer.max_steps": 4}, "is of step 4, so no step is left: trainer.max_steps is 4"),
        ({"run_dir": "null"}, "fit needs --run_dir"),
        ({"ckpt_path": "x"}, "--from and --ckpt_path both name a checkpoint to begin from: leave one out"),
        ({"model.d_model": 16}, "holds another model"),
        ({"data.sequences_per_step": 8}, "sequences_per_step is 8 but was 4"),
        ({"data.seed": 8}, "seed is 8 but was 0"),
        ({"data.shuffle_window": 1}, "shuffle_window is 1 but was"),
        ({"data.document_mask": True}, "document_mask is True but was False"),
        ({"model.rewarm_steps": -1}, "model.rewarm_steps must be at least 0, not -1"),
    ],
)
def test_what_cannot_go_on_is_refused(go_on, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        go_on(**options)
    assert not (tmp_path / "new").exists()


def test_changed_curves_are_named_where_they_are(parent, go_on, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(parent, old)
    kept = (old / "curves.csv").read_text()
    (old / "curves.csv").write_text(kept.replace(".", ".5"))
    with pytest.raises(UserError, match=f"{old}/curves.csv is not what the run had written at step 4: restore it"):
        go_on(**{"from": old})
    (old / "curves.csv").write_text(kept)
    assert int(curves(go_on(**{"from": old}))[-1]["step"]) == 8


def test_a_finished_run_names_the_command_that_trains_on(parent, go_on):
    with pytest.raises(UserError, match=f"to train on, give --run_dir NEW --from {parent} --trainer.max_steps 8"):
        cli.run(["fit", f"--config={parent / 'config.yaml'}", "--trainer.max_steps=8"])
    with pytest.raises(UserError, match="rewarm_steps is for a run that goes on from another one"):
        cli.run(["fit", f"--config={parent / 'config.yaml'}", "--model.rewarm_steps=2"])
