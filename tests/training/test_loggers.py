"""Lightning's loggers beside our curves, as a recipe or a flag names them: W&B offline, MLflow's file store, CSV."""

import csv
import importlib.util

import pytest
import yaml

from seqarch import cli
from seqarch.errors import UserError
from seqarch.runs.curves import read_rows


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
    from mlflow import MlflowClient

    run_dir = fit(**{"trainer.logger": "MLFlowLogger"})
    client = MlflowClient(f"file:{tmp_path / 'mlruns'}")
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params["data/sequence_length"] == "48"
    tags, loss = written(run_dir)
    assert {*run.data.metrics} == {tag.replace("/", ".") for tag in tags}
    assert run.data.metrics["loss.train"] == loss


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


def test_a_run_is_measured_without_the_package_of_its_logger(fit):
    run_dir = fit()
    logged = ["--config", str(run_dir / "config.yaml"), "--trainer.logger", "CometLogger"]
    cli.run(["validate", *logged, "--ckpt_path", str(run_dir / "checkpoints/step_00000004.ckpt")])
    with pytest.raises(UserError, match="pip install -U 'comet-ml"):
        cli.run(["fit", *logged, "--run_dir", "other"])
