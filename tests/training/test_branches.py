"""A branch equals the shorter run that it stands for, and does not change the run that it leaves."""

import csv
import re
import zipfile
from typing import Any

import pytest
import torch

from seqarch import cli
from seqarch.data.datamodule import TextDataModule
from seqarch.errors import UserError
from seqarch.runs.folder import branches, is_finished, read_record
from seqarch.training.callbacks.branches import Branches
from seqarch.training.run_folder import RunFolder, branch_steps
from tests import processes
from tests.conftest import MODEL, TINY, flags

pytestmark = pytest.mark.commands

STEPS = 12
SCHEDULE = {
    "model.warmup_steps": 2,
    "model.decay_share": 0.5,
    "train_loss.every_n_steps": 1,
    "checkpoint.every_n_steps": 4,
    "attention_entropy.every_n_steps": 0,
    "ood_loss.keep_sequences": "true",
}
BRANCHED = {**SCHEDULE, "trainer.max_steps": STEPS, "branches.at": "[0.5, 0.75]"}
"""Branches of 6 and 9 steps, which leave at steps 3 and 5 (half of 9 rounds to 4)."""


def curves(run, columns=None):
    with (run / "curves.csv").open(newline="") as file:
        rows = [{key: row[key] for key in row if key != "throughput/tokens_per_second"} for row in csv.DictReader(file)]
    return [{key: row[key] for key in columns} for row in rows] if columns else rows


def weights(run):
    (newest,) = sorted((run / "checkpoints").glob("step_*.ckpt"))[-1:]
    return torch.load(newest, weights_only=True)["state_dict"]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def branched(shards, tmp_path_factory):
    """The run folder of a run with branches, for tests that only read it."""
    run = tmp_path_factory.mktemp("runs") / "branched"
    options = {**TINY, **MODEL, **BRANCHED, "data.root": shards, "run_dir": run}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.experiment.run.report", lambda runs, out: [out / "index.html"])
        cli.run(["fit", *flags(**options)])
    return run


def test_trunk_does_not_notice_its_branches(fit, branched):
    alone = fit("alone", **{**BRANCHED, "branches.at": "null"})
    assert curves(branched) == curves(alone)
    assert equal(weights(branched), weights(alone))
    assert [branch.name for branch in branches(branched)] == ["step_00000006", "step_00000009"]
    assert is_finished(branched)


@pytest.mark.parametrize("steps", [6, 9])
def test_branch_is_a_run_of_fewer_steps(fit, branched, steps):
    branch, whole = branched / f"branches/step_{steps:08d}", fit("whole", **SCHEDULE, **{"trainer.max_steps": steps})
    assert curves(branch) == curves(whole)
    assert equal(weights(branch), weights(whole))
    assert is_finished(branch)
    record = read_record(branch)
    assert (record["name"], record["max_steps"]) == ("branched", steps)
    evaluated = sorted(path.name for path in (whole / "evaluations").iterdir())
    assert sorted(path.name for path in (branch / "evaluations").iterdir()) == evaluated


def test_the_checkpoints_where_branches_leave_have_their_checksum(fit):
    run = fit(**{**BRANCHED, "branches.at": "[0.5]", "checkpoint.keep": 9})
    for of in (run, run / "branches/step_00000006"):
        with zipfile.ZipFile(of / "checkpoints/step_00000003.ckpt") as archive:
            assert archive.comment.startswith(b"seqarch sha256 ")


def test_finished_run_with_branches_is_left_alone(fit, branched, capsys):
    before = {path: path.stat().st_mtime_ns for path in branched.rglob("*.c*")}
    fit(**BRANCHED, run_dir=branched)
    assert "already finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in branched.rglob("*.c*")} == before


def start(shards, run, **interruption):
    options = {**TINY, **MODEL, **BRANCHED, "data.root": shards, "run_dir": run}
    options["trainer.callbacks"] = "[tests.training.interrupt.Interrupt]"
    return processes.fit([*flags(**options), "--allow_code=tests"], run.parent / "logs", interruption)


def test_interrupted_run_goes_on_in_trunk_and_branch(shards, tmp_path, branched):
    """The steps are taken in the order 1 to 3, 4 to 6 of a branch, 4 to 5, 6 to 9 of a branch, 6 to 12."""
    in_branch, first_branch = tmp_path / "run/branches", "step_00000006"
    for signal, step, skip, where in (
        ("SIGTERM", 3, 0, "the trunk is told to stop where a branch leaves"),
        ("SIGTERM", 4, 0, "the branch is told to stop"),
        ("SIGKILL", 5, 0, "the branch is killed"),
        ("SIGKILL", 5, 1, "the trunk is killed"),
    ):
        interruption = {"INTERRUPT_STEP": str(step), "INTERRUPT_SIGNAL": signal, "INTERRUPT_SKIP": str(skip)}
        stopped = start(shards, tmp_path / "run", **interruption)
        assert stopped.returncode == (-9 if signal == "SIGKILL" else 0), (where, stopped.stderr)
        assert not is_finished(tmp_path / "run"), where
        assert is_finished(in_branch / first_branch) == (where == "the trunk is killed"), where
    resumed = start(shards, tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    for run in (".", "branches/step_00000006", "branches/step_00000009"):
        assert is_finished(tmp_path / "run" / run)
        assert curves(tmp_path / "run" / run) == curves(branched / run)


def test_two_processes_finish_trunk_and_branch_together(shards, tmp_path, branched):
    two = {"trainer.devices": 2, "trainer.strategy": "fsdp2"}
    late = {"trainer.callbacks": "[tests.training.interrupt.EndsLate]"}
    options = {**TINY, **MODEL, **BRANCHED, **two, **late, "data.root": shards, "run_dir": tmp_path / "run"}
    ranks = processes.fit_in_two([*flags(**options), "--allow_code=tests"], tmp_path / "logs")
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(rank.stderr for rank in ranks)
    for run in (".", "branches/step_00000006", "branches/step_00000009"):
        assert is_finished(tmp_path / "run" / run)
        assert curves(tmp_path / "run" / run, ["step"]) == curves(branched / run, ["step"])


@pytest.fixture
def started(monkeypatch):
    """The runs that begin at a checkpoint, each with its step, in the order in which they do."""
    starts, patched = [], RunFolder.on_load_checkpoint
    monkeypatch.setattr(
        RunFolder,
        "on_load_checkpoint",
        lambda folder, trainer, module, content: (
            starts.append((folder.path.name, content["global_step"])),
            patched(folder, trainer, module, content),
        ),
    )
    return starts


def test_a_trunk_from_a_given_checkpoint_goes_on_after_its_branch(fit, branched, started):
    """Not from the given checkpoint once more, whose steps after it would be trained again."""
    begun = fit("begun", **{**BRANCHED, "branches.at": "null", "checkpoint.keep": 9})
    run = fit(**{**BRANCHED, "branches.at": "[0.75]"}, ckpt_path=begun / "checkpoints/step_00000004.ckpt")
    assert started == [("run", 4), ("step_00000009", 5), ("run", 5)]
    assert equal(weights(run), weights(branched))


@pytest.mark.parametrize("killed_in", ["callbacks.branches.save_sealed", "run_folder.branch_config"])
def test_killed_before_a_branch_has_its_checkpoint(fit, branched, started, monkeypatch, killed_in):
    """The trunk makes the branch anew. By itself the branch would begin from random weights."""
    begun = fit("begun", **{**BRANCHED, "branches.at": "null", "checkpoint.keep": 9})
    options = {**BRANCHED, "branches.at": "[0.75]", "ckpt_path": begun / "checkpoints/step_00000004.ckpt"}
    with monkeypatch.context() as patch:
        patch.setattr(f"seqarch.training.{killed_in}", None)
        with pytest.raises(TypeError, match="not callable"):
            fit(**options)
    run = fit(**options)
    assert started == [("run", 4), ("run", 4), ("step_00000009", 5), ("run", 5)]
    assert all(equal(weights(run / each), weights(branched / each)) for each in (".", "branches/step_00000009"))


@pytest.mark.parametrize(("at", "length", "leaves", "step"), [(0.75, 9, 5, 8), (2 / 3, 8, 4, 4)])
def test_a_checkpoint_at_which_a_branch_has_left_is_refused(fit, tmp_path, at, length, leaves, step):
    begun = fit("begun", **{**BRANCHED, "branches.at": "null", "checkpoint.keep": 9})
    said = f"the checkpoint is of step {step}: name one before {leaves}, the start of a branch"
    with pytest.raises(UserError, match=re.escape(said)):
        fit(**{**BRANCHED, "branches.at": f"[{at}]"}, ckpt_path=begun / f"checkpoints/step_{step:08d}.ckpt")
    assert not (tmp_path / "run").exists()


def test_killed_where_a_branch_leaves_before_the_trunk_has_a_checkpoint(fit, monkeypatch, branched):
    """The trunk begins anew after its branch, from the weights that the seed draws."""
    with monkeypatch.context() as patch:
        patch.setattr("seqarch.training.callbacks.branches.shutil", None)  # copies the branch's checkpoint to the trunk
        with pytest.raises(AttributeError, match="copy2"):
            fit(**BRANCHED)
    run = fit(**BRANCHED)
    assert all(curves(run / each) == curves(branched / each) for each in (".", "branches/step_00000006"))


def test_a_branch_that_only_began_refuses_another_hold_out(fit, tmp_path, monkeypatch):
    """Its folder has the trunk's curves, and no record of a run yet."""
    with monkeypatch.context() as patch:
        patch.setattr("seqarch.training.callbacks.branches.shutil", None)
        with pytest.raises(AttributeError, match="copy2"):
            fit(**BRANCHED)
    monkeypatch.setattr(TextDataModule, "hold_out_checksums", lambda data: {"docs": "another", "code": "another"})
    with pytest.raises(
        UserError, match=r"another hold-out of 'docs' than \S+/branches/step_00000006: restore or rename it"
    ):
        fit(**BRANCHED)


def test_model_is_compiled_once_for_trunk_and_branches(fit, monkeypatch):
    """Graphs are counted without inductor, which would take a minute and change nothing here."""
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda self, graph, inputs: graph.forward)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs, leave = [], Branches.measure

    def count(*_):
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    monkeypatch.setattr(Branches, "measure", lambda *args: count() or leave(*args))
    fit(**{**BRANCHED, "model.compile": "true", "model.n_layers": 1})
    count()
    before, *later = graphs
    assert later == [before, before]
    assert before > 0


def test_branches_whose_last_step_is_not_measured_are_refused(fit, tmp_path):
    """Their finished models would have no losses, or those of a step at which their rate had not fallen."""
    with pytest.raises(UserError, match=r"which ood_loss\.at must measure: add 1, the last step"):
        fit(**BRANCHED, **{"ood_loss.at": "[0.3, 0.5]"})
    assert not (tmp_path / "run").exists()
    run = fit(**BRANCHED, **{"ood_loss.at": "[0.3, 1.0]"})
    for each, steps in ((".", ["4", "12"]), ("branches/step_00000006", ["6"]), ("branches/step_00000009", ["4", "9"])):
        assert [row["step"] for row in curves(run / each) if row["loss/in_domain"]] == steps


class Model:
    def __init__(self, decay_share, warmup_steps=10):
        self.decay_share, self.warmup_steps = decay_share, warmup_steps


def test_branches_leave_where_their_rate_falls():
    model: Any = Model(0.2)
    assert branch_steps([0.125, 0.5], model, 1000) == {100: 125, 400: 500}


@pytest.mark.parametrize(
    ("at", "model", "message"),
    [
        ([0.5], Model(None), "set model.decay_share"),
        ([0.5], Model(0), "set model.decay_share, such as 0.2"),
        ([0.01], Model(0.2), "a branch of 10 steps would leave at step 10"),
        ([0.5], Model(1.0, warmup_steps=0), "would leave at step 0, not .*: make its share larger, or .*decay_share"),
        ([0.11, 0.12], Model(0.2, warmup_steps=100), "runs of 110 and 120 steps would both decay from step 100"),
        ([0.5, 0.5001], Model(0.2), "runs of 500 and 500 steps would both decay from step 400"),
        ([0.9999], Model(0.2), "runs of 1000 and 1000 steps would both decay from step 800"),
    ],
)
def test_branches_that_cannot_be_are_refused(at, model, message):
    with pytest.raises(UserError, match=message):
        branch_steps(at, model, 1000)
