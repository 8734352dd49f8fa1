"""A checkpoint is measured on the hold-outs that it notes, wherever they lie, and on no other text of their names."""

import json
import shutil

import pytest
import torch

from seqarch import cli
from seqarch.data.prepare import prepare
from seqarch.errors import SeqarchWarning, UserError
from seqarch.evaluation import LossByDomain
from seqarch.evaluation.cloze import Cloze
from seqarch.experiment.evaluate import evaluate_checkpoint
from seqarch.experiment.experiment import Experiment
from seqarch.runs.folder import newest_checkpoint
from seqarch.training.checkpoint import check_entries
from tests.conftest import MODEL, TINY, flags

pytestmark = pytest.mark.commands

TAG = "loss/ood/code"


@pytest.fixture(scope="module")
def trained(shards, tmp_path_factory):
    """A folder with `shards` and a `run` of them, whose `data.root` is relative; and the loss of the run."""
    place = tmp_path_factory.mktemp("provenance") / "place"
    shutil.copytree(shards, place / "shards")
    options = {**TINY, **MODEL, "ood_loss.every_n_steps": "0", "data.root": "shards", "run_dir": "run"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])
        patch.chdir(place)
        cli.run(["fit", *flags(**options)])
        return place, Experiment.from_recipe("run/config.yaml").evaluate()[TAG]


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of that folder; the original is away, and the test runs in a third folder."""
    place, _ = trained
    copy = shutil.copytree(place, tmp_path / "copy")
    away = place.rename(place.with_name("away"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield copy
    away.rename(place)


def other_text(folder, name="code"):
    """Prepare another text under the name of a domain."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": f"other {number} " * 40}) + "\n" for number in range(60)))
    shutil.rmtree(folder / name, ignore_errors=True)
    prepare([file], folder, name, "byte", holdout=0.3, workers=1)


def losses(run, **overrides):
    """The loss by each way to measure a checkpoint."""
    recipe = run / "config.yaml"
    yield lambda: Experiment.from_recipe(recipe, overrides).evaluate(checkpoint=run)[TAG]
    root = overrides.get("data.root")
    results = run.parent / "results"
    yield lambda: evaluate_checkpoint(run, [LossByDomain()], results, data_root=root)[0].metrics[TAG].value


def test_the_text_of_the_run_is_found_from_another_folder(trained, tmp_path, monkeypatch, capsys):
    place, loss = trained
    other_text(tmp_path / "shards")
    other_text(tmp_path / "shards", "docs")
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(place / "run", tmp_path / "another/run")  # a copy without the shards
    for measure in losses(run):
        assert measure() == pytest.approx(loss, abs=1e-6)
    cli.run(["validate", "--config", f"{run}/config.yaml", "--ckpt_path", f"{run}"])
    assert f"on the text in {place}/shards\n" in capsys.readouterr().out


def test_the_text_moves_with_the_run(trained, place):
    for measure in losses(place / "run"):
        assert measure() == pytest.approx(trained[1], abs=1e-6)


def test_another_text_under_the_same_name_is_not_measured(place, monkeypatch):
    other_text(place / "shards")
    monkeypatch.chdir(place)
    refusal = r"shards has another hold-out of 'code' than \S+/step_00000004.ckpt: restore or rename it"
    for measure in losses(place / "run"):
        with pytest.raises(UserError, match=refusal):
            measure()
    for command in ("validate", "test"):
        with pytest.raises(UserError, match=refusal):
            cli.run([command, "--config", "run/config.yaml", "--ckpt_path", "run"])


@pytest.mark.parametrize("root", ["shards", "other"])
def test_a_root_that_is_named_is_not_replaced(trained, tmp_path, monkeypatch, root):
    place, _ = trained
    other_text(tmp_path / root)
    other_text(tmp_path / root, "docs")
    monkeypatch.chdir(tmp_path)
    for measure in losses(place / "run", **{"data.root": root}):
        with pytest.raises(UserError, match=f"{root} has another hold-out of 'docs'"):
            measure()
    recipe = {**Experiment.from_recipe(place / "run/config.yaml").config}
    recipe["data"] |= {"root": "other"}
    with pytest.raises(UserError, match="other"):
        Experiment.from_recipe(recipe).evaluate(checkpoint=place / "run")


def test_another_text_is_measured_under_its_own_name(trained, place, monkeypatch):
    other_text(place / "shards", "new")
    monkeypatch.chdir(place)
    measured = Experiment.from_recipe("run/config.yaml", {"data.ood": "[code, new]"}).evaluate(checkpoint="run")
    assert measured[TAG] == pytest.approx(trained[1], abs=1e-6)
    assert measured["loss/ood/new"] > 0


def rows_of(place):
    """Rows for a task that are the training text."""
    (place / "rows").mkdir()
    (place / "rows/fda.jsonl").write_bytes((place / "shards/docs.jsonl").read_bytes())
    return [Cloze("fda", folder=str(place / "rows"))]


@pytest.mark.parametrize("root", ["nowhere", "s3://bucket/shards"])
def test_rows_of_the_training_are_known_without_its_text(place, root):
    rows = rows_of(place)
    config = place / "run/config.yaml"
    config.write_text(config.read_text().replace("root: shards", f"root: {root}"))
    shutil.rmtree(place / "shards")
    with pytest.raises(UserError, match=r"fda\.jsonl is docs\.jsonl of docs, which the model was trained on"):
        evaluate_checkpoint(place / "run", rows)


def change(run, **entries):
    """Write other notes into the newest checkpoint; `None` removes one."""
    path = newest_checkpoint(run)
    assert path is not None
    content = torch.load(path, weights_only=True)
    notes = {**content["seqarch"], **entries}
    content["seqarch"] = {name: note for name, note in notes.items() if note is not None}
    torch.save(content, path)


def test_a_checkpoint_of_an_earlier_version_is_compared_with_the_text_of_its_run(place, monkeypatch):
    rows, run = rows_of(place), place / "run"
    change(run, sources=None, root=None, folder=None, folder_from_run=None)
    with pytest.warns(SeqarchWarning, match="does not say which files it was trained on"), pytest.raises(UserError):
        evaluate_checkpoint(run, rows)  # for its rows, which are not those of the task
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match="which the model was trained on"):
        evaluate_checkpoint(run, rows)


@pytest.mark.parametrize("notes", [{"hold_outs": []}, {"sources": 3}, {"folder": ["/"]}, {"root": {}}], ids=str)
def test_notes_of_other_types_are_refused(place, notes):
    change(place / "run", **notes)
    with pytest.raises(UserError, match=f"is not a checkpoint of seqarch: {next(iter(notes))} is"):
        evaluate_checkpoint(place / "run", [LossByDomain()])


def test_a_tensor_is_no_checkpoint() -> None:
    with pytest.raises(UserError, match=r"a\.ckpt is not a checkpoint of seqarch: it does not hold the entries of one"):
        check_entries(torch.ones(3), "a.ckpt")
