"""Lightning's loggers beside our curves, as a recipe or a flag names them: W&B offline, MLflow's file store, CSV."""

import csv
import importlib.util

import lightning.pytorch.loggers
import pytest
import yaml

from seqarch import cli
from seqarch.errors import UserError
from seqarch.experiment.checks import user_errors_of_lightning
from seqarch.experiment.experiment import Experiment
from seqarch.runs.curves import read_rows
from seqarch.runs.folder import read_record, write_record
from seqarch.training.loggers import OURS, adapt_loggers
from tests.training.test_optimizers import interrupted


def need(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is in the extra `loggers`, whose packages take 140 MB")


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    """Loggers write to the folder of the test, reach no host and ask for no password."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def written(run_dir):
    """The tags of `curves.csv`, and the last loss of the training."""
    columns, rows = read_rows(run_dir / "curves.csv")
    return {*columns} - {"step"}, float(rows[-1]["loss/train"])


def client(folder):
    from mlflow import MlflowClient

    return MlflowClient(f"file:{folder / 'mlruns'}")


def ids(package, folder):
    """The ids of the runs that a package has logged to a folder."""
    if package == "wandb":
        return {log.stem.removeprefix("run-") for log in folder.glob("wandb/offline-run-*/*.wandb")}
    if package == "comet_ml":
        return {archive.name[:32] for archive in folder.glob("*.zip")}
    mlflow = client(folder)
    return {each.info.run_id for each in mlflow.search_runs([one.experiment_id for one in mlflow.search_experiments()])}


def test_csv_has_our_tags_and_the_whole_config(fit, tmp_path):
    run_dir = fit(**{"trainer.logger": "CSVLogger", "trainer.logger.save_dir": tmp_path / "csv"})
    (file,) = tmp_path.glob("csv/*/*/metrics.csv")
    rows = [*csv.DictReader(file.open())]
    tags, loss = written(run_dir)
    assert {*rows[0]} - {"step"} == tags
    assert [float(row["loss/train"]) for row in rows if row["loss/train"]][-1] == loss
    options = yaml.safe_load(file.with_name("hparams.yaml").read_text())
    assert options["data"]["sequence_length"] == 48
    assert options["model"]["d_model"] == 32
    assert options["trainer"]["logger"] is None


def test_wandb_offline_holds_config_name_and_tags(fit, tmp_path, monkeypatch):
    need("wandb")
    import wandb

    recipe = tmp_path / "logged.yaml"
    recipe.write_text("trainer: {logger: {class_path: WandbLogger, init_args: {project: p, offline: true}}}\n")
    found, finish = [], wandb.Run.finish

    def end(run, **options):
        found.append((run.name, dict(run.config), dict(run.summary)))
        finish(run, **options)

    monkeypatch.setattr(wandb.Run, "finish", end)
    run_dir = fit(config=recipe)
    ((name, config, summary),) = found
    assert name == "run"
    assert config["data"]["sequence_length"] == 48
    tags, loss = written(run_dir)
    assert tags <= summary.keys()
    assert summary["loss/train"] == loss
    assert wandb.run is None, "the next run of the process would be logged to this one"
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert log.stat().st_size > 10_000


def test_mlflow_file_store_holds_config_name_and_tags(fit, tmp_path):
    need("mlflow")
    run_dir = fit(**{"trainer.logger": "MLFlowLogger"})
    run = client(tmp_path).get_run(*ids("mlflow", tmp_path))
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params["data/sequence_length"] == "48"
    tags, loss = written(run_dir)
    assert {*run.data.metrics} == {tag.replace("/", ".") for tag in tags}
    assert run.data.metrics["loss.train"] == loss


@pytest.mark.parametrize(
    ("package", "logger", "folder"),
    [("wandb", "WandbLogger", ""), ("mlflow", "MLFlowLogger", "mlruns"), ("comet_ml", "CometLogger", None)],
)
def test_a_resumed_run_goes_on_in_the_same_run(package, logger, folder, fit, tmp_path, monkeypatch):
    """Also if it was killed and goes on with other micro-batches; a run in another folder is another one."""
    need(package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    # an absolute folder, since the packages remember relative ones for all runs of a process
    place = {} if folder is None else {"trainer.logger.save_dir": tmp_path / folder}
    options = {"trainer.logger": logger, **place}
    run_dir = fit(**options)
    (first,) = logged = ids(package, tmp_path)
    interrupted(run_dir)
    fit(**options, **{"data.micro_batch_size": 4})
    assert ids(package, tmp_path) == logged
    if package == "mlflow":
        steps = [each.step for each in client(tmp_path).get_metric_history(first, "loss.train")]
        assert sorted(steps) == [1, 2, 3, 3, 4, 4]
        assert client(tmp_path).get_run(first).info.status == "FINISHED"
    fit("other", **options)
    assert len(ids(package, tmp_path)) == 2


def test_an_id_that_is_none_is_one_line(fit):
    run_dir = fit()
    interrupted(run_dir)
    write_record(run_dir, {**read_record(run_dir), "loggers": {"Wandb": 1}})
    with pytest.raises(UserError, match="'loggers' must give an id for each logger"):
        fit()


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_logger_of_lightning_becomes_ours_by_any_of_its_names(name, tmp_path):
    short = f"lightning.pytorch.loggers.{name}"
    full = f"{vars(lightning.pytorch.loggers)[name].__module__}.{name}"
    for path in (name, short, full):
        options = Experiment.from_recipe("quickstart", {"trainer.logger": {"class_path": path}}).options
        adapt_loggers([options.trainer.logger], tmp_path)
        assert options.trainer.logger.class_path == f"seqarch.training.loggers.{OURS[name][0].__name__}"


def test_what_a_logger_lacks_is_one_line(fit, tmp_path, monkeypatch):
    need("wandb")
    import wandb
    from wandb.errors import UsageError

    def init(**options):
        raise UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UserError, match=r"trainer.logger: No API key configured. Use `wandb login` to log in"):
        fit(**{"trainer.logger": "WandbLogger"})
    assert not (tmp_path / "run").exists()


def test_the_reason_of_a_logger_is_not_cut():
    names = {}
    code = "def connect():\n    raise ValueError('\\nNo API key.\\nLog in.')"
    exec(compile(code, "site-packages/lightning/pytorch/loggers/some.py", "exec"), names)
    with pytest.raises(UserError, match=r"^trainer.logger: \s*No API key.\sLog in.$"), user_errors_of_lightning():
        names["connect"]()


@pytest.mark.skipif(importlib.util.find_spec("comet_ml") is not None, reason="Comet is installed")
def test_a_run_is_measured_without_the_package_of_its_logger(fit):
    run_dir = fit()
    logged = ["--config", str(run_dir / "config.yaml"), "--trainer.logger", "CometLogger"]
    cli.run(["validate", *logged, "--ckpt_path", str(run_dir / "checkpoints/step_00000004.ckpt")])
    with pytest.raises(UserError, match="pip install -U 'comet-ml"):
        cli.run(["fit", *logged, "--run_dir", "other"])
