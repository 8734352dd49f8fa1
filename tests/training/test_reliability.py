"""What a run does if the disk is full, rows are lost, or it is started twice."""

import csv
import errno
import json
import resource
import shutil
import subprocess

import pytest
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seqarch import cli
from seqarch.errors import SeqarchWarning, UserError
from seqarch.report.runs import load_run
from seqarch.runs.curves import read_curves
from seqarch.runs.folder import checkpoints, status
from seqarch.training.callbacks import checkpoint
from tests import processes
from tests.conftest import MODEL, TINY, flags
from tests.report.runs_for_tests import write_run
from tests.training.interrupt import kill, stop_at

pytestmark = pytest.mark.commands


def full(path):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(fit, tmp_path, monkeypatch):
    """The last checkpoint stays, no half file is left, and the same command continues once there is room."""
    seal = checkpoint.seal
    monkeypatch.setattr(checkpoint, "seal", lambda path: full(path) if "04" in path.name else seal(path))
    before = tmp_path / "run/checkpoints/step_00000002.ckpt"
    with pytest.raises(
        UserError, match=f"cannot write .*04.ckpt: No space left .*; the same command resumes from {before}"
    ):
        fit()
    assert status(tmp_path / "run") == "failed"
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [before.name]


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("seqarch.cli.app.run", full)
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == "seqarch: error: No space left on device; make room, or choose another place\n"


@pytest.fixture
def small_files():
    """The system refuses to let a file grow beyond 20,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command", ["fit", "report", "prepare"])
def test_files_that_the_system_does_not_let_grow(command, shards, tmp_path, capsys, request):
    """Each command says in one line what it could not write, and leaves nothing half-written."""
    out = tmp_path / "out"
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": out}
    runs = [write_run(tmp_path / name, name) for name in "ab"]
    args = {
        "fit": ["fit", *flags(**options)],
        "report": ["report", *map(str, runs), f"--out={out}"],
        "prepare": ["data", "prepare", str(shards / "docs.jsonl"), f"--out={out}", "--domain=d", "--tokenizer=byte"],
    }[command]
    request.getfixturevalue("small_files")
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("seqarch: ")]
    assert "File too large" in said
    assert not list(out.rglob("*.partial"))


@pytest.fixture
def disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root may mount")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def make_read_only(disk):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


@pytest.fixture
def refused(capfd):
    """Runs a command that a disk stops; returns what it says."""

    def run(*args):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(arg) for arg in args])
        shown = capfd.readouterr().err
        (said,) = [line for line in shown.splitlines() if line.startswith("seqarch: ")]
        assert stop.value.code == 2
        assert "Exception" not in shown
        return said

    return run


def commands_that_write(shards, runs, disk, trained):
    options = {**TINY, **MODEL, "data.root": shards, "run_dir": disk / "new"}
    text = shards / "docs.jsonl"
    return [
        ["fit", *flags(**options)],
        ["report", *runs, f"--out={disk}/report"],
        ["data", "prepare", text, f"--out={disk}", "--domain=d", "--tokenizer=byte"],
        ["recipes", "copy", "quickstart", disk / "mine.yaml"],
        ["mixers", "new", "DiskMixer", f"--out={disk}/mine"],
        ["eval", f"--checkpoint={trained}", "--tasks=long", "--lengths=8", "--limit=2", f"--out={disk}/eval"],
    ]


@pytest.mark.parametrize("room", [0, 40_000])
def test_a_disk_without_room(disk, shards, tmp_path, refused, fit, room):
    runs = [write_run(tmp_path / "written", "run")]
    for command in commands_that_write(shards, runs, disk, fit())[: 3 if room else None]:
        (disk / "ballast").write_bytes(bytes(2**21 - room))
        assert "No space left on device" in refused(*command)
        assert not list(disk.rglob("*.partial"))
        for path in disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_disk_that_fills_up(disk, shards, refused):
    """The last checkpoint is whole, and the same command resumes from it once there is room."""
    args = flags(**{**TINY, **MODEL, "data.root": shards, "run_dir": disk / "run", "model.d_model": 64})
    assert "the same command resumes from" in refused("fit", *args)
    assert status(disk / "run") == "failed"
    assert [path.name for path in (disk / "run/checkpoints").iterdir()] == ["step_00000002.ckpt"]
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    cli.main(["fit", *args])
    assert status(disk / "run") == "finished"


def test_a_read_only_disk(disk, shards, tmp_path, refused, fit, capfd):
    """Nothing is written there, but existing files can be used."""
    shutil.copytree(fit(), disk / "run")
    make_read_only(disk)
    run, newest = disk / "run", disk / "run/checkpoints/step_00000004.ckpt"
    for command in commands_that_write(shards, [run], disk, run):
        assert "Read-only file system" in refused(*command)
    for command in (
        ["report", run, f"--out={tmp_path}/report"],
        ["eval", "--list"],
        ["eval", f"--checkpoint={run}", "--tasks=loss", f"--out={tmp_path}/eval"],
        ["validate", f"--config={run}/config.yaml", f"--ckpt_path={newest}"],
        ["generate", f"--checkpoint={newest}", "--prompt=a", "--max_new_tokens=1"],
        ["fit", *flags(**TINY, **MODEL), f"--data.root={shards}", f"--run_dir={tmp_path}/run"],
    ):
        cli.main([str(arg) for arg in command])
    assert "is already finished" in capfd.readouterr().out


def test_curves_are_on_disk_before_the_checkpoint_that_counts_on_them(fit, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr("seqarch.training.curves.sync", lambda path: order.append(path.name))
    monkeypatch.setattr("seqarch.runs.files.sync", lambda path: order.append(path.name))
    fit()
    checkpoints = [name for name in order if name.endswith(".ckpt.partial")]
    assert len(checkpoints) == 2
    for name in checkpoints:
        assert order[order.index(name) - 1] == "curves.csv"
        assert order[order.index(name) + 1] == "checkpoints"  # the name too


def test_a_second_fit_is_refused_and_leaves_the_first_alone(fit, tmp_path):
    (tmp_path / "run").mkdir()
    lock = FileLock(tmp_path / "run/lock")
    lock.acquire()
    (tmp_path / "run/run.json").write_text(json.dumps({"status": "running"}))
    with pytest.raises(UserError, match="trains into"):
        fit()
    assert status(tmp_path / "run") == "running"
    lock.release()
    fit()
    assert not (tmp_path / "run/lock").exists()


REFUSALS = {
    "before it reads the data": ({"data.root": "nowhere"}, "there is no folder 'nowhere'"),
    "before it makes the optimizer": ({"trainer.gradient_clip_val": "-1"}, "must be at least 0, not -1"),
    "before a gradient is clipped": ({"trainer.gradient_clip_algorithm": "value"}, "must be norm, as it is by default"),
    "before it reads a sequence": ({"model.learned_positions": "20"}, "learned_positions is 20: a sequence of 48"),
    "before it makes the loggers": ({"trainer.fast_dev_run": "true"}, "fast_dev_run"),
    "before a branch that cannot leave": ({"branches.at": "[0.5]"}, "set model.decay_share"),
    "before its first step": ({"trainer.max_time": "00:00:00:00"}, "no step was taken"),
}


@pytest.mark.parametrize(("wrong", "said"), REFUSALS.values(), ids=REFUSALS)
def test_nothing_is_left_of_a_run_that_is_refused(fit, tmp_path, wrong, said):
    with pytest.raises(UserError, match=said):
        fit("new/folder/run", **wrong)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    with pytest.raises(UserError, match=said):
        fit(**wrong)
    assert list(tmp_path.rglob("*")) == [tmp_path / "run", tmp_path / "run/tensorboard"]


def test_a_refused_resumption_leaves_the_run_as_it_was(fit, tmp_path, monkeypatch):
    stop_at(monkeypatch, 3, kill)
    with pytest.raises(RuntimeError):
        fit()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="there is no folder 'nowhere'"):
        fit(**{"data.root": "nowhere"})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_fit_that_is_refused_deletes_nothing_of_one_that_began_meanwhile(fit, tmp_path, monkeypatch):
    """Both found no folder; the first then wrote to it."""

    def setup(self, stage):
        (tmp_path / "run/events.out.tfevents.1.other.7.0").touch()
        (tmp_path / "run/curves.csv").touch()
        raise UserError("no data")

    monkeypatch.setattr("seqarch.data.datamodule.TextDataModule.setup", setup)
    with pytest.raises(UserError, match="no data"):
        fit()
    names = {path.name for path in tmp_path.rglob("*")}
    assert names == {"run", "events.out.tfevents.1.other.7.0", "curves.csv"}


def test_all_processes_of_a_second_fit_are_refused(shards, tmp_path):
    options = {**TINY, **MODEL, "trainer.devices": 2, "trainer.strategy": "ddp", "data.root": shards}
    (tmp_path / "run").mkdir()
    lock = FileLock(tmp_path / "run/lock")
    lock.acquire()
    ranks = processes.fit_in_two(flags(**options, run_dir=tmp_path / "run"), tmp_path / "logs")
    lock.release()
    for rank in ranks:
        assert rank.returncode == 2, rank.stderr
        (said,) = [line for line in rank.stderr.splitlines() if line.startswith("seqarch: ")]
        assert "another process trains into" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]


@pytest.mark.parametrize("file", ["config.yaml", "evaluations/step_00000002.npz"])
def test_what_the_first_process_cannot_write_ends_all(file, shards, tmp_path):
    """Before the first step and after it. The other process is then inside a collective operation."""
    options = {**TINY, **MODEL, "trainer.devices": 2, "trainer.strategy": "ddp", "data.root": shards}
    options["ood_loss.keep_sequences"] = "true"
    (tmp_path / f"run/{file}.partial").mkdir(parents=True)
    ranks = processes.fit_in_two(flags(**options, run_dir=tmp_path / "run"), tmp_path / "logs")
    for rank, why in zip(
        ranks, (f"{file}.partial", "the connection to another process of this run broke"), strict=True
    ):
        assert rank.returncode == 2, rank.stderr
        (said,) = [line for line in rank.stderr.splitlines() if line.startswith("seqarch: ")]
        assert why in said
        assert "Traceback" not in rank.stderr


@pytest.mark.parametrize("record", ["running", "gone"])
def test_a_run_that_was_killed_after_its_last_checkpoint_is_finished(fit, tmp_path, monkeypatch, record):
    with monkeypatch.context() as patch:
        patch.setattr("seqarch.training.run_folder.RunFolder.on_train_end", lambda *_: kill())
        with pytest.raises(RuntimeError):
            fit()
    if record == "gone":
        (tmp_path / "run/run.json").unlink()
    before = (tmp_path / "run/curves.csv").read_bytes()
    fit()
    assert status(tmp_path / "run") == "finished"
    assert load_run(tmp_path / "run").steps == 4
    assert (tmp_path / "run/curves.csv").read_bytes() == before


def test_run_json_that_is_removed_while_the_run_writes_is_there_at_its_end(fit, tmp_path, monkeypatch):
    stop_at(monkeypatch, 3, lambda *_: (tmp_path / "run/run.json").unlink())
    fit()
    assert status(tmp_path / "run") == "finished"


def test_rows_that_the_disk_lost_are_said(fit, tmp_path, monkeypatch):
    stop_at(monkeypatch, 3, kill)
    with pytest.raises(RuntimeError):
        fit()
    curves = tmp_path / "run/curves.csv"
    curves.write_text("".join(curves.read_text().splitlines(keepends=True)[:2]))
    with pytest.warns(SeqarchWarning, match="lacks 2 of the 3 rows that it had at step 2"):
        fit()


def test_tensorboard_shows_each_step_once(fit, tmp_path, monkeypatch):
    stop_at(monkeypatch, 3, kill)
    with pytest.raises(RuntimeError):
        fit(**{"checkpoint.every_n_steps": 2})
    fit(**{"checkpoint.every_n_steps": 2})
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss/train")] == [1, 2, 3, 4]
    assert not any("hp_metric" in tag for tag in events.Tags()["scalars"])


def test_a_run_of_an_earlier_version_keeps_its_folder_and_names_of_tensorboard(fit, tmp_path):
    (tmp_path / "run/tensorboard").mkdir(parents=True)
    fit(**{"trainer.max_steps": 1})
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert len(events.Scalars("learning_rate")) == 1
    assert [*(tmp_path / "run").glob("events*")] == []


def test_a_report_refuses_curves_that_changed_since_the_run_ended(fit, tmp_path):
    fit()
    curves = tmp_path / "run/curves.csv"
    whole = curves.read_text()
    loss = [*csv.DictReader(whole.splitlines())][-1]["loss/train"]
    curves.write_text(whole.replace(loss, f"9{loss[1:]}", 1))
    with pytest.raises(UserError, match=r"curves\.csv is not what the run had written when it ended: restore it"):
        load_run(tmp_path / "run")
    curves.write_text(whole)
    assert load_run(tmp_path / "run").steps == 4


def test_the_documented_repair_of_a_folder_that_two_runs_wrote(fit, tmp_path, monkeypatch):
    """docs/reliability.md: cut the curves at the named line, delete later checkpoints, continue."""
    stop_at(monkeypatch, 3, kill)
    with pytest.raises(RuntimeError):
        fit()
    curves = tmp_path / "run/curves.csv"
    lines = curves.read_text().splitlines(keepends=True)
    curves.write_text("".join([*lines[:3], *lines[1:]]))  # the second run's rows 0 to 3 follow the first run's 0 and 1
    with pytest.raises(UserError, match="expected a step above") as error:
        read_curves(curves)
    named = int(str(error.value).split(":")[1])
    kept = curves.read_text().splitlines(keepends=True)[: named - 1]
    curves.write_text("".join(kept))
    for path in checkpoints(tmp_path / "run"):
        if int(path.stem.removeprefix("step_")) > int(kept[-1].split(",")[0]):
            path.unlink()
    fit()
    found, step, _ = read_curves(curves)
    assert step == 4
    assert list(found["loss/train"].step) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("gradient_clip_val", -1, r"trainer\.gradient_clip_val must be at least 0, not -1"),
        ("limit_train_batches", 0, r"trainer\.limit_train_batches is 0, but samples follow"),
        ("limit_train_batches", 1, r"trainer\.limit_train_batches is 1, but samples follow"),
        ("limit_train_batches", 0.5, r"trainer\.limit_train_batches is 0\.5, but samples follow"),
        ("reload_dataloaders_every_n_epochs", 1, r"trainer\.reload_dataloaders_every_n_epochs is 1, but samples"),
        ("min_steps", 2, r"trainer\.min_steps is 2, but samples follow"),
        ("overfit_batches", 1, r"trainer\.overfit_batches is 1, but samples follow"),
        ("precision", "16-mixed", r"16-mixed scales gradients, .*: use bf16-mixed"),
        ("precision", "16", r"16-mixed scales gradients, .*: use bf16-mixed"),
    ],
)
def test_options_that_would_not_train(fit, option, value, message):
    with pytest.raises(UserError, match=message):
        fit(**{f"trainer.{option}": value})


def full_and_odd(runs, out):
    raise OSError(errno.ENOSPC, "No space left on device\x1b[2J")


def test_a_finished_run_on_a_read_only_disk(fit, tmp_path, monkeypatch, capsys):
    fit()
    monkeypatch.setattr("seqarch.experiment.run.report", full_and_odd)
    fit()
    assert "no plot      [Errno 28] No space left on device?[2J" in capsys.readouterr().out
